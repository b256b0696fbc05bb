"""The loop around the trainer's step: run, drop, replay, rejoin.

    FORMING      build groups, save version 0, Ready
    RUNNING      steps; every K steps a checkpoint
    (notice)     the step in flight is dropped
    PLANNING     log flushed under the new generation, Report
    RECOVERING   groups rebuilt; restore and replay as the plan says; Ready
    RUNNING      on, at the plan's target version

What a member says in a state it says again until the View moves on: the coordinator may have been restarted.
"""

import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.errors import (
    Fenced,
    JobFailed,
    LogError,
    LogInterrupted,
    LogUnavailable,
    ReplayRefused,
    ServiceError,
    SwiftError,
    UsageError,
)
from swift.log.reader import LogReader
from swift.log.writer import LogWriter
from swift.runtime.channel import Channel
from swift.runtime.communicator import Communicator, Interrupted
from swift.runtime.config import SessionConfig
from swift.runtime.faults import FaultInjector
from swift.runtime.member import Member
from swift.runtime.state import TrainerState

TrainStep = Callable[[int], object]

ENV_DIGESTS = "SWIFT_DIGESTS"
ENV_DIGESTS_EVERY = "SWIFT_DIGESTS_EVERY"

# How long a statement to the coordinator stands before it is said again (after a restart it is forgotten).
_RESAY_S = 0.5
_FLUSH_TIMEOUT_S = 60.0
_NOTICE_POLL_S = 0.005
# What torch's communication errors say. Anything else that a step raises is the trainer's own error.
_COMMUNICATION_WORDS = (
    "gloo",
    "nccl",
    "connection",
    "peer",
    "process group",
    "timed out",
    "timeout",
    "socket",
)


