"""``swift-ft run --failures FILE|SPEC``: what is to fail, checked before anything is started, and the report behind it.

    (command) ``add_arguments`` → ``schedule_of`` → ``planned`` → ``around`` the run

Whatever cannot be is refused in one line (exit code 2): a specification that makes no sense, a rank that is not there,
a service that is on another machine, a disk that must not be filled, a report that cannot be written.
"""

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from swift import events
from swift.errors import UsageError
from swift.failures import in_ranks, report, schedule
from swift.failures.grammar import (
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    FillFault,
    RankFault,
    fault_id,
)
from swift.failures.schedule import Schedule
from swift.launch import disk_filling, network_loss, services_here
from swift.launch.decisions import Outcome
from swift.launch.ranks import RankProgram, make_run_dir
from swift.launch.torch_names import LaunchConfig
from swift.words import tell

FLAG = "--failures"
REPORT = "failures.json"
_RESERVED_BYTES = 1 << 20
"""Of the disk, for the report at the end."""
_TOLD_BYTES_MAX = 120_000
"""Linux takes 128 KiB in one variable of the environment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The failures of this launcher's run."""

    schedule: Schedule
    run_dir: Path
    job: RankProgram

    @property
    def fault_directory(self) -> Path:
        return self.run_dir / "failures"

    @property
    def trace(self) -> Path:
        """Where all processes of the run write their events."""
        return Path(os.environ[events.ENV_EVENTS_DIR])


def add_arguments(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        FLAG,
        metavar="FILE|SPEC",
        help="Make these failures happen while the job runs: at coordinates (rank=2,step=17,phase=backward), drawn "
        "(every=weibull,shape=0.6,mtbf=40,until=200,seed=7), or by a trace. What was injected, and who noticed it "
        "after how long, is printed at the end and is in failures.json (docs/failures.md).",
    )


def schedule_of(args: argparse.Namespace, config: LaunchConfig) -> Schedule | None:
    """None: nothing is to fail. Raises UsageError."""
    if not args.failures:
        return None
    ranks, machines = config.nproc_per_node * config.max_nodes, config.max_nodes
    found = schedule.schedule_of(
        args.failures, ranks, per_host=config.nproc_per_node if machines > 1 else 1, flag=f"run: {FLAG}"
    )
    _check(found, args, alone=machines == 1)
    return found


def _check(found: Schedule, args: argparse.Namespace, *, alone: bool) -> None:
    """Raises UsageError, in one line, for what a run cannot make happen here."""
    flag = f"run: {FLAG}"
    for fault in found.faults:
        match fault:
            case RankFault(kind="hang", at_s=float()):
                raise UsageError(f"{flag} {fault}: a thread hangs at a place in a step: give step=N")
            case RankFault(kind="network", link=link):
                network_loss.check(link, flag)
            case CoordinatorFault(state=state) if state:
                raise UsageError(
                    f"{flag} {fault}: a state is known to the coordinator alone: give step=N (or use swift-ft drill)"
                )
            case CoordinatorFault() if alone:
                services_here.service_at(args.coordinator, f"{flag} {fault}: ").close()
            case CorruptFault(stream=""):
                raise UsageError(f"{flag} {fault}: name the stream (stream=s1.F)")
            case CorruptCheckpointFault() if args.checkpoint_dir is None:
                raise UsageError(f"{flag} {fault}: give --checkpoint-dir")
            case FillFault(directory=directory):
                disk_filling.check(directory, flag)


def planned(
    found: Schedule | None, run_dir: Path | None, log_dir: str | None, job: RankProgram
) -> Planned | None:
    """Makes the directories and the report, so that a disk without space is known now. Raises UsageError."""
    if found is None:
        return None
    told = _for_ranks(found)
    made = make_run_dir(log_dir, job.name) if run_dir is None else run_dir
    plan = Planned(schedule=found, run_dir=made, job=job)
    try:
        plan.fault_directory.mkdir()
        if not os.environ.get(events.ENV_EVENTS_DIR):
            os.environ[events.ENV_EVENTS_DIR] = str(made / "events")
        plan.trace.mkdir(parents=True, exist_ok=True)
        _write(plan, report.as_json(report.outcomes(found.faults, [], 0.0, {}), **_about(plan)))
        _reserve(made)
    except OSError as error:
        raise UsageError(
            f"run: --log-dir {made}: {error.strerror}: name a directory with space for the report of {FLAG}"
        ) from None
    os.environ[in_ranks.ENV_FAULTS_DIR] = str(plan.fault_directory)
    os.environ[in_ranks.ENV_FAULTS] = told
    return plan


def _for_ranks(found: Schedule) -> str:
    held = {index for group in in_ranks.held_together(found.faults) for index in group}
    told = []
    for index, fault in enumerate(found.faults):
        if isinstance(fault, RankFault | CorruptCopyFault) and getattr(fault, "at_s", None) is None:
            told.append(in_ranks.item(fault, fault_id(index), hold=index in held))
    text = json.dumps(told)
    if len(text) > _TOLD_BYTES_MAX:
        raise UsageError(
            f"run: {FLAG}: ranks can be told no more than {_TOLD_BYTES_MAX} bytes: give fewer failures"
        )
    return text


def _reserve(directory: Path) -> None:
    """OSError: there is not even so much space."""
    with (directory / f"{REPORT}.space").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _RESERVED_BYTES)


def around(plan: Planned | None, run: Callable[[], Outcome]) -> Outcome:
    """The run, with its failures, and the report of them behind it."""
    if plan is None:
        return run()
    from swift.launch.injector import Injector

    try:
        with Injector(plan) as injector:
            outcome = run()
    finally:
        with contextlib.suppress(OSError):
            (plan.run_dir / f"{REPORT}.space").unlink()
    found = report.outcomes(plan.schedule.faults, injector.trace(), injector.began, injector.why_not)
    for line in report.lines(found):
        tell(line)
    try:
        path = _write(plan, report.as_json(found, **_about(plan), exit_code=outcome.exit_code))
    except OSError as error:
        tell(f"run: {plan.run_dir / REPORT}: {error.strerror}: free space there, or name another --log-dir")
        return replace(outcome, exit_code=outcome.exit_code or UsageError.exit_code)
    tell(f"failures: the report is {path}; the same failures again: {FLAG} {shlex.quote(str(path))}")
    return outcome


def _about(plan: Planned) -> dict[str, object]:
    return {
        "job": plan.job.name,
        "command": f"swift-ft run {shlex.join(sys.argv[1:])}",
        "given": plan.schedule.given.splitlines(),
    }


def _write(plan: Planned, content: dict[str, object]) -> Path:
    """Whole or not at all. OSError."""
    path = plan.run_dir / REPORT
    aside = path.with_suffix(".part")
    with aside.open("w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    return path
