"""Drills: `swift-ft drill`, and its report. It runs in the tests' own process, and its launcher is forked: what is
imported there is imported once. Those of `test_drill.py` that are ended have a process of their own (`COMMAND`).
"""

import contextlib
import fcntl
import hashlib
import io
import json
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from swift_ft import cli, events
from swift_ft.lab.drill import run, timeline
from swift_ft.lab.drill.command import parse
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Twin
from swift_ft.lab.drill.verdict_checks import losses_of
from tests.integration.forked import CalmCluster, ForkedCluster, Forks
from tests.integration.trainer_world import until_over

STEPS, CHECKPOINT_EVERY = 15, 5
LEASE_S = 10.0
"""Of a rank, as the coordinator has it: 20 heartbeats."""
KILL_STEP = 7
"""Unless a test says another one."""
SHAPE = ["--model", "tiny", "--microbatches", "4"]
SHAPE += ["--steps", str(STEPS), "--checkpoint-every", str(CHECKPOINT_EVERY)]
COMMAND = [sys.executable, "-m", "swift_ft.cli", "drill", *SHAPE]


@dataclass
class Outcome:
    """What a drill left."""

    exit_code: int
    stdout: str
    stderr: str
    report: dict[str, Any] | None

    def explain(self) -> str:
        return f"exit code {self.exit_code}\n{self.stdout}\n{self.stderr}"


class Twins:
    """The failure-free runs of a test session, one for each configuration: made by the first test that needs it.

    They have no launcher. `test_drill.py` and `test_drill_replicas.py` have drills that make their own.
    """

    def __init__(self, place: Path, forks: Forks) -> None:
        self._place = place
        self._forks = forks

    def of(self, *arguments: str) -> Path:
        """For `--twin` of such a drill."""
        config = parse([*SHAPE, *arguments])
        identity = json.dumps(config.identity(), sort_keys=True)
        twin = self._place / hashlib.sha256(identity.encode()).hexdigest()[:16]
        with twin.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (twin / run.TWIN_FILE).exists():
                self._make(config, twin)
        return twin

    def _make(self, config: DrillConfig, twin: Path) -> None:
        place = Path(tempfile.mkdtemp(prefix=f"{twin.name}-", dir=self._place))
        cluster = CalmCluster(
            self._forks,
            place,
            ranks=config.topology.ranks,
            trainer_arguments=config.trainer_arguments(),
            digests_every=True,
        )
        with cluster:
            until_over(cluster)
        trace = events.read(place / "events")
        made = Twin(digests=run.read_digests(place / "digests"), exit_code=0, losses=losses_of(trace))
        assert not timeline.recoveries(trace)
        run.store_twin(config, made, twin)


def drill(*arguments: str, at: Path | None = None, twins: Twins | None = None) -> Outcome:
    """Runs one. Without `twins` it makes its own. `at`: where its report is written."""
    words = ["drill", *SHAPE, *arguments]
    if at is not None:
        words += ["--json", str(at / "report.json")]
    if twins is not None:
        words += ["--twin", str(twins.of(*arguments))]
    stdout, stderr = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with (
            mock.patch.object(run, "Cluster", ForkedCluster),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            code = cli.main(words)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    written = at is not None and (at / "report.json").exists()
    report = json.loads((at / "report.json").read_text()) if written else None
    return Outcome(code, stdout.getvalue(), stderr.getvalue(), report)


def newest_checkpoint(directory: Path) -> int:
    """Of a drill in `--directory`: the version that was complete when its last plan was made. Saving takes its time."""
    trace = events.read(directory / "run" / "events")
    planned = max(event["t"] for event in trace if event["event"] == "plan")
    saved = [e["version"] for e in trace if e["event"] == "checkpoint_complete" and e["t"] < planned]
    return int(max(saved))


def freed_by_the_notice(recovery: dict[str, Any]) -> None:
    """Nobody waited until a timeout ended it: the shortest is a lease, and whoever stands still for that long is
    fenced. (The notice itself takes 0.2 s on a quiet machine.)"""
    assert recovery["survivors_freed_seconds"] is not None
    assert recovery["survivors_freed_seconds"] < LEASE_S
    assert_no_lease_ended(recovery)


def assert_no_lease_ended(recovery: dict[str, Any]) -> None:
    assert not [reason for reason in recovery["reasons"] if "was silent for" in reason], recovery["reasons"]


def kills(*specs: str) -> list[str]:
    return [word for spec in specs for word in ("--kill", spec)]


def passed(outcome: Outcome) -> dict[str, Any]:
    """The report of a drill that must have passed."""
    assert outcome.exit_code == 0, outcome.explain()
    report = outcome.report
    assert report is not None
    assert report["verdict"] == "PASS"
    assert report["bitwise_equal"] is True
    assert report["survivors_kept"] is True
    assert report["negative_control"]["caught"] is True
    assert all(fault["fired"] for fault in report["faults"])
    return report


PHASES = ("forward", "backward", "reduce", "optimizer", "idle")


def shape(stages: int, replicas: int) -> list[str]:
    return ["--stages", str(stages), "--replicas", str(replicas)]


def spec(rank: int, phase: str, step: int = KILL_STEP) -> str:
    """A loss in that phase, in the second microbatch if it is of one."""
    where = ",microbatch=1" if phase in ("forward", "backward", "weights") else ""
    return f"rank={rank},step={step}{where},phase={phase}"


def calculated(outcome: Outcome) -> dict[str, Any]:
    """The report of a drill that drops batches: not exact, with every bit of an independent calculation."""
    assert outcome.exit_code == 0, outcome.explain()
    report = outcome.report
    assert report is not None
    assert (report["verdict"], report["exact"], report["survivors_kept"]) == ("PASS", False, True)
    assert report["shrink"]["compared_with"] == "an independent calculation"
    return report


def exact(outcome: Outcome, *targets: int) -> dict[str, Any]:
    """`targets`: to which versions its recoveries went back."""
    report = passed(outcome)
    assert report["exact"] is True
    assert report["survivors_kept"] is True
    assert [recovery["target_version"] for recovery in report["recoveries"]] == list(targets)
    return report
