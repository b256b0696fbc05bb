"""Executes one cell as real processes: services, launcher and ranks on loopback. Evaluates what the ranks wrote."""

import json
import os
import shlex
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import marks as marks_of
from swift_ft.lab.bench.output import await_end
from swift_ft.lab.drill.cluster import Cluster, Process, own_environment
from swift_ft.lab.failures.schedule import schedule_of
from swift_ft.lab.study.settings import PLAIN, RANKS, STRATEGIES, Cell, Settings, failures_spec

TRAINERS = "swift_ft.lab.study.trainers"
LIMIT_S, LIMIT_STEP_S, LIMIT_FAILURE_S = 120.0, 0.5, 20.0
"""Time limits: for a run, for each of its steps, and for each failure in it."""
GRACE_S = 5.0
FAILED_WORDS = 300
Mark = Mapping[str, Any]


def run(cell: Cell, settings: Settings, directory: Path) -> dict[str, Any]:
    """Executes the cell and returns its result. For a failed run ``failed`` has the reason."""
    given = json.dumps(
        {
            "directory": str(directory),
            "task": cell.task,
            "seed": cell.seed,
            "steps": settings.steps,
            "checkpoint_every": settings.checkpoint_every,
        }
    )
    failures = planned(cell, settings)
    try:
        if cell.strategy == PLAIN:
            words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            words += ["--log-dir", os.devnull]  # else it leaves an empty directory after each run
            _run_process("torchrun", [*words, "-m", TRAINERS, "plain", given], settings, directory)
        else:
            _run_swift(cell, settings, given, directory, failures)
        marks = measured(marks_of.read(directory))
    except (ServiceError, ValueError) as error:
        return {"failed": " ".join(str(error).split())[:FAILED_WORDS], "planned": failures}
    happened: dict[str, Any] = {"injected": 0, "again_s": []}
    if failures:
        report = next(iter((directory / "launcher").glob("*/failures.json")), None)
        if report is None:
            return {"failed": "the launcher has not reported the failures", "planned": failures}
        told = json.loads(report.read_text())
        again = [failure["running_after_s"] for failure in told["failures"]]
        happened = {"injected": told["injected"], "again_s": [each for each in again if each is not None]}
    return {"planned": failures, **marks, **happened}


def planned(cell: Cell, settings: Settings) -> int:
    """Returns the number of failures drawn for the cell. Raises UsageError if a run may not have so many."""
    if cell.rate == 0.0:
        return 0
    try:
        return len(schedule_of(failures_spec(cell, settings.steps), RANKS, flag="study: --rates").faults)
    except UsageError as error:
        raise UsageError(f"{error}; that is cell {cell.name}") from None


def _run_process(name: str, words: Sequence[str], settings: Settings, directory: Path) -> None:
    """Runs a process to its end. Raises ServiceError, with the reason, if it fails."""
    env = own_environment() | {"OMP_NUM_THREADS": "1", **LOOPBACK}
    process = Process(name, words, env, directory / f"{name}.txt", directory, last=signal.SIGTERM)
    try:
        code = await_end(process.poll, LIMIT_S + LIMIT_STEP_S * settings.steps)
    finally:
        process.stop(GRACE_S)
    if code != 0:
        raise ServiceError(reason(process.tail(), f"exit code {code}"))


