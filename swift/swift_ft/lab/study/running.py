"""Executes one cell as real processes: services, launcher and ranks on loopback. Evaluates what the ranks wrote."""

import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from swift_ft.comm import LOOPBACK
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.drill.cluster import Cluster, Process, own_environment
from swift_ft.lab.failures.schedule import schedule_of
from swift_ft.lab.study.settings import PLAIN, RANKS, STRATEGIES, Cell, Settings, failures_spec

LIMIT_S, LIMIT_STEP_S, LIMIT_FAILURE_S = 120.0, 0.5, 20.0
"""Time limits: for a run, for each of its steps, and for each failure in it."""
GRACE_S = 5.0
POLL_S = 0.1
CURVE_POINTS = 60
FAILED_WORDS = 300
Mark = Mapping[str, Any]


def run(cell: Cell, settings: Settings, directory: Path) -> dict[str, Any]:
    """Executes the cell and returns its result. For a failed run ``failed`` has the reason."""
    told = {
        "directory": str(directory),
        "task": cell.task,
        "seed": cell.seed,
        "steps": settings.steps,
        "checkpoint_every": settings.checkpoint_every,
    }
    planned = _planned(cell, settings)
    limit_s = LIMIT_S + LIMIT_STEP_S * settings.steps + (LIMIT_FAILURE_S + settings.repair_s) * planned
    try:
        if cell.strategy == PLAIN:
            code, tail = _run_plain(json.dumps(told), directory, limit_s)
        else:
            code, tail = _run_swift(cell, settings, json.dumps(told), directory, limit_s, planned)
    except ServiceError as error:
        first, *more = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"failed": ": ".join([first, *more[-1:]])[:FAILED_WORDS]}
    if code != 0:
        return {"failed": reason(tail, f"exit code {code}"), "planned": planned}
    happened = failures_of(directory)
    if planned and happened is None:
        return {"failed": "the launcher has not reported the failures", "planned": planned}
    try:
        marks = read_marks(directory)
    except ValueError as error:
        return {"failed": f"its marks cannot be read: {error}", "planned": planned}
    return {
        "planned": planned,
        **measured(marks),
        **(happened or {"injected": 0, "again_s": []}),
    }


def _planned(cell: Cell, settings: Settings) -> int:
    """Returns the number of failures drawn for the cell."""
    if cell.rate == 0.0:
        return 0
    return len(schedule_of(failures_spec(cell, settings.steps), RANKS, flag="study: --rates").faults)


def _run_plain(told: str, directory: Path, limit_s: float) -> tuple[int, str]:
    # Without --log-dir torchrun leaves an empty directory after each run.
    words = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), "--log-dir", os.devnull]
    words += ["-m", "swift_ft.lab.study.trainers.plain", told]
    env = own_environment() | {"OMP_NUM_THREADS": "1", **LOOPBACK}
    output = directory / "torchrun.txt"
    process = Process("torchrun", words, env, output, directory, last=signal.SIGTERM)
    try:
        return _end_of(process, limit_s), process.tail()
    finally:
        process.stop(GRACE_S)


def _run_swift(
    cell: Cell, settings: Settings, told: str, directory: Path, limit_s: float, planned: int
) -> tuple[int, str]:
    strategy = STRATEGIES[cell.strategy]
    flags = list(strategy.flags)
    if strategy.repaired:
        # The health check delays every replacement process until the repair time is over.
        wait = f"{sys.executable} -S -c 'import time; time.sleep({settings.repair_s})'"
        flags += ["--health-check", wait, "--health-check-s", str(settings.repair_s + 60)]
    if planned:
        flags += ["--failures", failures_spec(cell, settings.steps), "--log-dir", str(directory / "launcher")]
    with Cluster(
        directory / "cluster",
        ranks=RANKS,
        spares=strategy.spares,
        trainer=("-m", "swift_ft.lab.study.trainers.with_swift"),
        trainer_arguments=[told],
        launcher_flags=flags,
    ) as cluster:
        code = _end_of(cluster, limit_s)
        return code, (directory / "cluster" / "output" / "launcher.txt").read_text(errors="replace")


def _end_of(run: Process | Cluster, limit_s: float) -> int:
    """Waits for the end of the run. Returns its exit code. Raises ServiceError after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (code := run.poll()) is None:
        if time.monotonic() > deadline:
            raise ServiceError(f"not at its end after {limit_s:.0f} s")
        time.sleep(POLL_S)
    return code


def reason(output: str, otherwise: str) -> str:
    """Returns the reason of a failed run from its output: the launcher's last line, or the last Python error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    report = ("swift: failures:", "swift:   ")  # the report of injected failures
    ours = [line for line in lines if line.startswith("swift: ") and not line.startswith(report)]
    errors = [line for line in lines if "Error: " in line]
    found = (ours or errors or [otherwise])[-1]
    return found.removeprefix("swift: ")[:FAILED_WORDS]


# --- evaluation of a run's marks ---


