"""`scripts/compat`: tries versions of torch and Python, and prints the table of docs/compatibility.md.

Each pair gets a virtual environment of its own, which is removed before the next one is made: a build with CUDA takes
6 GB. Rows that are in the file of --json are kept, unless their pair is tried again.
Exit codes: 0 every pair that was tried works or is refused; 1 one fails; 2 usage.
"""

import argparse
import signal
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from tests.compat import seams, table
from tests.compat.environment import Environment, Pair, Unavailable
from tests.compat.table import Row

TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.11", "3.12", "3.13")


def attempt(pair: Pair, place: Path, outputs: Path) -> Row:
    """One row; what tests, trainers and drills print goes to the directory `outputs`."""

    def say(what: str) -> None:
        print(f"torch {pair.torch}, Python {pair.python}: {what}", file=sys.stderr, flush=True)

    today = datetime.now(UTC).date().isoformat()
    row = {**asdict(pair), "date": today}
    say("installing")
    try:
        environment = Environment.make(pair, place)
    except Unavailable as error:
        return Row(**row, verdict=table.UNAVAILABLE, reason=str(error))
    try:
        reason, shards = seams.imported(environment)
    except TimeoutError as error:
        return Row(**row, verdict=table.FAILS, reason=str(error), build=environment.build)
    if reason:
        return Row(**row, verdict=table.REFUSED, reason=reason, build=environment.build)
    marks = "-floors" * pair.floors + "-overlay" * pair.overlay
    output = outputs / f"torch-{pair.torch}-python-{pair.python}{marks}.txt"
    say(f"tests, trainers and drills; what they print: {output}")
    suite = seams.suite(environment, output, floors=pair.floors)
    trainers = seams.trainers(environment, output, shards=shards)
    drills = seams.drills(environment, output)
    verdict, reason = table.judged(suite, trainers, drills)
    return Row(
        **row,
        verdict=verdict,
        reason=reason,
        build=environment.build,
        suite=suite,
        trainers=trainers,
        drills=drills,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/compat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", action="append", metavar="V", help=f"default: {', '.join(TORCHES)}")
    parser.add_argument("--python", action="append", metavar="V", help=f"default: {', '.join(PYTHONS)}")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=True, help="the rows, also those of earlier runs"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="where environments are made, one at a time"
    )
    parser.add_argument(
        "--floors",
        action="store_true",
        help="with the oldest dependencies besides torch that pyproject.toml allows",
    )
    parser.add_argument(
        "--overlay",
        action="store_true",
        help="with torch.distributed.pipelining of this checkout's torch, for torch 2.11 (tests/gpu/overlay.py)",
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    rows, failed = table.read(arguments.json), False
    for python in arguments.python or PYTHONS:
        for torch in arguments.torch or TORCHES:
            with tempfile.TemporaryDirectory(prefix="swift-compat-", dir=arguments.directory) as place:
                pair = Pair(torch=torch, python=python, floors=arguments.floors, overlay=arguments.overlay)
                row = attempt(pair, Path(place) / "venv", arguments.json.parent)
            rows = table.with_row(rows, row)
            failed |= row.verdict == table.FAILS
            table.write(arguments.json, rows)
    print(table.markdown(rows), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