class Engine:
    """One rank's life, from join to the end of the run."""

    def __init__(
        self,
        rank: int,
        config: SessionConfig,
        member: Member,
        communicator: Communicator,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        faults: FaultInjector,
    ):
        self._rank = rank
        self._config = config
        self._member = member
        self._communicator = communicator
        self._channel = channel
        self._state = state
        self._store = store
        self._faults = faults
        self._writer: LogWriter | None = None
        self.log_servers: list[str] = []
        self._has_state = False  # until the first version is ours, by birth or by restore
        self._view: pb.View | None = None
        self._entering = threading.Lock()
        self._kept: set[int] = set()  # complete checkpoints, as last seen

    # --- membership ---

    def form(self) -> None:
        """Blocks until this rank is in a generation whose groups are built (FORMING or RECOVERING)."""
        while True:
            view = self._member.watcher.wait_for(lambda _view: True, None)
            with self._entering:
                self._member.enter(view.generation)
            try:
                self._member.check()
                if view.state == pb.PLANNING:
                    self._report(view)
                    self._await_change(view)
                elif view.state in (pb.FORMING, pb.RECOVERING) and len(view.members) == view.world_size:
                    self._open_log(view)
                    self._communicator.build(view.generation)
                    self._view = view
                    return
                else:
                    self._await_change(view)
            except (Interrupted, LogInterrupted):
                continue  # a newer generation came meanwhile
            except RuntimeError as error:  # a peer was lost while the groups were being built
                self._member.client.suspect(view.generation, str(error))
                self._await_notice(error)

    def _await_change(self, view: pb.View) -> None:
        """Returns when the View has moved on, or when it is time to say again what this rank has said."""
        try:
            self._member.watcher.wait_for(
                lambda newer: (newer.generation, newer.revision) != (view.generation, view.revision), _RESAY_S
            )
        except ServiceError:
            return  # not moved on: the caller looks again

    def _report(self, view: pb.View) -> None:
        if self._writer is not None:
            self._writer.set_generation(view.generation)
            self._writer.flush(_FLUSH_TIMEOUT_S)
        version = self._state.version if self._has_state else None
        self._member.client.report(view.generation, version)
        events.emit("reported", rank=self._rank, generation=view.generation, version=version)

    def _open_log(self, view: pb.View) -> None:
        self.log_servers = list(view.log_servers)
        if self._writer is None:
            self._writer = LogWriter(
                self.log_servers,
                view.job,
                view.generation,
                codec=self._config.codec,
                queue_bytes=self._config.log_queue_bytes,
                name=f"rank{self._rank}",
            )
            self._channel.open(self._writer)

    def interrupt(self, generation: int) -> None:
        """(notice thread) Frees the trainer's thread from whatever it waits in."""
        with self._entering:  # a notice that was acted on meanwhile must not stop the new generation
            if self._writer is not None and self._member.noticed:
                self._writer.interrupt()
        self._communicator.interrupt(generation, lambda: not self._member.noticed)

    # --- the loop ---

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Steps until `num_steps` are done, through every recovery. Returns when all ranks are there."""
        while True:
            try:
                self._rejoin(train_step)
                while self._state.version < num_steps:
                    self._faults.at("idle", self._state.version)
                    self._member.check()
                    self._step(train_step)
                self._finish(num_steps)
                return
            except (JobFailed, Fenced):
                raise
            except Exception as error:  # noqa: BLE001  (a lost peer shows as any error; _handle re-raises the rest)
                self._handle(error)
            latest = self._member.watcher.latest
            events.emit("freed", rank=self._rank, generation=latest.generation if latest is not None else 0)
            self._drop_step()
            self.form()

    def _rejoin(self, train_step: TrainStep) -> None:
        """From groups that are built to RUNNING."""
        view = self._view
        assert view is not None
        self._member.check()
        if view.state == pb.FORMING:
            self._has_state = True
            if os.environ.get(ENV_DIGESTS_EVERY):
                self._write_digests(f"rank{self._rank}-v0.json")
            self._save()
            self._store.wait()  # a loss in the first step needs it
        else:
            self._follow_plan(view.plan, train_step)
        version = self._state.version
        stages = [stage.stage_index for stage in self._state.stages]
        num_stages = self._state.stages[0].num_stages
        events.emit("ready", rank=self._rank, generation=view.generation, version=version)
        if view.state == pb.RECOVERING:
            self._write_digests(f"rank{self._rank}-v{version}-g{view.generation}.json")
        while True:
            self._member.check()
            self._member.client.ready(view.generation, version, stages, num_stages)
            self._faults.while_others_replay(version)
            self._await_change(view)
            self._member.check()
            latest = self._member.watcher.latest
            if latest is not None and latest.state == pb.RUNNING and latest.generation == view.generation:
                break
        events.emit("resumed", rank=self._rank, generation=view.generation, version=version)

    def _step(self, train_step: TrainStep) -> None:
        step = self._state.version
        replaying = self._channel.replaying
        events.emit("step_begin", rank=self._rank, step=step, replay=replaying)
        self._channel.begin_step(step)
        self._state.begin_step()
        train_step(step)
        if not self._state.update_begun:
            raise UsageError("train_step returned without optimizer.step(); every step must update")
        self._state.end_step()
        version = self._member.version = self._state.version
        events.emit("step_end", rank=self._rank, step=step, replay=replaying)
        if os.environ.get(ENV_DIGESTS_EVERY):
            self._write_digests(f"rank{self._rank}-v{version}.json")
        if version % self._config.checkpoint_every == 0:
            self._save()
        assert self._writer is not None
        self._writer.forget_below(version)  # only a step that is dropped is sent again
        self._prune()

    def _save(self) -> None:
        generation = self._member.watcher.wait_for(lambda _view: True, None).generation

        def durable(version: int) -> None:
            events.emit("checkpoint_durable", rank=self._rank, version=version)
            try:
                self._member.client.checkpoint_durable(version, generation)
            except SwiftError as error:
                # A version that the coordinator never hears of is not complete; the one before it stands.
                events.emit("checkpoint_untold", rank=self._rank, version=version, reason=str(error))

        self._store.save(self._state.version, self._state.state_dict(), durable)

    def _prune(self) -> None:
        view = self._member.watcher.latest
        if view is not None and set(view.checkpoints) != self._kept:
            self._kept = set(view.checkpoints)
            self._store.prune(self._kept)

    def _finish(self, num_steps: int) -> None:
        """All steps are done here. A rank stays until all are: it may be needed for a recovery."""
        assert self._writer is not None
        self._store.wait()
        self._writer.flush(_FLUSH_TIMEOUT_S)
        self._write_digests(f"rank{self._rank}-v{num_steps}.json")
        while True:
            self._member.check()
            self._member.client.finish(num_steps)
            view = self._member.watcher.wait_for(lambda _view: True, None)
            if view.state == pb.FINISHED:
                events.emit("finished", rank=self._rank, version=num_steps, **self._log_totals())
                return
            self._await_change(view)

    def _log_totals(self) -> dict[str, int]:
        assert self._writer is not None
        stats = self._writer.stats
        return {"records": stats.records, "bytes": stats.bytes, "verified": stats.verified}

    # --- recovery ---

    def _follow_plan(self, plan: pb.Plan, train_step: TrainStep) -> None:
        mine = next(entry for entry in plan.ranks if entry.rank == self._rank)
        target = plan.target_version
        if mine.strategy in (pb.REPLAY, pb.CHECKPOINT):
            events.emit("restore_begin", rank=self._rank, generation=plan.generation)
            self._has_state = False
            try:
                self._state.load_state_dict(self._store.load(mine.from_version))
            except ServiceError as error:
                raise ReplayRefused(str(error)) from None  # the coordinator may know an older one
            self._has_state = True
            events.emit("restore_end", rank=self._rank, generation=plan.generation, version=mine.from_version)
        if mine.strategy == pb.CHECKPOINT:
            # The coordinator has emptied the job's streams; what comes now is logged anew.
            assert self._writer is not None
            self._writer.restart(plan.generation)
        elif mine.strategy in (pb.REPLAY, pb.CATCH_UP):
            self._replay(plan, mine, train_step)
        if self._state.version != target:
            raise ReplayRefused(
                f"rank {self._rank} is at version {self._state.version}, the plan says {target}"
            )

    def _replay(self, plan: pb.Plan, mine: pb.RankPlan, train_step: TrainStep) -> None:
        assert self._writer is not None
        target, from_version = plan.target_version, mine.from_version
        before = self._log_totals()
        events.emit("replay_begin", rank=self._rank, generation=plan.generation, version=from_version)
        reader = LogReader(self.log_servers, self._member.client.job)
        try:
            if mine.strategy == pb.REPLAY:  # a survivor knows what it has logged
                self._expect_own(reader, from_version)
            self._channel.begin_replay(reader, from_version, plan.collective_source)
            while self._state.version < target:
                self._member.check()
                self._step(train_step)
        finally:
            self._channel.end_replay()
            reader.close()
        self._writer.flush(_FLUSH_TIMEOUT_S)
        after = self._log_totals()
        events.emit(
            "replay_end",
            rank=self._rank,
            generation=plan.generation,
            version=target,
            steps=target - from_version,
            records=self._channel.records_read,
            microbatches=self._channel.microbatches_replayed,
            verified=after["verified"] - before["verified"],
            filled=after["records"] - before["records"],
        )

    def _expect_own(self, reader: LogReader, from_version: int) -> None:
        """What this rank's streams hold already is compared, not logged again."""
        assert self._writer is not None
        streams = [f"s{stage.stage_index}.{kind}" for stage in self._state.stages for kind in "FBXT"]
        for stream in [*streams, f"r{self._rank}.C"]:
            self._writer.expect(stream, reader.digests(stream, from_version))

    def _drop_step(self) -> None:
        self._channel.end_replay()
        if self._has_state and not self._state.intact:
            # The optimizer has begun: the parameters are of no version, so this rank restores.
            self._has_state = False
        self._state.drop_step()

    def _handle(self, error: Exception) -> None:
        """Returns if the error is a failure's consequence (a newer generation is there); else raises it."""
        _let_go(error)
        generation = self._view.generation if self._view is not None else 0
        if self._member.noticed:
            self._await_notice(error)
        elif isinstance(error, ReplayRefused | LogError):
            self._member.client.refuse(generation, str(error))
            self._await_notice(error)
        elif _is_communication(error) or isinstance(error, LogUnavailable):
            # Not ours to decide: the coordinator hears of the death from a launcher or from the lease.
            self._member.client.suspect(generation, str(error))
            self._await_notice(error)
        else:
            self._fail(error)

    def _await_notice(self, error: Exception) -> None:
        """Returns once a newer generation is there. Raises Fenced or JobFailed; the error itself if none comes."""
        deadline = time.monotonic() + self._config.suspicion_timeout_s
        while not self._member.noticed:
            if time.monotonic() > deadline:
                self._fail(error)
            time.sleep(_NOTICE_POLL_S)
        try:
            self._member.check()
        except Interrupted:
            return

    def _fail(self, error: Exception) -> None:
        """The job ends. Bad input is told by the exit code: the launcher stops the job with the same one."""
        if not isinstance(error, UsageError):
            self._member.client.fail(f"{type(error).__name__}: {error}"[:500])
        raise error

    # --- evidence ---

    def _write_digests(self, name: str) -> None:
        directory = os.environ.get(ENV_DIGESTS)
        if directory:
            path = Path(directory) / name
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self._state.digests()))
            os.replace(temporary, path)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close(0.0)
        self._member.close()
        self._communicator.tear_down()


def _is_communication(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in _COMMUNICATION_WORDS)


def _let_go(error: BaseException) -> None:
    """Clears the frames that the error's tracebacks hold: they keep the old group and its buffers alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
