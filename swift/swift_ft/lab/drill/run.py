"""Runs the job with and without faults and collects the evidence.

The run with faults: ranks inject their own faults. This loop follows the trace, kills the log server at its step, flips
the bit while a rank is held, and copies a segment file for the negative control. The failure-free twin: the same seed
and settings, with digests at every version. Kept in a directory, it serves many drills (`--twin`).
"""

import json
import os
import random
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.errors import LogError, UsageError
from swift_ft.fault_grammar import (
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptFault,
    LogLossFault,
    LogServerFault,
    fault_id,
)
from swift_ft.files import make_directory, read_given, write_whole
from swift_ft.lab.drill import faults, shrinking, timeline
from swift_ft.lab.drill.cluster import JOB, POLL_S, Cluster, Security
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence, Twin
from swift_ft.lab.drill.report_strategies import lossy_buckets
from swift_ft.lab.drill.verdict_checks import Digest, losses_of
from swift_ft.lab.failures import damage
from swift_ft.lab.failures.damage import EXTERNAL, HeldVictims, flip, segment_files
from swift_ft.log import segment
from swift_ft.text import tell

# Negative controls: a flipped bit in a log must be detected, or a PASS is meaningless.
#
# Every drill copies a segment file of its run, flips one bit of the copy and reads it back (`snapshot`,
# `flip_and_read`). `swift_ft.lab.failures.damage` flips bits of files in use.

FILES_TRIED_MAX = 32


def snapshot(log_directories: Sequence[Path], into: Path) -> Path | None:
    """Copies a segment file with at least one record and returns its path. None: there is none yet."""
    make_directory(into)
    files = (*segment_files(log_directories), *segment_files(log_directories, EXTERNAL))
    for path in files[:FILES_TRIED_MAX]:
        # The file's name is part of its format: it is the first sequence.
        copy = into / path.parent.name / path.name
        make_directory(copy.parent)
        try:
            shutil.copy(path, copy)  # with its mode
            if segment.scan(copy).records:
                return copy
        except (FileNotFoundError, LogError):
            # Trimmed while it was copied, or already corrupt, which the run itself must detect.
            pass
        copy.unlink(missing_ok=True)
    return None


def flip_and_read(copy: Path | None, seed: int) -> dict[str, Any]:
    """Returns `negative_control` of the report: whether a flipped bit is rejected where the intact file is readable."""
    if copy is None:
        return {"caught": None, "reason": "the run left no segment file to try it on"}
    whole = segment.scan(copy)
    bit = random.Random(seed).randrange(whole.end * 8)
    shown = {"file": f"{copy.parent.name}/{copy.name}", "bit": bit, "records": len(whole.records)}
    flip(copy, bit)
    try:
        segment.scan(copy)
    except LogError as error:
        # Without the directory: a report does not depend on where the run's files were.
        return {"caught": True, **shown, "refused": str(error).replace(f"{copy.parent}/", "")}
    finally:
        flip(copy, bit)
    return {"caught": False, **shown}


STALL_S = 90.0
"""Seconds without progress in the trace after which a run is cut off. Longer than any timeout in the run."""
HOLD_S = 10.0
"""Seconds that a held rank waits for its record to be corrupted. The runtime stops waiting for the drill later than
that."""
TOGETHER_S = 2.0
"""Seconds that victims of one step wait for each other, if one of them may depend on another that is held."""
ALL_THERE_S = 20.0
"""Seconds that they wait if all of them get there. Finite, because ranks do not wait forever either."""
_DIGESTS = re.compile(r"rank[0-9]+-v[0-9]+(-g[0-9]+)?\.json")
TWIN_FILE = "twin.json"
CALCULATION_S = 600.0
"""Timeout of the independent calculation of a drill that drops batches: one process computes the whole run."""
LOG_LOST_S = 6.0
"""Seconds after which a log server is given up, in drills that kill one for good."""
# Events that a hanging run may go on emitting.
_NO_PROGRESS = ("denied", "heartbeat_unanswered", "suspect", "token_renewed", "trim_failed")


