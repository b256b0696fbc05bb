"""A rehearsal: a process that is no rank recovers as a rank would, and compares what it computes with what that rank
has done.

It loads the rank's checkpoint and does the steps behind it as a replay does: what the rank received comes out of the
log, and so does what collectives gave it. First it drops one step in its middle, at a place that the job's seed draws,
as a survivor of a failure would (where there are other ranks: nothing else cuts a step short). What it computes is
compared as it goes, in the order of the computation, with what the rank recorded (`swift_ft.train.recording`): so the
first difference is the one that is named. There is state, then, that neither a checkpoint nor a dropped step leads
back, and a recovery of this rank would have other bits.

With replicas, the averages of gradients are recorded of the first step alone. The next one is compared up to its
reduction.
"""

import random
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, NoReturn

import torch
import xxhash

from swift_ft import reinitialization, warm_up
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import Rehearsed
from swift_ft.comm.process_groups import Interrupted, ProcessGroups
from swift_ft.comm.rank_store import ListeningStore
from swift_ft.errors import RecordTrimmed, ReplayRefused, SwiftError, UsageError
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey, collectives, messages, results, transcripts
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.tensors import byte_view, to_tensor
from swift_ft.train.boundary_log import BACKWARD, FORWARD, Channel
from swift_ft.train.coordinator_session import own_servers
from swift_ft.train.recording import STEPS, ThoroughWatch, decoded
from swift_ft.train.replay import Standstill
from swift_ft.train.step import TrainStep
from swift_ft.train.step_digests import Witness
from swift_ft.train.strategies import load_checkpoint
from swift_ft.train.tape import Results, Tape
from swift_ft.train.training_state import TrainerState
from swift_ft.train.transcript import GIVEN, RESULT, SENT, Seen, Transcript

# A process that runs the training script as a rank would, and is not that rank: a spare that is warmed up
# (`swift_ft.train.rehearsal`), or a rehearsal (`swift_ft.train.rehearsal`).
#
#     (session is made)  ``stand_in``: groups in which this process answers for all others, and the shapes that the
#                        job's stages have told each other
#     (trainer)          makes its stages and optimizers, as ever
#     (session.run)      ``run``: what the process is for; it ends with `swift_ft.Reinitialize`
#
# The job does not notice: nothing is joined, written or logged. Of the coordinator only what everybody may see is
# asked, and what ranks have told each other about shapes.


class Shadow(ABC):
    """Of a process that runs the script as rank `rank` would, and is not that rank."""

    def __init__(
        self,
        rank: int,
        client: CoordinatorClient,
        communicator: ProcessGroups,
        channel: Channel,
        state: TrainerState,
        store: CheckpointStore,
        witness: Witness,
    ) -> None:
        self._rank = rank
        self._client = client
        self._communicator = communicator
        self._channel = channel
        self._state = state
        self._store = store
        self._witness = witness
        self._view: pb.View | None = None
        """As the job was looked at last."""

    def stand_in(self) -> None:
        """Raises ServiceError: the job is not running, or no coordinator answers."""
        warm_up.this_run().moved = self._moved
        self._view = self._running()
        self._stand_in(self._view)
        self._channel.keep_nothing()

    def _stand_in(self, view: pb.View) -> None:
        self._communicator.stand_in(ListeningStore(self._client, view.generation))

    @abstractmethod
    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        """Raises `Reinitialize`, or why it cannot be done."""

    def _running(self) -> pb.View:
        view = self._client.status().view
        if view.state != pb.RUNNING or not view.checkpoints:
            raise ReplayRefused("the job does not run at the moment")
        return view

    def _moved(self, error: Exception) -> bool:
        """The job has, since it was looked at, and the error may come of that."""
        before = self._view
        if isinstance(error, RecordTrimmed):
            return True
        client = CoordinatorClient(self._client.address, self._client.job)  # the session may be closed by now
        try:
            now = client.status().view
        except SwiftError:
            return True
        finally:
            client.close()
        if before is None or now.state != pb.RUNNING or now.generation != before.generation:
            return True
        named = isinstance(error, SwiftError) and not isinstance(error, UsageError)
        return named and list(now.checkpoints) != list(before.checkpoints)

    def _sources(self, view: pb.View, *, inside_too: bool = False) -> dict[str, list[str]]:
        """Stream -> the servers that keep it, of what this rank's stages read. `inside_too`: what passes inside of its
        recovery group is recorded. Raises UsageError: it is not logged."""
        servers = {rank: list(own_servers(view, rank)) for rank in range(view.world_size)}
        sources = {collectives(self._rank): servers[self._rank]}
        groups = self._channel.groups = RecoveryGroups.parse(view.groups)
        for stage in self._state.stages:
            index, homes = stage.stage_index, stage.stage_index_to_group_rank
            for other, direction in ((index - 1, FORWARD), (index + 1, BACKWARD)):
                if not 0 <= other < stage.num_stages:
                    continue
                if not groups.crosses(other, index):
                    if inside_too:
                        continue
                    raise UsageError(
                        f"what stage {other} sends to stage {index} is not logged (recovery groups)"
                    )
                sources[self._channel.stream(other, direction)] = servers[self._channel.rank_at(homes[other])]
        return sources


