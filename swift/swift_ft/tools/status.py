"""`swift-ft status`, `events`, `jobs` and `logs`: what a coordinator knows of a job, of its past, of all jobs, and of a
job's log servers."""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import Parser, argument, command
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.coordinator_messages import OVER, as_json, inexact_words, rehearsal_words, state_name
from swift_ft.errors import UsageError
from swift_ft.log.placement import parse_server
from swift_ft.text import job_called, listed, show, table, tell, time_words

PATIENCE_S = 10.0
"""Seconds to wait for a coordinator that is being restarted; short, because a person waits."""
WATCH_S = 2.0
"""Seconds between two answers of --watch."""
WATCH_S_MAX = 86400.0
SILENT_S = 5.0
"""Seconds after which a log server that does not answer is shown as silent."""
OF_STATUS = """\
Shows what a job does: its state and what that waits for, the version of each rank, how far a replay is and how long it
will still take, and what ranks suspect. Without --job it is the only job, or the only one under way. If there are
several, they are listed."""
OF_EVENTS = """\
Shows a job's history: each generation (the newest 256) with its cause, its plan, and when it entered which state. It is
kept by the coordinator, and is complete after a restart of it."""
OF_JOBS = """\
Lists a coordinator's jobs, those under way first: state, generation, living ranks, version, newest checkpoint. With
tokens only the jobs that the token in $SWIFT_TOKEN_FILE is of."""
OF_LOGS = """\
Shows the log servers of a job, and on which of them each rank's streams are kept. A log server that is silent is given
up by the coordinator itself (--log-lost-s) if another one is left. With --lost it is given up now; with --add there is
one more, which is emptied of this job first. Both together replace a server. Either makes a new generation: ranks keep
their state, and the step under way is done again."""


def add_coordinator(parser: Parser) -> None:
    known = os.environ.get("SWIFT_COORDINATOR")
    parser.add_argument(
        "--coordinator",
        default=known,
        required=not known,
        metavar="HOST:PORT,...",
        help="the coordinator's address, or those of all that share a store; default: $SWIFT_COORDINATOR",
    )


def _parser(command: str, description: str) -> Parser:
    parser = Parser(prog=f"swift-ft {command}", description=description)
    add_coordinator(parser)
    if command == "jobs":
        parser.set_defaults(job="")
    else:
        parser.add_argument(
            "--job",
            type=argument(job_called),
            metavar="NAME",
            help="default: the only job, if there is one",
        )
    if command in ("status", "jobs"):
        parser.add_argument(
            "--watch",
            type=float,
            nargs="?",
            const=WATCH_S,
            metavar="SECONDS",
            help="show it again every few seconds (default %(const)s), until Ctrl-C",
        )
    else:
        parser.set_defaults(watch=None)
    parser.add_argument("--json", action="store_true", help="print the coordinator's whole answer as JSON")
    return parser


def _answer(
    given: argparse.Namespace,
    ask: Callable[[CoordinatorClient], Any],
    lines: Callable[[Any], Sequence[str]],
) -> int:
    """Asks the coordinator and prints the answer, with --watch again and again. A failed call is reported at once, and
    retried for `PATIENCE_S`, with --watch until it is answered. Raises ServiceError if the coordinator does not answer,
    UsageError if no job is named and there is not just one."""
    if given.watch is not None and not 0 < given.watch <= WATCH_S_MAX:
        raise UsageError(f"--watch {given.watch:g}: seconds, more than 0, at most {WATCH_S_MAX:g}")
    patience_s = PATIENCE_S if given.watch is None else math.inf
    client = CoordinatorClient(given.coordinator, given.job or "", patience_s=patience_s, tell=tell)
    try:
        while True:
            reply = ask(client)
            if given.watch is not None and not given.json and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")  # the cursor to the upper left, and the screen is empty
            if given.json:
                print(json.dumps(as_json(reply), indent=2 if given.watch is None else None))
            else:
                show(job_lines(reply) if isinstance(reply, pb.JobsReply) else lines(reply))
            if given.watch is None:
                return 0
            sys.stdout.flush()
            time.sleep(given.watch)
    finally:
        client.close()


def _only_job(client: CoordinatorClient) -> pb.JobsReply | None:
    """Makes the client's job the only one, of those under way if there are several. Returns the list of jobs if that
    leaves the choice open."""
    if client.job:
        return None
    reply = client.jobs()
    under_way = [job for job in reply.jobs if job.state not in OVER]
    chosen = under_way or reply.jobs
    if len(chosen) != 1 or reply.left_out:
        return reply
    client.job = chosen[0].job
    return None


def _check_only_job(client: CoordinatorClient) -> None:
    """Raises UsageError if no job is named and there is not just one."""
    if (several := _only_job(client)) is not None:
        names = listed(job.job for job in several.jobs)
        raise UsageError(f"name one of the jobs with --job: {names}" if names else "there are no jobs")


def _status(argv: Sequence[str]) -> int:
    given = _parser("status", OF_STATUS).parse_args(argv)

    def ask(client: CoordinatorClient) -> pb.StatusReply | pb.JobsReply:
        several = _only_job(client)
        return client.status() if several is None else several

    return _answer(given, ask, lines)


