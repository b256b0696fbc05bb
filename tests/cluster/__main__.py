"""`scripts/cluster`: the product on engines that operators run, started here as real processes, and killed.

Each engine has a module of its name beside this one. Rows of others that are in the file of --json are kept.
Exit codes: 0 every case passed; 1 one did not; 2 usage; 3 an engine cannot be had.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # a line for each process that is started, otherwise

from tests.cluster.rows import Row, markdown
from tests.frameworks.environment import Unavailable

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if not path.stem.startswith("_") and "def cases(" in path.read_text()
)


def attempt(name: str, only: str) -> Iterator[Row]:
    """Raises Unavailable."""
    for row in importlib.import_module(f"tests.cluster.{name}").cases(only):
        print(f"{name}: {row['case']}: {row['verdict']} {row['why']}".rstrip(), file=sys.stderr, flush=True)
        yield {"engine": name, **row}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", metavar="NAME", help=f"default: {', '.join(NAMES)}")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", required=True, help="the rows, also of earlier runs"
    )
    parser.add_argument("--only", default="", metavar="WORD", help="only cases with this word in their names")
    arguments = parser.parse_args(argv)
    wanted = arguments.engines or NAMES
    if unknown := set(wanted) - set(NAMES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    rows, code = [], 0
    if arguments.json.exists():
        rows = json.loads(arguments.json.read_text())["cases"]
    for name in wanted:
        found: list[Row] = []
        try:
            found.extend(attempt(name, arguments.only))
        except Unavailable as error:
            print(f"{name}: {error}", file=sys.stderr)
            code = code or 3
        if not found or any(row["verdict"] != "PASS" for row in found):
            code = code or 1
        done = {row["case"] for row in found}
        rows = [row for row in rows if row["engine"] != name or row["case"] not in done] + found
        arguments.json.write_text(json.dumps({"cases": rows}, indent=2) + "\n")
    print(markdown(rows), end="")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
