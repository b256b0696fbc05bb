"""Rehearsal: a process that holds no rank recovers as a given rank would, and compares its results with that rank's.

It loads the rank's checkpoint and replays the next steps: the tensors that the rank received, and the results of its
collectives, come from the log. In a world of several ranks it first drops one step halfway, at a place drawn from the
job's seed, as a survivor of a failure would (a rank without peers is never interrupted). It compares its results, in
the order of the computation, with those that the rank recorded (`swift_ft.train.recording`), and reports the first
difference. A difference means that some state is restored neither by a checkpoint nor by dropping a step, and that a
recovery of this rank would not be exact.

With replicas, averaged gradients are recorded for the first step only. The next step is compared up to its reduction.
"""

import random
import weakref
from abc import ABC, abstractmethod
from itertools import chain
from typing import NoReturn

import torch

from swift_ft import reinitialization, warm_up
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import Rehearsed
from swift_ft.comm.process_groups import Interrupted
from swift_ft.comm.rank_store import ListeningStore
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.device import accelerator_in_use
from swift_ft.errors import RecordTrimmed, ReplayRefused, SwiftError, UsageError
from swift_ft.log.reader import LogReader
from swift_ft.log.record import RecordKey, collectives, messages, results, transcripts
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.state.digests import digests
from swift_ft.state.tensors import to_tensor
from swift_ft.state.transfer import local
from swift_ft.train.boundary_log import Capture
from swift_ft.train.coordinator_session import own_servers
from swift_ft.train.participants import Site, TrainStep
from swift_ft.train.profiling import BACKWARD, FORWARD
from swift_ft.train.recording import STEPS, Results, Tape, ThoroughWatch, decoded
from swift_ft.train.replay import Standstill
from swift_ft.train.step_digests import let_pass
from swift_ft.train.strategies import load_checkpoint
from swift_ft.train.transcript import GIVEN, RESULT, SENT, Seen, Transcript

# A shadow: a process that runs the training script as a rank would, without holding the rank. It is either a spare
# that warms up (`Warming`) or a rehearsal (`Rehearsal`).
#
#     (session created)  ``stand_in``: groups in which this process answers for all others, and the shapes that the
#                        job's stages have exchanged
#     (trainer)          creates its stages and optimizers as usual
#     (session.run)      ``run``: the warm-up or the rehearsal; it ends with `swift_ft.Reinitialize`
#
# The job is not affected: a shadow joins no job, writes no file and logs no record. It only reads the coordinator's
# public view and the shapes that ranks have exchanged.


class Shadow(ABC):
    """Session side of a process that runs the script as rank `rank` would, without holding that rank."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._client = site.member.client
        self._view: pb.View | None = None
        """The job's View when it was last read."""

    def stand_in(self) -> None:
        """Attaches groups that only this process is in, and turns logging off. Raises ServiceError if the job is not
        running or no coordinator answers."""
        warm_up.this_run().moved = self._moved
        self._view = self._running()
        self._stand_in(self._view)
        self._site.channel.capture = Capture()

    def _stand_in(self, view: pb.View) -> None:
        self._site.communicator.stand_in(ListeningStore(self._client, view.generation))

    @abstractmethod
    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        """Runs the warm-up or rehearsal. Raises `Reinitialize` at its end, or the error that prevents it."""

    def _running(self) -> pb.View:
        view = self._client.status().view
        if view.state != pb.RUNNING or not view.checkpoints:
            raise ReplayRefused("the job does not run at the moment")
        return view

    def _moved(self, error: Exception) -> bool:
        """Returns whether the job has moved on since `_view` was read, which may explain `error`."""
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
        """Returns stream -> log servers for the streams that this rank's stages read. `inside_too`: traffic inside its
        recovery group is recorded. Otherwise raises UsageError for a neighbor whose tensors are not logged."""
        servers = {rank: list(own_servers(view, rank)) for rank in range(view.world_size)}
        sources = {collectives(self._site.rank): servers[self._site.rank]}
        groups = self._site.channel.groups = RecoveryGroups.parse(view.groups)
        for stage in self._site.state.stages:
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
                sources[self._site.channel.stream(other, direction)] = servers[
                    self._site.channel.rank_at(homes[other])
                ]
        return sources


# A spare computes one forward and backward of a rank's stage before it is needed (`swift_ft.warm_up`): it loads the
# rank's newest checkpoint, runs one step of the trainer on logged inputs until all gradients are computed, and then
# steps the optimizers.


class Warming(Shadow):
    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        run = warm_up.this_run()
        run.models = [weakref.ref(stage.submod) for stage in self._site.state.stages]
        view = self._view = self._running()
        version = run.version = max(view.checkpoints) if run.version is None else run.version
        self._site.state.present = False
        load_checkpoint(self._site.state, self._site.store, version)
        reader = LogReader(self._sources(view), self._client.job)
        self._site.state.updates.stops_at_last = self._site.channel.rehearsing = True
        try:
            self._site.channel.begin_replay(reader, version, (self._site.rank,))
            self._compute(train_step, version)
            if (accelerator := accelerator_in_use()) is not None:
                accelerator.synchronize()
        finally:
            self._site.channel.rehearsing = False
            self._site.channel.end_replay()
            reader.close()
        run.gradients = self._gradients()
        self._step_optimizers()
        raise reinitialization.over()

    def _gradients(self) -> bytes:
        """Returns a digest of all gradients. Raises UsageError if there are none."""
        parameters = chain.from_iterable(stage.submod.parameters() for stage in self._site.state.stages)
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        if not gradients:
            raise UsageError("the step has computed no gradients")
        return b"".join(digests(gradients))

    def _compute(self, train_step: TrainStep, step: int) -> None:
        self._site.channel.begin_step(step)
        self._site.witness.begin(step)
        self._site.state.begin_step()
        try:
            train_step(step)
        except Rehearsed:
            pass
        spoiled = self._site.state.updates.spoiled  # the trainer may have caught this error
        if spoiled is not None and not isinstance(spoiled, Rehearsed):
            raise spoiled

    def _step_optimizers(self) -> None:
        with torch.enable_grad():
            for journal in self._site.state.updates.journals:
                if not (journal.whole or journal.complete):
                    journal.apply_rest()