class _Watch:
    """Follows one run to its end and keeps what its trace has shown so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.step = -1
        """The highest step that any rank has begun."""
        self.replayed = False
        """Whether a replay has begun."""
        self.present: frozenset[int] = frozenset()
        """Ranks that have joined and whose slot was not left vacant since."""
        self.saved = -1
        """The newest version whose checkpoints are durable on all ranks."""
        self._moved = time.monotonic()

    def follow(self, each_turn: Callable[[], None] = lambda: None) -> int | None:
        """Polls until the launcher exits and returns its exit code; None if the run stalls. Calls `each_turn` in each
        iteration."""
        while True:
            code = self.cluster.poll()
            for event in self.cluster.tail.read():
                self._see(event)
            each_turn()
            if code is not None:
                return code
            if time.monotonic() - self._moved > STALL_S:
                return None
            time.sleep(POLL_S)

    def _see(self, event: dict[str, Any]) -> None:
        if event["event"] == "step_begin" and not event.get("replay"):
            self.step = max(self.step, int(event["step"]))
        self.replayed = self.replayed or event["event"] == "replay_begin"
        if event["event"] == "checkpoint_complete":
            self.saved = max(self.saved, int(event["version"]))
        if event["event"] == "joined":
            self.present |= {int(event["rank"])}
        if event["event"] == "left_vacant":
            self.present -= {int(event["rank"])}
        if event["event"] not in _NO_PROGRESS:
            self._moved = time.monotonic()


class FaultedRun:
    def __init__(self, config: DrillConfig, directory: Path) -> None:
        self._config = config
        self._done: set[int] = set()
        self._copy: Path | None = None
        self._copy_tried = 0.0
        self.output = ""
        """The last lines of every process's output, if a run failed."""
        self.directory = directory
        self._cluster = Cluster(
            directory,
            ranks=config.topology.ranks,
            spares=config.spares if shrinking.is_replaced(config) else 0,
            max_restarts=None if shrinking.is_replaced(config) else 0,
            trainer_arguments=[*config.trainer_arguments(), *config.recovery_arguments()],
            faults=faults.to_environment(config),
            die_at=[
                (fault_id(index), fault.state.upper())
                for index, fault in enumerate(config.faults)
                if isinstance(fault, CoordinatorFault)
            ],
            settings={"SWIFT_REHEARSE": config.rehearse},
            security=Security(directory / "security", JOB) if config.secure else None,
            checkpoints=f"{config.checkpoint_dir.rstrip('/')}/drill-{secrets.token_hex(4)}"
            if config.checkpoint_dir
            else "",
            log_servers=config.log_servers,
            copies=config.copies,
            log_lost_s=LOG_LOST_S if any(isinstance(f, LogLossFault) for f in config.faults) else None,
        )
        self._held = HeldVictims(self._cluster.fault_directory, config.faults)
        self._watch = _Watch(self._cluster)

    def run(self, twin_directory: Path) -> Evidence:
        """Runs the job, and then its twin (`twin_of`), and returns the evidence."""
        _announce(f"{self._config.topology.steps} steps with faults")
        with self._cluster:
            code = self._watch.follow(self._turn)
            if code != 0:
                self.output = self._cluster.output_tail()
            if self._copy is None:
                self._copy = snapshot(self._cluster.log_directories, self.directory / "control")
        trace = events.read(self.directory / "events")
        twin = twin_of(self._config, twin_directory)
        self._add_output(twin.output)
        calculated = self._calculated(trace) if self._config.drops else {}
        return Evidence(
            events=trace,
            digests=read_digests(self.directory / "digests"),
            twin=twin,
            exit_code=code,
            negative_control=flip_and_read(self._copy, self._config.seed),
            calculated=calculated,
        )

    def _calculated(self, trace: list[dict[str, Any]]) -> dict[int, Digest]:
        """Runs `swift_ft.lab.drill.calculation` with the origins present in each step and the buckets of interrupted
        steps. Returns version -> digests; {} if it failed."""
        recoveries = timeline.recoveries(trace, self._config.topology.parts)
        absent = {
            step: sorted(timeline.vacant_at(step, recoveries)) for step in range(self._config.topology.steps)
        }
        out = self.directory / "calculated.json"
        command = [sys.executable, "-P", "-m", "swift_ft.lab.drill.calculation"]
        command += [*self._config.trainer_arguments(), "--absent", json.dumps(absent)]
        command += ["--cut", json.dumps(lossy_buckets(trace)), "--out", str(out)]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=CALCULATION_S,
                check=False,
            )
            problem = done.stderr
        except subprocess.TimeoutExpired:
            late = f"did not end within {CALCULATION_S:g} s: take fewer --steps"
            problem = f"the calculation to compare with {late}"
        if not out.exists():
            self._add_output(problem)
            return {}
        return {int(version): digests for version, digests in json.loads(out.read_text()).items()}

    def _add_output(self, problem: str) -> None:
        self.output = "\n".join(filter(None, [self.output, problem]))

    def _turn(self) -> None:
        for index, fault in enumerate(self._config.faults):
            if index in self._done:
                continue
            if isinstance(fault, LogServerFault) and self._watch.step >= (fault.step or 0):
                self._done.add(index)
                self._cluster.kill_log_server(fault_id(index))
            elif isinstance(fault, LogLossFault):
                due = self._watch.replayed if fault.step is None else self._watch.step >= fault.step
                if due:
                    self._done.add(index)
                    self._cluster.kill_log_server(fault_id(index), fault.server, for_good=True)
            elif isinstance(fault, CorruptFault | CorruptCheckpointFault):
                self._corrupt(index, fault)
        if self._config.grow and shrinking.has_grown(self._cluster, self._watch.present, self._config):
            self._cluster.release(shrinking.PAUSE)
        self._held.turn(self._done, self._patience_s)
        # By the third step the records of the first ones have been acknowledged.
        if self._copy is None and self._watch.step >= 2 and time.monotonic() - self._copy_tried > 0.2:
            self._copy_tried = time.monotonic()
            self._copy = snapshot(self._cluster.log_directories, self.directory / "control")

    def _patience_s(self, group: list[int], there: list[int]) -> float:
        all_come = faults.all_get_there([self._config.faults[n] for n in group], self._config.topology)
        return ALL_THERE_S if all_come else TOGETHER_S

    def _corrupt(self, index: int, fault: CorruptFault | CorruptCheckpointFault) -> None:
        """Flips the bit once its victim is held."""
        victim = faults.victim_of(fault, self._config.faults)
        assert victim is not None, "checked before"
        held = self._config.faults.index(victim)
        if not self._held.reached(held):
            return
        flipped = self._flip(fault)
        if flipped is None and self._held.waited_s(held) < HOLD_S:
            return
        if flipped is not None:
            self._cluster.trace("corrupted", id=fault_id(index), **flipped)
        self._done.add(index)

    def _flip(self, fault: CorruptFault | CorruptCheckpointFault) -> dict[str, Any] | None:
        """Flips the bit and describes it. Returns None if the record or checkpoint does not exist yet."""
        if isinstance(fault, CorruptCheckpointFault):
            newest = fault.step - fault.step % self._config.topology.checkpoint_every
            if self._watch.saved < newest:
                return None
            place = self.directory / "checkpoints" / JOB
            return damage.corrupt_checkpoint(place, fault.rank, newest, self._config.seed)
        stream = faults.corrupted_stream(fault, self._config)
        return damage.corrupt_stream(self._cluster.log_directories, stream, fault.step, self._config.seed)


