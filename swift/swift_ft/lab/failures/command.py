"""`swift-ft failures`: shows the failures of a specification."""

from collections.abc import Sequence

from swift_ft.cli_parser import Parser, command
from swift_ft.errors import UsageError
from swift_ft.lab.failures import schedule
from swift_ft.text import show

DESCRIPTION = "Prints the failures of a swift-ft run --failures, one a line: a FILE that makes them again."


def make_parser() -> Parser:
    parser = Parser(prog="swift-ft failures", description=DESCRIPTION)
    parser.add_argument("failures", metavar="FILE|SPEC", help="as swift-ft run --failures takes it")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many ranks the job has")
    hosts = "how many of them are on a host (default %(default)s)"
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help=hosts)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(argv)
    if given.per_host < 1:
        raise UsageError("failures: --per-host must be at least 1")
    show(schedule.schedule_of(given.failures, given.ranks, given.per_host, "failures:").faults)
    return 0
