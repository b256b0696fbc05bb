"""`swift-ft failures`: shows the failures of a specification, and converts traces in other formats."""

import sys
from collections.abc import Sequence
from pathlib import Path

from swift_ft.cli_parser import Parser
from swift_ft.errors import SwiftError, UsageError
from swift_ft.lab.failures import schedule
from swift_ft.lab.failures import schedule as traces
from swift_ft.text import show, tell

DESCRIPTION = (
    "Shows the failures that swift-ft run --failures would make happen, and converts traces of failures."
)
FORMATS = ("infinitehbd",)


def make_parser() -> Parser:
    parser = Parser(prog="swift-ft failures", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Subparser)
    shown = commands.add_parser("show", help="print the failures, one a line: as a FILE, they are made again")
    shown.add_argument("failures", metavar="FILE|SPEC", help="as swift-ft run --failures takes it")
    shown.add_argument("--ranks", type=int, required=True, metavar="N", help="how many ranks the job has")
    shown.add_argument(
        "--per-host",
        type=int,
        default=1,
        metavar="N",
        help="how many of them are on a host (default %(default)s)",
    )
    converter = commands.add_parser("convert", help="write a trace that --failures takes, in CSV")
    converter.add_argument("input", metavar="FILE", type=Path, help="what is converted")
    converter.add_argument("output", metavar="CSV", type=Path, help="where the trace is written; - prints it")
    converter.add_argument(
        "--from", dest="form", choices=FORMATS, default=FORMATS[0], help="its format (default %(default)s)"
    )
    converter.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="CLASS",
        help='leave failures of this class out, such as "Stress Test Failure"; may be given several times',
    )
    return parser


class _Subparser(Parser):
    def __init__(self, **options: object) -> None:
        super().__init__(description=str(options.pop("help", "") or DESCRIPTION), **options)  # type: ignore[arg-type]


def main(argv: Sequence[str]) -> int:
    try:
        arguments = make_parser().parse_args(argv)
        if arguments.command == "show":
            return _show(arguments.failures, arguments.ranks, arguments.per_host)
        return _convert(arguments.input, arguments.output, arguments.without)
    except SwiftError as error:
        tell(error)
        return error.exit_code


def _show(given: str, ranks: int, per_host: int) -> int:
    if per_host < 1:
        raise UsageError("failures: --per-host must be at least 1")
    show(schedule.schedule_of(given, ranks, per_host, "failures:").faults)
    return 0


def _convert(source: Path, target: Path, without: Sequence[str]) -> int:
    found = traces.from_infinitehbd(source, without, "failures:")
    place = Path("/dev/stdout") if str(target) == "-" else target
    count = traces.write_trace(found, place, "failures:")
    nodes = len({outage.node for outage in found})
    print(f"{count} failures of {nodes} nodes", file=sys.stderr)
    return 0
