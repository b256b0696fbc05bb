"""`swift-ft status`: shows the current state of a job, as its coordinator sees it."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import Parser
from swift_ft.errors import SwiftError
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.rpc.codec import as_json
from swift_ft.rpc.views import inexact_words, rehearsal_words, state_name
from swift_ft.text import show, tell

# Shared code of the commands that query a coordinator.

OVER = (pb.FINISHED, pb.FAILED, pb.STOPPED)
"""States in which a job's ranks and log servers are no longer monitored."""
PATIENCE_S = 10.0
"""Seconds to wait for a coordinator that is being restarted; short, because a person waits."""


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
    """Returns the client of the coordinator. A failed call is reported at once, and retried for `PATIENCE_S`."""
    return CoordinatorClient(arguments.coordinator, arguments.job, patience_s=PATIENCE_S, tell=say)


def say(line: str) -> None:
    tell(line)


def answer(what: Mapping[str, Any] | Sequence[str]) -> None:
    """Prints on stdout: lines for people, or a mapping as JSON."""
    if isinstance(what, Mapping):
        print(json.dumps(what, indent=2))
    else:
        show(what)


def exit_code_of(run: Callable[[Sequence[str]], int], argv: Sequence[str] | None) -> int:
    """Runs a command and returns its exit code. Errors are printed as one line."""
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except SwiftError as error:
        tell(error)
        return error.exit_code


DESCRIPTION = """\
Shows what a job does: its state and what that waits for, the version of each rank, how far a replay is and how long it
will still take, and what ranks suspect."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code_of(run, argv)


def run(argv: Sequence[str]) -> int:
    """Runs the command: prints the job's state. Returns the exit code. Raises ServiceError if the coordinator does not
    answer."""
    parser = parser_of("swift-ft status", DESCRIPTION, "print the coordinator's whole answer as JSON")
    arguments = parser.parse_args(argv)
    client = client_of(arguments)
    try:
        status = client.status()
    finally:
        client.close()
    answer(as_json(status) if arguments.json else lines(status))
    return 0


def lines(status: pb.StatusReply) -> list[str]:
    """Returns the lines of the text output."""
    view = status.view
    out = [f"job {view.job}: {state_name(view.state)}, generation {view.generation}"]
    if view.reason:
        out.append(f"because {view.reason}")
    if view.waiting_for:
        out.append(f"waits for {view.waiting_for}")
    if view.state == pb.RECOVERING:
        out.append(f"plan: {view.plan.reason}")
    if inexact := inexact_words(view):
        out.append(inexact)
    out += rehearsal_words(view)
    if view.from_job:
        out.append(f"began with version {view.from_version} of job {view.from_job}")
    if goes_on := goes_on_words(view):
        out.append(goes_on)
    over = view.state in OVER
    members = {member.rank: member for member in view.members}
    for rank in status.ranks:
        who = members.get(rank.rank, pb.Member())
        line = f"rank {rank.rank}: {'was ' if over else ''}process {who.pid} on {who.host}, version {rank.version}"
        if not over:
            line += f", heard {rank.lease_age_s:.1f} s ago"
        if rank.HasField("replay"):
            line += f"; {replay_words(rank.replay)}"
        if rank.HasField("unsaved"):
            line += f"; {unsaved_words(rank.unsaved, max(view.checkpoints, default=0))}"
        out.append(line)
    out += [f"rank {slot}: its slot is vacant" for slot in view.vacant]
    out += [_told_words(suspicion) for suspicion in status.suspicions if suspicion.told]
    return out + _late_words([suspicion for suspicion in status.suspicions if not suspicion.told])


def goes_on_words(view: pb.View) -> str:
    """Returns the newest checkpoint, and the step at which training continues, if that is known."""
    newest = max(view.checkpoints, default=None)
    if view.state == pb.RECOVERING:
        step = f"goes on at step {view.plan.target_version}"
        return step if newest is None else f"newest checkpoint: version {newest}; {step}"
    if newest is None:
        over = view.state in (pb.FAILED, pb.STOPPED)
        begins = f"with a checkpoint of job {view.from_job}" if view.from_job else "at step 0"
        return "no checkpoint is complete" + (f": started again it begins {begins}" if over else "")
    again = {
        pb.FAILED: f"; started again it goes on at step {newest}",
        pb.STOPPED: f"; started again it goes on at step {newest}",
        pb.FINISHED: f"; started again with more steps it goes on at step {newest}",
    }
    return f"newest checkpoint: version {newest}{again.get(view.state, '')}"


def _told_words(told: pb.Suspicion) -> str:
    if told.unfit:
        return f"rank {told.rank}: its place failed the health check {told.age_s:.0f} s ago ({told.reason})"
    return f"rank {told.rank} said {told.age_s:.0f} s ago: {told.reason}"


def _late_words(late: Sequence[pb.Suspicion]) -> list[str]:
    """Returns a line per late rank. A rank that waits for a hanging rank is equally late, so several are not
    accused."""
    words = [f"rank {suspicion.rank}: {suspicion.reason}" for suspicion in late]
    return words if len(late) < 2 else [*words, "one of these hangs, or something that they all wait for"]


def unsaved_words(unsaved: pb.UnsavedCheckpoint, newest: int) -> str:
    return (
        f"cannot write the checkpoint of version {unsaved.version} ({unsaved.reason}); "
        f"the one of version {newest} stands"
    )


def replay_words(replay: pb.ReplayProgress) -> str:
    left = f"about {replay.seconds_left:.1f} s left" if replay.HasField("seconds_left") else "no pace yet"
    return f"replays: version {replay.version} of {replay.target}, {left}"
