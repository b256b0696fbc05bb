"""`swift-ft bench imports`: time that a replacement saves if the fork server has its script's imports.

Two fork servers are compared: one has the imports that every rank needs, the other also the script's first imports, as
`swift-ft run` chooses them. In each round both fork a process that runs these imports. The time is from the order to
fork until they are done. The ratio is the median of the rounds' ratios.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.launch.children import Nursery
from swift_ft.launch.command import PRELOAD_DEFAULT
from swift_ft.launch.forkserver import imports_of
from swift_ft.launch.worker import Program

IMPORTS_DEFAULT = "import sympy, networkx\n"
"""Imports that stand for a trainer's own; both packages are installed with torch."""
PATIENCE_S = 120.0
_TOLD = "\nimport sys, time\nprint(time.clock_gettime(time.CLOCK_MONOTONIC), file=open(sys.argv[1], 'w'))\n"


class Side:
    """One fork server, and the processes forked from it."""

    def __init__(self, place: Path, imports: Sequence[str]) -> None:
        self._place = place
        unfit: list[str] = []
        self._nursery = Nursery(
            dict(os.environ), str(place), PRELOAD_DEFAULT, imports=",".join(imports), on_unfit=unfit.append
        )
        self._nursery.prepare()
        server = self._nursery._server
        if server is None:
            why = unfit[0] if unfit else "processes cannot be forked"
            raise ServiceError(f"there is no fork server here: {why}")
        self.chosen, self.left_out = server.chosen, server.left_out

    def once(self, script: Path) -> float:
        """Returns the seconds from the order to fork until the script's imports are done. Raises ServiceError if they
        fail or take too long."""
        told = self._place / "told"
        told.unlink(missing_ok=True)
        began = time.clock_gettime(time.CLOCK_MONOTONIC)
        child = self._nursery.spawn()
        assignment = Program(env={}, script=str(script), module=False, args=[str(told)], cwd=str(self._place))
        child.assign(0, assignment)
        while child.exit_code is None:
            if time.clock_gettime(time.CLOCK_MONOTONIC) - began > PATIENCE_S:
                raise ServiceError(f"the imports take more than {PATIENCE_S:g} s")
            self._nursery.wait(1.0)
        if child.exit_code or not told.exists():
            raise ServiceError(f"the imports ended with exit code {child.exit_code}")
        return float(told.read_text()) - began

    def close(self) -> None:
        self._nursery.close()


def measure(place: Path, text: str, imports: Sequence[str], rounds: int) -> dict[str, Any]:
    """Measures both sides in turn, after a warm-up round."""
    script = place / "imports.py"
    script.write_text(text + _TOLD)
    sides: list[Side] = []
    try:
        for wanted in ((), imports):
            sides.append(Side(place, wanted))
        pairs = [tuple(side.once(script) for side in sides) for _ in range(rounds + 1)][1:]
        chosen, left_out = sides[1].chosen, sides[1].left_out
    finally:
        for side in sides:
            side.close()
    return {
        "bench": "imports",
        "rounds": rounds,
        "chosen": chosen,
        "left_out": left_out,
        "without_s": statistics.median(without for without, _ in pairs),
        "with_s": statistics.median(having for _, having in pairs),
        "ratio": statistics.median(without / having for without, having in pairs),
    }


def table(result: dict[str, Any]) -> str:
    """Formats the result as text: the imports before the fork, and the time with and without them."""
    lines = [
        f"{result['machine']}; medians of {result['rounds']} rounds",
        "",
        f"imported before the fork: {', '.join(result['chosen']) or 'nothing'}",
        *(f"left to the script: {name} ({why})" for name, why in result["left_out"].items()),
        f"from the order to fork until the script has its imports: {result['without_s'] * 1000:.0f} ms without that, "
        f"{result['with_s'] * 1000:.0f} ms with it, {result['ratio']:.1f} times quicker",
    ]
    return "\n".join(lines)


def _text_of(names: Sequence[str]) -> str:
    modules = [name.partition(":") for name in names]
    return "".join(
        f"from {module} import {name}\n" if name else f"import {module}\n" for module, _, name in modules
    )


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench imports",
        description="Measures how much sooner a replacement has its script's imports if the fork server has them.",
    )
    output.add_json(parser)
    parser.add_argument(
        "--script",
        type=Path,
        metavar="PATH",
        help="a trainer, whose first imports are taken; it is not run (default: sympy, networkx)",
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if arguments.rounds < 1:
        raise UsageError("--rounds takes 1 or more")
    if arguments.script is not None and not arguments.script.is_file():
        raise UsageError(f"--script {arguments.script}: there is no such script")
    output.check_json(arguments.json)
    on = output.machine()
    with output.place(None) as temporary:
        place = Path(temporary)
        script = arguments.script
        if script is None:
            script = place / "default.py"
            script.write_text(IMPORTS_DEFAULT)
        imports = imports_of(str(script), str(script.resolve().parent))
        result = {"machine": on, **measure(place, _text_of(imports), imports, arguments.rounds)}
    print(table(result))
    output.write_json(arguments.json, result)
    return 0