class Rehearsal(Shadow):
    def __init__(self, site: Site, watch: ThoroughWatch, tape: Tape) -> None:
        super().__init__(site)
        self._tape = tape
        self._watch = watch
        self._difference = ""
        self._generation = 0
        self._cut = False

    def run(self, train_step: TrainStep, num_steps: int) -> NoReturn:
        run = warm_up.this_run()
        view = self._view = self._running()
        self._generation, version = view.generation, run.version
        assert version is not None, "a rehearsal is told where to begin"
        self._site.witness.differs = self._note_difference
        self._site.state.updates.rehearses = self._site.channel.rehearsed = True
        self._site.channel.giving_only = self._tape.giving_only
        own = list(own_servers(view, self._site.rank))
        sources = self._sources(view, inside_too=True)
        sources |= {stream(self._site.rank): own for stream in (transcripts, results, messages)}
        reader = LogReader(sources, self._client.job)
        try:
            self._load(version)
            self._site.channel.begin_replay(reader, version, (self._site.rank,))
            if view.world_size > 1:
                self._drop_one(train_step, version)
                self._site.channel.end_replay()
                self._site.channel.begin_replay(reader, version, (self._site.rank,))
            run.steps = self._do_steps(train_step, version, min(version + STEPS, num_steps))
        except Exception:
            if not self._difference:
                raise
        # The reader stays open, since the process ends: closing it would hang in a child that a step has forked (gRPC).
        run.difference = self._difference
        raise reinitialization.over()

    def _note_difference(self, step: int, words: str) -> None:
        self._difference = self._difference or words

    def _load(self, version: int) -> None:
        self._site.state.present = False
        load_checkpoint(self._site.state, self._site.store, version, in_common_only=True)
        self._site.state.present = True

    def _recorded(self, step: int) -> tuple[Transcript, Results]:
        """Returns the rank's recording of the step. Waits until it is in the log."""
        key = RecordKey(step, self._generation, 0)
        transcript, there, held = decoded(self._site.channel.recorded(transcripts(self._site.rank), key))
        self._site.state.updates.hold_next = held
        found, slot = {}, 0
        for group, number, count in there:
            keys = [RecordKey(step, self._generation, slot + place) for place in range(count)]
            found[group, number] = [
                to_tensor(self._site.channel.recorded(results(self._site.rank), each)) for each in keys
            ]
            slot += count
        return transcript, found

    def _begin_step(self, step: int, transcript: Transcript, gotten: Results) -> None:
        self._site.witness.expect(step, transcript)
        self._site.channel.begin_step(step)
        self._site.witness.begin(step)
        self._watch.begin()
        self._tape.play(gotten)
        self._site.state.begin_step()
        self._watch.state(self._site.state.begun_with())

    def _end_step(self) -> None:
        self._watch.end()
        self._tape.stop()

    def _drop_one(self, train_step: TrainStep, step: int) -> None:
        """Interrupts one run of the step at a communication, where a failure would, and rolls it back."""
        transcript, gotten = self._recorded(step)
        places = [seen for seen in transcript if seen.kind in (SENT, GIVEN, RESULT)]
        if not places:
            return
        self._begin_step(step, transcript, gotten)
        place = random.Random(f"{self._site.config.seed} {self._site.rank} {step}").choice(places)
        self._site.witness.passing = lambda seen: self._cut_at(place, seen)
        try:
            self._compute(train_step, step)
        except Exception:
            if not self._cut:
                raise
        finally:
            self._site.witness.passing = let_pass
            self._end_step()
        begun = self._site.state.updates.begun
        partial = self._site.state.updates.partial
        self._site.channel.drop_step()
        self._site.state.drop_step()
        self._stand_in(self._running())  # the interruption has broken the groups
        if begun or not self._site.state.present:
            self._load(step)
        elif partial:
            self._site.state.undo()

    def _compute(self, train_step: TrainStep, step: int) -> None:
        """Runs the step. Its inputs are all in the log, so only the script's own waits can stall it."""
        run = warm_up.this_run()
        with Standstill(
            self._site.config.replay_stall_s,
            lambda: (self._site.channel.records_read, len(self._site.witness.transcript())),
            lambda why: run.gives_up(f"step {step}: {why}"),
            lambda: False,
        ):
            train_step(step)

    def _cut_at(self, place: Seen, seen: Seen) -> None:
        if seen == place:
            self._cut = True
            raise Interrupted("process group: a rehearsal cuts the step short here")

    def _do_steps(self, train_step: TrainStep, first: int, last: int) -> int:
        """Replays steps `first` to `last` - 1 and returns how many were compared. If all `STEPS` were, also compares
        the state with which step `last` begins."""
        for step in range(first, last):
            self._begin_step(step, *self._recorded(step))
            try:
                self._compute(train_step, step)
                self._site.channel.wait_copied()
                self._site.state.updates.end_step()
            except Exception as error:
                if not (
                    isinstance(error, Rehearsed) or isinstance(self._site.state.updates.spoiled, Rehearsed)
                ):
                    raise
                return step - first + 1
            finally:
                self._end_step()
            self._site.witness.check_all_seen()
            if self._difference:
                return step - first + 1
            self._site.state.end_step()
        if last - first == STEPS:
            self._begin_step(last, *self._recorded(last))
            self._end_step()
        return last - first