def _announce(what: str) -> None:
    """Tells somebody who waits at a terminal what is run now."""
    if sys.stderr.isatty():
        tell(f"drill: {what}")


def read_digests(directory: Path) -> dict[str, Digest]:
    files = [path for path in directory.glob("*.json") if _DIGESTS.fullmatch(path.name) and path.is_file()]
    return {path.stem: json.loads(path.read_text()) for path in files}


def stored_twin(config: DrillConfig, directory: Path) -> Twin | None:
    """Returns the finished twin in `directory`, or None if there is none yet. Raises UsageError if it is of another
    run."""
    path = directory / TWIN_FILE
    if not path.exists():
        if any(directory.glob("*")):
            raise UsageError(f"--twin {directory}: neither a finished twin nor empty; give another directory")
        return None
    try:
        stored = json.loads(read_given(path, f"--twin {directory}: {TWIN_FILE}"))
        if stored["identity"] != json.loads(json.dumps(config.identity())):
            raise UsageError(
                f"--twin {directory}: made with other settings or versions; give another directory"
            )
        losses = {
            int(step): {int(dp_rank): float(value) for dp_rank, value in by.items()}
            for step, by in stored["losses"].items()
        }
        return Twin(digests=dict(stored["digests"]), exit_code=0, losses=losses)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"--twin {directory}: it is damaged; give another directory") from None


def twin_of(config: DrillConfig, directory: Path) -> Twin:
    """Returns the twin that is kept in `--twin`, or runs it in `directory`, and keeps it there."""
    if config.twin is None:
        return run_twin(config, directory)
    twin = stored_twin(config, config.twin)
    if twin is None:
        twin = run_twin(config, directory)
        store_twin(config, twin, config.twin)
    return twin


def run_twin(config: DrillConfig, directory: Path) -> Twin:
    """Runs the failure-free twin in `directory`."""
    _announce(f"{config.topology.steps} steps without a failure")
    cluster = Cluster(
        directory,
        ranks=config.topology.ranks,
        spares=0,
        trainer_arguments=config.trainer_arguments(),
        digests_every=True,
    )
    with cluster:
        code = _Watch(cluster).follow()
        output = cluster.output_tail() if code != 0 else ""
    trace = events.read(directory / "events")
    return Twin(
        digests=read_digests(directory / "digests"),
        exit_code=code,
        recoveries=len(timeline.recoveries(trace)),
        output=output,
        losses=losses_of(trace),
    )


def store_twin(config: DrillConfig, twin: Twin, directory: Path) -> None:
    if twin.exit_code == 0 and not twin.recoveries:
        stored = {"identity": config.identity(), "digests": twin.digests, "losses": twin.losses}
        make_directory(directory)
        write_whole(directory / TWIN_FILE, json.dumps(stored))
