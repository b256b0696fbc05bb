"""What the commands have in common that ask a coordinator about a job."""

import sys
from collections.abc import Callable, Sequence

from swift.arguments import Parser
from swift.errors import SwiftError

PATIENCE_S = 10.0
"""Somebody waits for it: a coordinator that is being started again is waited for no longer."""


def parser_of(prog: str, description: str, json_help: str) -> Parser:
    parser = Parser(prog=prog, description=description)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--job", required=True, metavar="NAME")
    parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def exit_code_of(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Errors are one line."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except SwiftError as error:
        print(f"swift: {error}", file=sys.stderr)
        return error.exit_code
