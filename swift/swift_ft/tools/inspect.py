"""`swift-ft inspect`: shows the contents of a log, of a running server or of a directory."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# gRPC reads this at import: otherwise its own messages about an absent server would appear next to ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from swift_ft.cli_parser import Parser, argument, command, local_directory
from swift_ft.credentials import advised
from swift_ft.errors import LogUnavailable, ServiceError, UsageError
from swift_ft.log import admin
from swift_ft.log.directory import (
    LIVES_S,
    age_s,
    check_directory,
    check_job,
    forget_job,
    owned,
    remove_forgotten,
)
from swift_ft.text import job_called, show, size_words, table, tell, time_words
from swift_ft.tools.log_contents import (
    MOVED,
    DirectoryLog,
    JobFacts,
    LogFacts,
    StreamFacts,
    served_facts,
)


def _steps_of(stream: StreamFacts) -> str:
    steps = "-" if stream.first_step is None else f"{stream.first_step} to {stream.last_step}"
    return steps if stream.unlogged is None else steps + " but {} to {}".format(*stream.unlogged)


def _state_of(stream: StreamFacts) -> str:
    problems = len(stream.problems)
    return f"{problems} problem{'s' if problems > 1 else ''}" if problems else "ok"


# Title of a column -> its cell. Texts are on the left of their column, numbers on the right.
_OF_JOB: Mapping[str, Callable[[JobFacts], str]] = {
    "job": lambda job: job.job,
    "generation": lambda job: str(job.generation),
    "trimmed below step": lambda job: str(job.trimmed_below_step),
    "streams": lambda job: str(len(job.streams)),
    "records": lambda job: str(job.records),
    "size": lambda job: size_words(job.bytes),
    "of": lambda job: size_words(job.limit_bytes) if job.limit_bytes else "-",
    "writers": lambda job: "-" if job.writers is None else str(job.writers),
    "idle": lambda job: time_words(job.idle_seconds),
}
_OF_STREAM: Mapping[str, Callable[[StreamFacts], str]] = {
    "stream": lambda stream: stream.stream,
    "first": lambda stream: str(stream.first_sequence),
    "durable": lambda stream: str(stream.durable_sequence),
    "appended": lambda stream: str(stream.appended_sequence),
    "records": lambda stream: str(stream.records),
    "size": lambda stream: size_words(stream.bytes),
    "steps": _steps_of,
    "segments": lambda stream: "-" if stream.segments is None else str(len(stream.segments)),
    "state": _state_of,
}
_LEFT = {"job", "stream", "state", "steps"}


def lines(facts: LogFacts) -> list[str]:
    streams = [(job.job, stream) for job in facts.jobs for stream in job.streams]
    moved = sum(each.ending == MOVED for _, stream in streams for each in stream.segments or [])
    moved_bytes = sum(stream.moved_bytes for _, stream in streams)
    alarms = [alarm for alarm in (facts.alarm, *(job.alarm for job in facts.jobs)) if alarm]
    return [
        _head(facts),
        *_table(_OF_JOB, [_cells(_OF_JOB, job) for job in facts.jobs]),
        *_table(("job", *_OF_STREAM), [[job, *_cells(_OF_STREAM, stream)] for job, stream in streams]),
        *([f"in {facts.cold}: {moved} segments, {size_words(moved_bytes)}"] if facts.cold else []),
        *(f"alarm: {alarm}" for alarm in alarms),
        *(f"problem: {problem}" for problem in facts.problems() if facts.verified is None),
    ]


def _cells(columns: Mapping[str, Callable[[Any], str]], row: object) -> list[str]:
    return [cell(row) for cell in columns.values()]


def _head(facts: LogFacts) -> str:
    of = f" of {size_words(facts.limit_bytes)} that it may" if facts.limit_bytes else ""
    words = {True: "a log server runs on it", False: "no log server runs on it", None: ""}
    runs = f"; {words[facts.server_runs]}" if words[facts.server_runs] and ":" not in facts.source else ""
    return f"{facts.source} keeps {size_words(facts.used_bytes)}{of}{runs}"


def _table(columns: Iterable[str], rows: Sequence[Sequence[str]]) -> list[str]:
    names = list(columns)
    left = [at for at, name in enumerate(names) if name in _LEFT]
    return ["", *table([names, *rows], left)] if rows else []


EXIT_DAMAGE = 1
TIMEOUT_S_MAX = 3600.0


def _check(given: argparse.Namespace) -> None:
    if (given.directory is None) == (not given.server):
        raise UsageError("give --directory DIR or --server HOST:PORT, one of them")
    if given.verify and given.directory is None:
        raise UsageError("--verify reads files: give --directory; a server may be running there")
    if given.drop_job and given.verify:
        raise UsageError("--drop-job goes alone")
    if given.force and not given.drop_job:
        raise UsageError("--force is for --drop-job")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        raise UsageError(f"there is no directory {given.json.absolute().parent}")
    if not 0 < given.timeout_s <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout-s must be positive, at most {TIMEOUT_S_MAX:g}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="swift-ft inspect",
        description="Shows what is in the log, verifies it, drops the log of a job.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="exit codes: 0 done, 1 something is damaged, 2 usage, 3 the server or the disk does not allow it",
    )
    parser.add_argument(
        "--directory",
        type=argument(local_directory),
        metavar="DIR",
        help="a log server's directory; the server may be running",
    )
    parser.add_argument("--server", default="", metavar="HOST:PORT", help="ask a running log server")
    parser.add_argument("--job", type=argument(job_called), help="only this job")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every record, down to its digest; print a line for each damage",
    )
    parser.add_argument(
        "--drop-job",
        type=argument(job_called),
        metavar="JOB",
        help="delete a job's log: its records, its generation, its trim",
    )
    parser.add_argument("--force", action="store_true", help="drop the job even if it may live")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write what is shown as JSON, for programs")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=10.0,
        help="how long to wait for a server's answer; default %(default)s",
    )
    given = parser.parse_args(argv)
    _check(given)
    given.job = given.job or ""
    return given


def run(config: argparse.Namespace) -> int:
    if config.drop_job:
        return _drop(config)
    if config.directory is not None:
        facts = DirectoryLog(config.directory).facts(config.job, config.verify)
    else:
        facts = served_facts(config.server, config.timeout_s, config.job)
    _write_json(config.json, asdict(facts))
    show(lines(facts))
    return _verdict(facts)


def _verdict(facts: LogFacts) -> int:
    if facts.verified is not None:
        count = len(facts.verified.damage)
        words = f"{count} damaged" if count else "all is well"
        checked = f"{facts.verified.records} records, {size_words(facts.verified.bytes)}"
        show([*(f"damaged: {line}" for line in facts.verified.damage), "", f"verified {checked}: {words}"])
        return EXIT_DAMAGE if count else 0
    problems = [job.problem for job in facts.jobs if job.problem]
    for problem in problems:
        tell(problem, "inspect")
    return EXIT_DAMAGE if problems else 0


def _drop(config: argparse.Namespace) -> int:
    job = config.drop_job
    if config.directory is None:
        records, size = admin.drop(config.server, job, config.timeout_s, force=config.force)
    else:
        records, size = _drop_offline(config.directory, job, config.force)
    _write_json(config.json, {"dropped": job, "records": records, "bytes": size})
    print(f"job {job} is dropped: {records} records, {size_words(size)}")
    return 0


def _drop_offline(directory: Path, job: str, force: bool) -> tuple[int, int]:
    check_directory(directory)
    with owned(directory):
        check_job(directory, job)
        touched_s = age_s(directory, job) or 0.0
        if touched_s < LIVES_S and not force:
            raise ServiceError(
                f"job {job} was written {touched_s:.0f} s ago, and its coordinator may come back to it: end it, "
                f"wait {LIVES_S - touched_s:.0f} s, then drop it; or add --force"
            )
        (facts,) = DirectoryLog(directory).facts(job).jobs
        forget_job(directory, job)
        remove_forgotten(directory)
    return facts.records, facts.bytes


def _write_json(path: Path | None, values: object) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(values, indent=1) + "\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another place") from None


@command
def main(argv: Sequence[str]) -> int:
    config = parse(argv)
    try:
        return run(config)
    except LogUnavailable as error:
        raise LogUnavailable(advised(config.server, str(error))) from None