def _events(argv: Sequence[str]) -> int:
    given = _parser("events", OF_EVENTS).parse_args(argv)

    def ask(client: CoordinatorClient) -> pb.StatusReply:
        _check_only_job(client)
        return client.status(history=True)

    return _answer(given, ask, event_lines)


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
        _check_only_job(client)
        if lost or add:
            client.call(pb.ChangeLogServersRequest(lost=lost, add=add, add_host=host))
        return client.status()

    return _answer(given, ask, log_lines)


_COMMANDS = {"status": _status, "events": _events, "jobs": _jobs, "logs": _logs}


@command
def main(argv: Sequence[str], which: str = "status") -> int:
    return _COMMANDS[which](argv)


# A job.


def lines(status: pb.StatusReply) -> list[str]:
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
        whose = "its own, in --from-checkpoints" if view.from_job == view.job else f"job {view.from_job}"
        out.append(f"began with version {view.from_version} of {whose}")
    if goes_on := goes_on_words(view):
        out.append(goes_on)
    over = view.state in OVER
    members = {member.rank: member for member in view.members}
    for rank in status.ranks:
        if rank.rank in view.vacant:
            continue
        who = members.get(rank.rank, pb.Member())
        line = f"rank {rank.rank}: {'was ' if over else ''}process {who.pid} on {who.host}, version {rank.version}"
        if not over:
            line += f", heard {rank.lease_age_s:.1f} s ago"
        if rank.HasField("replay"):
            line += f"; {replay_words(rank.replay)}"
        if rank.HasField("unsaved"):
            line += f"; {unsaved_words(rank.unsaved, max(view.checkpoints, default=0))}"
        out.append(line)
    spares = {rank.rank for rank in status.ranks}
    out += [
        f"rank {slot}: its slot is vacant" + ("; its process is a spare" if slot in spares else "")
        for slot in view.vacant
    ]
    out += [suspicion_words(suspicion) for suspicion in status.suspicions if suspicion.told]
    return out + late_words([suspicion for suspicion in status.suspicions if not suspicion.told])


def goes_on_words(view: pb.View) -> str:
    """Returns the newest checkpoint, and the step at which training continues, if that is known."""
    newest = max(view.checkpoints, default=None)
    if view.state == pb.RECOVERING:
        step = f"goes on at step {view.plan.target_version}"
        return step if newest is None else f"newest checkpoint: version {newest}; {step}"
    if newest is None:
        over = view.state in (pb.FAILED, pb.STOPPED)
        begins = f"with a checkpoint of job {view.from_job}" if view.from_job else "at step 0"
        begins = f"at step {view.from_version}" if view.from_job == view.job != "" else begins
        return "no checkpoint is complete" + (f": started again it begins {begins}" if over else "")
    again = {
        pb.FAILED: f"; started again it goes on at step {newest}",
        pb.STOPPED: f"; started again it goes on at step {newest}",
        pb.FINISHED: f"; started again with more steps it goes on at step {newest}",
    }
    return f"newest checkpoint: version {newest}{again.get(view.state, '')}"


def suspicion_words(told: pb.Suspicion) -> str:
    if told.unfit:
        return f"rank {told.rank}: its place failed the health check {told.age_s:.0f} s ago ({told.reason})"
    return f"rank {told.rank} said {told.age_s:.0f} s ago: {told.reason}"


def late_words(late: Sequence[pb.Suspicion]) -> list[str]:
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


# A job's past.


def event_lines(status: pb.StatusReply) -> list[str]:
    out = []
    for generation in status.history:
        first = generation.entries[0]
        head = f"generation {generation.number}, {clock_words(first.at)}"
        out.append(f"{head}: {first.reason}" if first.reason else head)
        if generation.plan:
            out.append(f"  plan: {generation.plan}")
        told = [state_name(first.state)]
        for entry in generation.entries[1:]:
            told.append(f"{state_name(entry.state)} after {time_words(entry.at - first.at)}")
        out.append(f"  {', '.join(told)}")
        last = generation.entries[-1]
        if last.state in OVER and last.reason:
            out.append(f"  {last.reason}")
    oldest = status.history[0].number if status.history else status.view.generation + 1
    if oldest > 1:
        out.insert(0, f"generations before {oldest} are no longer known")
    return [
        f"job {status.view.job}: {state_name(status.view.state)}, generation {status.view.generation}",
        *out,
    ]


def clock_words(at: float) -> str:
    """Formats seconds since 1970 in this machine's time zone."""
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")


# All jobs.


def job_lines(reply: pb.JobsReply) -> list[str]:
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


def kept_by(view: pb.View) -> dict[str, list[str]]:
    """Returns address of a log server -> the ranks whose streams are kept there, as text."""
    kept: dict[str, list[str]] = {server.address: [] for server in view.log_places}
    for logs in view.log_copies:
        for number, address in enumerate(logs.servers):
            kept.setdefault(address, []).append(f"{logs.rank}{'' if number == 0 else ' (copy)'}")
    return kept


def log_lines(status: pb.StatusReply) -> list[str]:
    view, silent = status.view, {server.address: server.silent_s for server in status.log_servers}
    kept = kept_by(view)
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
