"""`swift-ft status`, `jobs` and `logs`: what a coordinator knows of a job, of all jobs, and of a job's log servers."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import Parser
from swift_ft.errors import SwiftError, UsageError
from swift_ft.log.placement import parse_server
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.rpc.codec import as_json
from swift_ft.rpc.views import inexact_words, rehearsal_words, state_name
from swift_ft.text import show, table, tell

OVER = (pb.FINISHED, pb.FAILED, pb.STOPPED)
"""States in which a job's ranks and log servers are no longer monitored."""
PATIENCE_S = 10.0
"""Seconds to wait for a coordinator that is being restarted; short, because a person waits."""
SILENT_S = 5.0
"""Seconds after which a log server that does not answer is shown as silent."""
OF_STATUS = """\
Shows what a job does: its state and what that waits for, the version of each rank, how far a replay is and how long it
will still take, and what ranks suspect."""
OF_JOBS = """\
Lists a coordinator's jobs, those under way first: state, generation, living ranks, version, newest checkpoint. With
tokens only the jobs that the token in $SWIFT_TOKEN_FILE is of."""
OF_LOGS = """\
Shows the log servers of a job, and on which of them each rank's streams are kept. A log server that is silent is given
up by the coordinator itself (--log-lost-s) if another one is left. With --lost it is given up now; with --add there is
one more, which is emptied of this job first. Both together replace a server. Either makes a new generation: ranks keep
their state, and the step under way is done again."""


def _parser(command: str, description: str) -> Parser:
    parser = Parser(prog=f"swift-ft {command}", description=description)
    known = os.environ.get("SWIFT_COORDINATOR")
    parser.add_argument(
        "--coordinator",
        default=known,
        required=not known,
        metavar="HOST:PORT",
        help="the coordinator's address; default: $SWIFT_COORDINATOR",
    )
    if command == "jobs":
        parser.set_defaults(job="")
    else:
        parser.add_argument("--job", required=True, metavar="NAME")
    parser.add_argument("--json", action="store_true", help="print the coordinator's whole answer as JSON")
    return parser


def _answer(
    given: argparse.Namespace,
    ask: Callable[[CoordinatorClient], Any],
    lines: Callable[[Any], Sequence[str]],
) -> int:
    """Asks the coordinator and prints the answer. A failed call is reported at once, and retried for `PATIENCE_S`.
    Raises ServiceError if the coordinator does not answer."""
    client = CoordinatorClient(given.coordinator, given.job, patience_s=PATIENCE_S, tell=tell)
    try:
        reply = ask(client)
    finally:
        client.close()
    if given.json:
        print(json.dumps(as_json(reply), indent=2))
    else:
        show(lines(reply))
    return 0


def _status(argv: Sequence[str]) -> int:
    given = _parser("status", OF_STATUS).parse_args(argv)
    return _answer(given, CoordinatorClient.status, lines)


def _jobs(argv: Sequence[str]) -> int:
    given = _parser("jobs", OF_JOBS).parse_args(argv)
    return _answer(given, CoordinatorClient.jobs, job_lines)


def _logs(argv: Sequence[str]) -> int:
    """Changes the log servers if requested, then prints the placement. Raises UsageError for flags that contradict each
    other."""
    parser = _parser("logs", OF_LOGS)
    parser.add_argument(
        "--lost", default="", metavar="HOST:PORT", help="give this log server up: it will not come back"
    )
    parser.add_argument(
        "--add",
        default="",
        metavar="[MACHINE=]HOST:PORT",
        help="use this log server from now on; with --lost, in place of the lost one",
    )
    given = parser.parse_args(argv)
    host, add = parse_server(given.add, "--add") if given.add else ("", "")
    lost = parse_server(given.lost, "--lost")[1] if given.lost else ""
    if lost and lost == add:
        raise UsageError(f"--lost and --add both name {lost}")

    def ask(client: CoordinatorClient) -> pb.StatusReply:
        if lost or add:
            client.call(pb.ChangeLogServersRequest(lost=lost, add=add, add_host=host))
        return client.status()

    return _answer(given, ask, log_lines)


_COMMANDS = {"status": _status, "jobs": _jobs, "logs": _logs}


def main(argv: Sequence[str] | None = None, command: str = "status") -> int:
    """Runs a command and returns its exit code. Errors are printed as one line."""
    try:
        return _COMMANDS[command](sys.argv[1:] if argv is None else argv)
    except SwiftError as error:
        tell(error)
        return error.exit_code


# A job.


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


# All jobs.


def job_lines(reply: pb.JobsReply) -> list[str]:
    """Returns the lines of the text output."""
    if not reply.jobs:
        return ["no jobs"]
    head = ("job", "state", "generation", "ranks", "version", "checkpoint", "")
    out = table([head, *map(_row, reply.jobs)], left=len(head))
    return out + ([f"and {reply.left_out} more"] if reply.left_out else [])


def _row(job: pb.JobSummary) -> tuple[str, ...]:
    checkpoint = str(job.checkpoint) if job.HasField("checkpoint") else "-"
    words = [f"waits for {job.waiting_for}"] if job.waiting_for else []
    if job.HasField("inexact_since"):
        words.append(f"not exact since version {job.inexact_since}")
    if job.reason and job.state != pb.RUNNING:
        words.append(job.reason)
    return (
        job.job,
        state_name(job.state),
        str(job.generation),
        f"{job.live_ranks}/{job.world_size}",
        str(job.version),
        checkpoint,
        "; ".join(words),
    )


# The log servers of a job.


def log_lines(status: pb.StatusReply) -> list[str]:
    """Returns the lines of the text output."""
    view, silent = status.view, {server.address: server.silent_s for server in status.log_servers}
    kept: dict[str, list[str]] = {server.address: [] for server in view.log_places}
    for logs in view.log_copies:
        for number, address in enumerate(logs.servers):
            kept.setdefault(address, []).append(f"{logs.rank}{'' if number == 0 else ' (copy)'}")
    out = [f"job {view.job}: {state_name(view.state)}, generation {view.generation}"]
    if view.waiting_for:
        out.append(f"waits for {view.waiting_for}")
    if view.groups:
        out.append(f"recovery groups {view.groups}")
    fewest = min((len(logs.servers) for logs in view.log_copies), default=view.copies_wanted)
    if fewest < view.copies_wanted:
        out.append(f"{fewest} of {view.copies_wanted} copies are kept: add a log server")
    for server in view.log_places:
        what = (
            f"lost: it {server.lost}" if server.lost else f"ranks {', '.join(kept[server.address]) or 'none'}"
        )
        if view.state not in OVER and silent.get(server.address, 0.0) > SILENT_S:
            what += f"; has not answered for {silent[server.address]:.0f} s"
        out.append(f"{server.address} on {server.host or 'an unknown machine'}: {what}")
    return out
