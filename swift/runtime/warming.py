"""A spare computes one forward and backward of a rank's stage before it is needed (`swift.warm_up`).

    (session is made)  ``stand_in``: groups in which this process answers for all others, and the shapes that the job's
                       stages have told each other
    (trainer)          makes its stages and optimizers, as ever
    (session.run)      ``run``: the rank's newest checkpoint, then one step of the trainer's, whose inputs come from the
                       log, until all gradients are there; the optimizers' steps; `swift.Reinitialize`

The job does not notice: nothing is joined, written or logged. Of the coordinator only what everybody may see is asked,
and what ranks have told each other about shapes.
"""

import time
import weakref
from typing import NoReturn

import torch
import xxhash

from swift import reinitializing, warm_up
from swift._pb import coordinator_pb2 as pb
from swift.checkpoint.store import CheckpointStore
from swift.control.client import CoordinatorClient
from swift.errors import ReplayRefused, SwiftError, UsageError
from swift.log.reader import LogReader
from swift.log.streams import collectives
from swift.recovery.groups import RecoveryGroups
from swift.runtime.channel import BACKWARD, FORWARD, Channel
from swift.runtime.errors import Rehearsed
from swift.runtime.member import own_servers
from swift.runtime.process_groups import ProcessGroups
from swift.runtime.rank_store import ListeningStore
from swift.runtime.state import TrainerState
from swift.runtime.step_runner import TrainStep
from swift.runtime.strategies.load import load_checkpoint
from swift.runtime.tensors import as_bytes
from swift.runtime.witness import Witness


class Warming:
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
        view = self._view = self._running()
        self._communicator.stand_in(ListeningStore(self._client, view.generation))
        self._channel.keep_nothing()
        self._state.updates.stops_at_last = True

    def run(self, train_step: TrainStep) -> NoReturn:
        """Raises `Reinitialize`, or why the step cannot be computed."""
        run = warm_up.this_run()
        run.script_seconds = warm_up.script_seconds()
        run.models = [weakref.ref(stage.submod) for stage in self._state.stages]
        view = self._view = self._running()
        version = run.version = max(view.checkpoints) if run.version is None else run.version
        self._state.present = False
        load_checkpoint(self._state, self._store, version)
        began = time.monotonic()
        reader = LogReader(self._sources(view), self._client.job)
        self._channel.rehearsing = True
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
        raise reinitializing.over()

    def _running(self) -> pb.View:
        view = self._client.status().view
        if view.state != pb.RUNNING or not view.checkpoints:
            raise ReplayRefused("the job does not run at the moment")
        return view

    def _moved(self, error: Exception) -> bool:
        """The job has, since it was looked at, and the error may come of that."""
        before = self._view
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

    def _gradients(self) -> bytes:
        """A digest of them all. Raises UsageError: there are none."""
        digest, there = xxhash.xxh3_128(), False
        for stage in self._state.stages:
            for parameter in stage.submod.parameters():
                gradient = parameter.grad
                if gradient is not None:
                    there = True
                    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                    digest.update(as_bytes(local).numpy().data)
        if not there:
            raise UsageError("the step has computed no gradients")
        return digest.digest()

    def _sources(self, view: pb.View) -> dict[str, list[str]]:
        """Stream -> the servers that keep it, of what this rank's stages read. Raises UsageError: it is not logged."""
        servers = {rank: list(own_servers(view, rank)) for rank in range(view.world_size)}
        sources = {collectives(self._rank): servers[self._rank]}
        groups = self._channel.groups = RecoveryGroups.parse(view.groups)
        for stage in self._state.stages:
            index, homes = stage.stage_index, stage.stage_index_to_group_rank
            for other, direction in ((index - 1, FORWARD), (index + 1, BACKWARD)):
                if not 0 <= other < stage.num_stages:
                    continue
                if not groups.crosses(other, index):
                    raise UsageError(
                        f"what stage {other} sends to stage {index} is not logged (recovery groups)"
                    )
                sources[self._channel.stream(other, direction)] = servers[self._channel.rank_at(homes[other])]
        return sources

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
