"""What the commands have in common that ask a coordinator about a job."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift._pb import coordinator_pb2 as pb
from swift.arguments import Parser
from swift.control.client import CoordinatorClient
from swift.errors import SwiftError
from swift.words import show, tell

OVER = (pb.FINISHED, pb.FAILED, pb.STOPPED)
"""Ranks and log servers of a job in such a state are no longer listened to."""
PATIENCE_S = 10.0
"""Somebody waits for it: a coordinator that is being started again is waited for no longer."""


def parser_of(prog: str, description: str, json_help: str, *, of_job: bool = True) -> Parser:
    parser = Parser(prog=prog, description=description)
    known = os.environ.get("SWIFT_COORDINATOR")
    parser.add_argument(
        "--coordinator",
        default=known,
        required=not known,
        metavar="HOST:PORT",
        help="the coordinator's address; default: $SWIFT_COORDINATOR",
    )
    if of_job:
        parser.add_argument("--job", required=True, metavar="NAME")
    else:
        parser.set_defaults(job="")
    parser.add_argument("--json", action="store_true", help=json_help)
    return parser


def client_of(arguments: argparse.Namespace) -> CoordinatorClient:
    """The line to the coordinator. That it does not answer is said at once, and then tried for `PATIENCE_S`."""
    return CoordinatorClient(arguments.coordinator, arguments.job, patience_s=PATIENCE_S, tell=say)


def say(line: str) -> None:
    tell(line)


def answer(what: Mapping[str, Any] | Sequence[str]) -> None:
    """On stdout: lines for people, or fields for programs."""
    if isinstance(what, Mapping):
        print(json.dumps(what, indent=2))
    else:
        show(what)


def exit_code_of(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Errors are one line."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except SwiftError as error:
        tell(error)
        return error.exit_code