def read_marks(directory: Path) -> list[dict[str, Any]]:
    """Reads the marks in order of time. Ignores an incomplete last line."""
    path = directory / "marks.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def measured(marks: Sequence[Mark]) -> dict[str, Any]:
    """Evaluates a finished run. Seconds count from the moment when all ranks had begun."""
    steps = [mark for mark in marks if mark["what"] == "stepped"]
    ends = [mark for mark in marks if mark["what"] == "ended"]
    if not ends or not steps:
        return {"failed": "it ended with exit code 0, and no rank came to its end"}
    digests = sorted({mark["digest"] for mark in ends})
    times: dict[int, float] = {}
    for mark in steps:
        times[mark["step"]] = max(mark["at"], times.get(mark["step"], 0.0))
    durations = [b - a for (s, a), (t, b) in pairwise(sorted(times.items())) if t == s + 1]
    done = Counter((mark["rank"], mark["step"]) for mark in steps)
    ranks = {mark["rank"] for mark in steps}
    again = {rank: sum(n - 1 for (who, _), n in done.items() if who == rank) for rank in ranks}
    fewer = with_fewer(steps)
    return {
        "measured": ends[0]["measured"],
        "digests": digests,
        "train_s": max(times.values()) - _began(marks),
        "step_s": statistics.median(durations[len(durations) // 10 :]),
        "peak_mib": max(mark["peak_mib"] for mark in ends),
        "steps_lost": max(again.values()),
        "batches_dropped": sum(RANKS - len(there) for _, there in fewer),
        "fewer": fewer,
        "losses": curve(steps),
    }


def with_fewer(steps: Sequence[Mark]) -> list[tuple[int, list[int]]]:
    """Returns the steps whose last execution lacked ranks in the update, each with the ranks that took part."""
    last: dict[int, Mark] = {}
    for mark in steps:
        if mark["step"] not in last or mark["at"] > last[mark["step"]]["at"]:
            last[mark["step"]] = mark
    found = [(step, sorted(mark["parts"])) for step, mark in sorted(last.items())]
    return [(step, parts) for step, parts in found if len(parts) < RANKS]


def calculate(cell: Cell, settings: Settings, result: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Recomputes the cell in one process of plain torch (`trainers.alone`), and compares its bits with those of the
    run."""
    given = {
        "directory": str(directory),
        "task": cell.task,
        "seed": cell.seed,
        "steps": settings.steps,
        "fewer": result["fewer"],
    }
    about = {
        "cell": cell.name,
        "failures": result["injected"],
        "batches_dropped": result["batches_dropped"],
        "same_bits": False,
        "measured": result["measured"],
    }
    words = ["swift_ft.lab.study.trainers.alone", json.dumps(given)]
    env = own_environment() | {"OMP_NUM_THREADS": "1"}
    process = Process("alone", words, env, directory / "alone.txt", directory)
    limit_s = LIMIT_S + LIMIT_STEP_S * settings.steps
    try:
        code = _end_of(process, limit_s)
        if code != 0:
            return about | {"failed": reason(process.tail(), f"exit code {code}")}
    except ServiceError as error:
        return about | {"failed": str(error)}
    finally:
        process.stop(GRACE_S)
    found = json.loads((directory / "alone.json").read_text())
    same = result["digests"] == [found["digest"]]
    return about | {"same_bits": same, "calculated": found["measured"]}


def _began(marks: Iterable[Mark]) -> float:
    first: dict[int, float] = {}
    for mark in marks:
        if mark["what"] == "begun":
            first.setdefault(mark["rank"], mark["at"])
    return max(first.values())


def curve(steps: Sequence[Mark]) -> list[list[float]]:
    """Returns [step, training loss]: means over the ranks and over several steps, each in its last execution."""
    last = {(mark["step"], mark["rank"]): mark["loss"] for mark in steps}
    end = max(step for step, _ in last) + 1
    width = max(1, -(-end // CURVE_POINTS))
    parts: dict[int, list[float]] = {}
    for (step, _), loss in last.items():
        parts.setdefault(step // width, []).append(loss)
    return [
        [part * width + (width - 1) / 2, round(statistics.fmean(parts[part]), 5)] for part in sorted(parts)
    ]


def failures_of(directory: Path) -> dict[str, Any] | None:
    """Reads from the launcher's report the number of failures, and the times until the job ran again. Returns None
    without a report."""
    found = next(iter((directory / "launcher").glob("*/failures.json")), None)
    if found is None:
        return None
    report = json.loads(found.read_text())
    again = [failure["running_after_s"] for failure in report["failures"]]
    return {"injected": report["injected"], "again_s": [each for each in again if each is not None]}


def check_failures(cells: Iterable[Cell], settings: Settings) -> None:
    """Raises UsageError if a seed draws more failures than a run may have."""
    for cell in cells:
        try:
            _planned(cell, settings)
        except UsageError as error:
            raise UsageError(f"{error}; that is cell {cell.name}") from None
