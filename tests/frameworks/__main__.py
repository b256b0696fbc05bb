"""`scripts/frameworks`: trainers under other people's frameworks, killed, beside the same without a kill.

Each framework gets an environment of its own, which is kept in `.frameworks`: the second call installs nothing. Rows of
other frameworks that are in the file of --json are kept.
Exit codes: 0 every case came out as its trainer's header says; 1 one did not; 2 usage; 3 a framework cannot be had.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.frameworks import table
from tests.frameworks.environment import PINS, ROOT, Unavailable, ensure


def attempt(framework: str) -> list[table.Row]:
    """Raises Unavailable."""
    python = ensure(framework)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="swift-frameworks-") as place:
        path = Path(place) / "rows.jsonl"
        command = [python, "-m", "tests.frameworks.cases", framework, str(path)]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        return table.parsed(path.read_text())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/frameworks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("frameworks", nargs="*", metavar="NAME", help=f"default: {', '.join(PINS)}")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=True, help="the rows, also those of earlier runs"
    )
    arguments = parser.parse_args(argv)
    wanted = arguments.frameworks or list(PINS)
    if unknown := set(wanted) - set(PINS):
        parser.error(f"no such framework: {', '.join(sorted(unknown))}")
    rows, code = table.read(arguments.json), 0
    for framework in wanted:
        try:
            found = attempt(framework)
        except Unavailable as error:
            print(f"{framework}: {error}", file=sys.stderr)
            code = code or 3
            continue
        rows = [row for row in rows if row["framework"] != framework] + found
        table.write(arguments.json, rows)
        if not found or not all(row["expected"] for row in found):
            code = 1
    print(table.markdown(rows), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