def _run_swift(cell: Cell, settings: Settings, given: str, directory: Path, failures: int) -> None:
    """Runs the cell under swift's launcher. Raises ServiceError, with the reason, if it fails."""
    strategy = STRATEGIES[cell.strategy]
    flags = list(strategy.flags)
    if strategy.repaired:
        # The health check delays every replacement process until the repair time is over.
        wait = shlex.join([sys.executable, "-S", "-c", f"import time; time.sleep({settings.repair_s})"])
        flags += ["--health-check", wait, "--health-check-s", str(settings.repair_s + 60)]
    if failures:
        flags += ["--failures", failures_spec(cell, settings.steps), "--log-dir", str(directory / "launcher")]
    with Cluster(
        directory / "cluster",
        ranks=RANKS,
        spares=0 if strategy.repaired else 1,
        trainer=("-m", TRAINERS, "with_swift"),
        trainer_arguments=[given],
        launcher_flags=flags,
    ) as cluster:
        limit_s = LIMIT_S + LIMIT_STEP_S * settings.steps + (LIMIT_FAILURE_S + settings.repair_s) * failures
        code = await_end(cluster.poll, limit_s)
        if code != 0:
            said = (directory / "cluster" / "output" / "launcher.txt").read_text(errors="replace")
            raise ServiceError(reason(said, f"exit code {code}"))


def reason(output: str, otherwise: str) -> str:
    """Returns the reason of a failed run from its output: the launcher's last line, or the last Python error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    report = ("swift: failures:", "swift:   ")  # the report of injected failures
    ours = [line for line in lines if line.startswith("swift: ") and not line.startswith(report)]
    errors = [line for line in lines if "Error: " in line]
    found = (ours or errors or [otherwise])[-1]
    return found.removeprefix("swift: ")


# --- evaluation of a run's marks ---


def measured(marks: Sequence[Mark]) -> dict[str, Any]:
    """Evaluates a finished run. Seconds count from the moment when all ranks had begun."""
    steps = [mark for mark in marks if mark["what"] == "stepped"]
    ends = [mark for mark in marks if mark["what"] == "ended"]
    if not ends or not steps:
        return {"failed": "it ended with exit code 0, and no rank came to its end"}
    began: dict[int, float] = {}
    for mark in marks:
        if mark["what"] == "begun":
            began.setdefault(mark["rank"], mark["at"])
    times: dict[int, float] = {}
    for mark in steps:
        times[mark["step"]] = max(mark["at"], times.get(mark["step"], 0.0))
    durations = [b - a for (s, a), (t, b) in pairwise(sorted(times.items())) if t == s + 1]
    done = Counter((mark["rank"], mark["step"]) for mark in steps)
    again = Counter[int]()
    for (rank, _), times_done in done.items():
        again[rank] += times_done - 1
    fewer = with_fewer(steps)
    return {
        "measured": ends[0]["measured"],
        "digests": sorted({mark["digest"] for mark in ends}),
        "train_s": max(times.values()) - max(began.values()),
        "step_s": statistics.median(durations[len(durations) // 10 :]),
        "peak_mib": max(mark["peak_mib"] for mark in ends),
        "steps_lost": max(again.values()),
        "batches_dropped": sum(RANKS - len(there) for _, there in fewer),
        "fewer": fewer,
    }


def with_fewer(steps: Sequence[Mark]) -> list[tuple[int, list[int]]]:
    """Returns the steps whose last execution lacked ranks in the update, each with the ranks that took part."""
    last = {mark["step"]: mark for mark in sorted(steps, key=lambda mark: mark["at"])}
    found = [(step, sorted(mark["parts"])) for step, mark in sorted(last.items())]
    return [(step, parts) for step, parts in found if len(parts) < RANKS]


def calculate(cell: Cell, settings: Settings, result: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Recomputes the cell in one process of plain torch (`trainers.alone`), and compares its bits with those of the
    run."""
    given = {"directory": str(directory), "task": cell.task, "seed": cell.seed, "steps": settings.steps}
    words = [TRAINERS, "alone", json.dumps({**given, "fewer": result["fewer"]})]
    about = {"cell": cell.name, "failures": result["injected"], "same_bits": False}
    about |= {name: result[name] for name in ("batches_dropped", "measured")}
    try:
        _run_process("alone", words, settings, directory)
    except ServiceError as error:
        return about | {"failed": str(error)}
    found = json.loads((directory / "alone.json").read_text())
    same = result["digests"] == [found["digest"]]
    return about | {"same_bits": same, "calculated": found["measured"]}