# A spare computes one forward and backward of a rank's stage before it is needed (`swift_ft.warm_up`): the rank's
# newest checkpoint, then one step of the trainer's, whose inputs come from the log, until all gradients are there;
# then the optimizers' steps.


class Warming(Shadow):
    """See `Shadow`."""

    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        run = warm_up.this_run()
        run.script_seconds = warm_up.script_seconds()
        run.models = [weakref.ref(stage.submod) for stage in self._state.stages]
        view = self._view = self._running()
        version = run.version = max(view.checkpoints) if run.version is None else run.version
        self._state.present = False
        load_checkpoint(self._state, self._store, version)
        began = time.monotonic()
        reader = LogReader(self._sources(view), self._client.job)
        self._state.updates.stops_at_last = self._channel.rehearsing = True
        try:
            self._channel.begin_replay(reader, version, (self._rank,))
            self._compute(train_step, version)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
        finally:
            self._channel.rehearsing = False
            self._channel.end_replay()
            reader.close()
        run.step_seconds = time.monotonic() - began
        run.gradients = self._gradients()
        self._step_optimizers()
        raise reinitialization.over()

    def _gradients(self) -> bytes:
        """A digest of them all. Raises UsageError: there are none."""
        digest, there = xxhash.xxh3_128(), False
        for stage in self._state.stages:
            for parameter in stage.submod.parameters():
                gradient = parameter.grad
                if gradient is not None:
                    there = True
                    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    digest.update(byte_view(local).data)
        if not there:
            raise UsageError("the step has computed no gradients")
        return digest.digest()

    def _compute(self, train_step: TrainStep, step: int) -> None:
        self._channel.begin_step(step)
        self._witness.begin(step)
        self._state.begin_step()
        try:
            train_step(step)
        except Rehearsed:
            pass
        spoiled = self._state.updates.spoiled  # which the trainer may have caught
        if spoiled is not None and not isinstance(spoiled, Rehearsed):
            raise spoiled

    def _step_optimizers(self) -> None:
        with torch.enable_grad():
            for journal in self._state.updates.journals:
                if not (journal.whole or journal.complete):
                    journal.apply_rest()


class Rehearsal(Shadow):
    """See `Shadow`."""

    def __init__(self, *shadow: Any, watch: ThoroughWatch, tape: Tape, seed: int, stall_s: float) -> None:
        """`seed`: the job's. `stall_s`: a step that stands still for so long is given up."""
        super().__init__(*shadow)
        self._stall_s = stall_s
        self._tape = tape
        self._seed = seed
        self._watch = watch
        self._difference = ""
        self._generation = 0
        self._cut = False

    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        run = warm_up.this_run()
        view = self._view = self._running()
        self._generation, version = view.generation, run.version
        assert version is not None, "a rehearsal is told where to begin"
        self._witness.differs = self._note_difference
        self._state.updates.rehearses = self._channel.rehearsed = True
        self._channel.giving_only = self._tape.giving_only
        own = list(own_servers(view, self._rank))
        sources = self._sources(view, inside_too=True)
        sources |= {stream(self._rank): own for stream in (transcripts, results, messages)}
        reader = LogReader(sources, self._client.job)
        try:
            self._load(version)
            self._begin_replay(reader, version)
            if view.world_size > 1:
                self._drop_one(train_step, version)
                self._channel.end_replay()
                self._begin_replay(reader, version)
            run.steps = self._do_steps(train_step, version, min(version + STEPS, num_steps))
        except Exception:
            if not self._difference:
                raise
        # The process ends, so nothing is closed: a child that a step has forked comes this way, too, where gRPC hangs.
        run.difference = self._difference
        raise reinitialization.over()

    def _note_difference(self, step: int, words: str) -> None:
        self._difference = self._difference or words

    def _load(self, version: int) -> None:
        self._state.present = False
        load_checkpoint(self._state, self._store, version, in_common_only=True)
        self._state.present = True

    def _begin_replay(self, reader: LogReader, version: int) -> None:
        self._channel.begin_replay(reader, version, (self._rank,))

    def _recorded(self, step: int) -> tuple[Transcript, Results]:
        """What the rank has recorded of the step; waits until it has."""
        key = RecordKey(step, self._generation, 0)
        transcript, there, held = decoded(self._channel.recorded(transcripts(self._rank), key))
        self._state.updates.hold_next = held
        found, slot = {}, 0
        for group, number, count in there:
            keys = [RecordKey(step, self._generation, slot + place) for place in range(count)]
            found[group, number] = [
                to_tensor(self._channel.recorded(results(self._rank), each)) for each in keys
            ]
            slot += count
        return transcript, found

    def _begin_step(self, step: int, transcript: Transcript, gotten: Results) -> None:
        self._witness.expect(step, transcript)
        self._channel.begin_step(step)
        self._witness.begin(step)
        self._watch.begin()
        self._tape.play(gotten)
        self._state.begin_step()
        self._watch.state(self._state.begun_with())

    def _end_step(self) -> None:
        self._watch.end()
        self._tape.stop()

    def _drop_one(self, train_step: TrainStep, step: int) -> None:
        """A failure cuts ranks short where they communicate."""
        transcript, gotten = self._recorded(step)
        places = [seen for seen in transcript if seen.kind in (SENT, GIVEN, RESULT)]
        if not places:
            return
        self._begin_step(step, transcript, gotten)
        place = random.Random(f"{self._seed} {self._rank} {step}").choice(places)
        self._witness.passing = lambda seen: self._cut_at(place, seen)
        try:
            self._compute(train_step, step)
        except Exception:
            if not self._cut:
                raise
        finally:
            self._witness.passing = _let_pass
            self._end_step()
        begun = self._state.updates.begun
        partial = self._state.updates.partial
        self._channel.drop_step()
        self._state.drop_step()
        self._stand_in(self._running())  # groups that were broken
        if begun or not self._state.present:
            self._load(step)
        elif partial:
            self._state.undo()

    def _compute(self, train_step: TrainStep, step: int) -> None:
        """All that the step needs is in the log, so it waits for nothing but what the script waits for by itself."""
        run = warm_up.this_run()
        with Standstill(
            self._stall_s,
            lambda: (self._channel.records_read, len(self._witness.transcript())),
            lambda why: run.gives_up(f"step {step}: {why}"),
            lambda: False,
        ):
            train_step(step)

    def _cut_at(self, place: Seen, seen: Seen) -> None:
        if seen == place:
            self._cut = True
            raise Interrupted("process group: a rehearsal cuts the step short here")

    def _do_steps(self, train_step: TrainStep, first: int, last: int) -> int:
        """So many were compared. The state with which step `last` begins is, too, if the rank begins it."""
        for step in range(first, last):
            self._begin_step(step, *self._recorded(step))
            try:
                self._compute(train_step, step)
                self._channel.wait_copied()
                self._state.updates.end_step()
            except Exception as error:
                if not (isinstance(error, Rehearsed) or isinstance(self._state.updates.spoiled, Rehearsed)):
                    raise
                return step - first + 1
            finally:
                self._end_step()
            self._witness.check_all_seen()
            if self._difference:
                return step - first + 1
            self._state.end_step()
        if last - first == STEPS:
            self._begin_step(last, *self._recorded(last))
            self._end_step()
        return last - first


def _let_pass(_: Seen) -> None:
    """Nothing is cut short."""
