"""A survivor that computes microbatches of stages that are not its own.

Its own modules, optimizer and loader stay where they are, in memory, and are not touched: the stages are built beside
them, without an optimizer. If memory does not suffice for both, this rank does not help. A digest of the whole state,
taken before and after, says that it is what it was.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
import xxhash

from swift import events
from swift.checkpoint.state import split
from swift.control.plans import PublishedPlan
from swift.errors import RecordMissing, ReplayRefused, SwiftError
from swift.log.read_filter import ReadFilter
from swift.log.reader import LogReader
from swift.log.record import RecordKey
from swift.recovery.groups import RecoveryGroups
from swift.runtime import _torch
from swift.runtime.backends.base import Wire
from swift.runtime.backends.runner import Broken
from swift.runtime.channel import BACKWARD, FORWARD, Channel
from swift.runtime.process_groups import Interrupted
from swift.runtime.receive_buffers import available_memory
from swift.runtime.rng import kept
from swift.runtime.shared_replay.actions import Action
from swift.runtime.shared_replay.agreement import copy_of
from swift.runtime.shared_replay.copy_pipeline import CopyPipeline, InCopy
from swift.runtime.shared_replay.gradient_chain import GradientChain, Post
from swift.runtime.shared_replay.gradients import OwnGradients, Strides, first_strides
from swift.runtime.shared_replay.manifest import difference, named, stand, tied, together
from swift.runtime.shared_replay.owner import check_buffers
from swift.runtime.shared_replay.shares import memory_needed
from swift.runtime.shared_replay.verifying_capture import VerifyingCapture
from swift.runtime.stage import LoggedPipelineStage, logged_loss
from swift.runtime.state import TrainerState
from swift.runtime.tensors import byte_view, dtype_name

_EVERY_STEP = 1 << 62

MakeModule = Callable[[int], torch.nn.Module]


class Helper:
    """(restorer) ``run`` returns once the owner needs no more help, this rank's state as it was."""

    def __init__(
        self,
        rank: int,
        make_module: MakeModule,
        wire: Wire,
        channel: Channel,
        state: TrainerState,
        check: Callable[[], None],
    ):
        self._rank = rank
        self._make_module = make_module
        self._wire = wire
        self._post = Post(wire)
        self._channel = channel
        self._state = state
        self._check = check

    def run(self, owner: int, published: PublishedPlan, job: str) -> None:
        """Raises ReplayRefused if what was computed is not what was logged; Interrupted by a notice."""
        before = state_digest(self._state)
        asked, _ = self._post.read(owner)
        if asked is None:
            return
        modules, why = self._build(asked)
        self._post.note(owner, {"why": why})
        begin, _ = self._post.read(owner)
        self._post.settle()
        if why:
            events.emit(
                "help_declined", rank=self._rank, generation=published.generation, owner=owner, reason=why
            )
        if modules and begin is not None:
            reader = LogReader(published.sources, job)
            inner = CopyPipeline(self._wire, self._rank, copy_of(self._rank, published.plan.help))
            work = _Work(
                self._rank, asked, begin, modules, self._post, self._channel, self._state, self._check, inner
            )
            try:
                inner.compare([begin["from"], begin["first"], begin["behind"]])
                work.run(owner, reader)
            finally:
                work.close()
                reader.close()
            events.emit(
                "helped", rank=self._rank, generation=published.generation, owner=owner, **work.done()
            )
        if state_digest(self._state) != before:
            self._state.present = False
            raise ReplayRefused(
                f"the state of rank {self._rank} changed while it helped rank {owner}: what session.help_replay was "
                "given must make a module that shares nothing with the stage's own"
            )

    def _build(self, asked: dict[str, Any]) -> tuple[list[torch.nn.Module], str]:
        """The stages' modules, or why this rank does not help."""
        own = {tensor.data_ptr() for tensor in split(self._state.state_dict())[0].values() if tensor.numel()}
        try:
            with kept():  # a trainer's module may be made from a seed that it sets
                modules = [self._make_module(index) for index in asked["stages"]]
        except Exception as error:  # noqa: BLE001  (the trainer's code, which training goes on without)
            return [], f"a stage's module was not made: {type(error).__name__}: {error}"
        if tied(modules):
            return [], "the modules that were made share a parameter"
        module = torch.nn.ModuleDict(
            {f"stage{index}": made for index, made in zip(asked["stages"], modules, strict=True)}
        )
        if why := difference(asked["tensors"], module):
            return [], f"another module than the owner's: {why}"
        if own & {tensor.data_ptr() for _, tensor in named(module) if tensor.numel()}:
            return [], "the module that was made shares memory with this rank's own stage"
        weights = sum(tensor.nbytes for _, tensor in named(module))
        # Who keeps single gradients is the second of three at least: the first lets autograd add.
        share = -(-asked["microbatches"] // 3)
        needed = memory_needed(weights, share)
        free = available_memory()
        if free is not None and needed > free:
            return [], f"it needs {needed >> 20} MiB of memory, and {free >> 20} MiB are free"
        return modules, ""


class _Work:
    """The stages of a rank, replayed for it."""

    def __init__(
        self,
        rank: int,
        asked: dict[str, Any],
        begin: dict[str, Any],
        modules: list[torch.nn.Module],
        post: Post,
        channel: Channel,
        state: TrainerState,
        check: Callable[[], None],
        inner: CopyPipeline,
    ):
        (schedule,) = state.schedules
        self._post = post
        self._check = check
        self._line = GradientChain(post, begin["line"], rank, check)
        self._first = begin["line"][0] == rank
        self._from = begin["from"]
        self._own = range(begin["first"], begin["behind"])
        self._actions = [Action(*action) for action in begin["actions"]]
        self._share = ReadFilter(
            first=self._own.start, behind=self._own.stop, of=asked["microbatches"], below_step=_EVERY_STEP
        )
        self._logged: dict[str, dict[RecordKey, bytes]] = {}
        self._checked = VerifyingCapture(self._logged)
        self._channel = channel.beside(self._checked)
        self._stages = [
            self._stage(module, index, asked["of"], state)
            for module, index in zip(modules, asked["stages"], strict=True)
        ]
        self._module = together(self._stages)
        self._walk = InCopy(self._stages, asked["microbatches"], _torch.loss_function(schedule), inner)
        _torch.wrap_loss(self._walk, logged_loss(self._stages, self._channel))
        self._steps = self._verified = self._told = 0

    def _stage(self, module: torch.nn.Module, index: int, of: int, state: TrainerState) -> Any:
        """Placed like its owner's: so are its neighbours, and which of them are on one rank."""
        own = state.stages[0]
        stage: Any = LoggedPipelineStage(module, index, of, own.device, group=own.group)
        stage.stage_index_to_group_rank = dict(own.stage_index_to_group_rank)
        stage.group_rank = stage.stage_index_to_group_rank[index]
        stage._attach(self._channel, state.updates)
        return stage

    def run(self, owner: int, reader: LogReader) -> None:
        for stream in self._streams():
            self._logged[stream] = {}
            with suppress(RecordMissing):  # the owner had logged nothing yet
                self._logged[stream] = reader.digests(stream, self._from, cancelled=self._called_off)
        self._channel.begin_replay(reader, self._from, ())
        self._channel.want(self._share, self._from)
        self._channel.read_ahead(stream for stage in self._stages for stream in stage.streams_read())
        while (note := self._next(owner)) is not None:
            self._step(owner, note)

    def _called_off(self) -> bool:
        """No; or raises Interrupted."""
        self._check()
        return False

    def _next(self, owner: int) -> dict[str, Any] | None:
        with self._channel.clock.line():
            note, _ = self._post.read(owner)
            self._post.settle()
        told: dict[str, Any] | None = note
        return told

    def _streams(self) -> Iterator[str]:
        """What the stages send to other ranks."""
        here = {stage.stage_index for stage in self._stages}
        for index in sorted(here):
            for kind, beside in ((FORWARD, index + 1), (BACKWARD, index - 1)):
                if 0 <= beside < self._stages[0].num_stages and beside not in here:
                    yield self._channel.stream(index, kind)

    def _step(self, owner: int, note: dict[str, Any]) -> None:
        step = note["step"]
        self._channel.begin_step(step)
        self._channel.logged_by = tuple(map(RecoveryGroups.parse, note["logged_by"]))  # as its owner would
        for stage in self._stages:
            stage.begin_step()
        self._checked.compares = note["compared"]
        tensors = [tensor for _, tensor in named(self._module)]
        with torch.no_grad(), self._channel.clock.line():
            self._line.pass_down(tensors)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        losses, addends = self._compute(note)
        strides = first_strides(addends)
        with torch.no_grad(), self._channel.clock.line():
            self._line.pass_up(list(self._module.parameters()), addends)
        check_buffers(buffers)
        self._tell(owner, losses, strides)
        self._steps += 1

    def _compute(self, note: dict[str, Any]) -> tuple[dict[int, torch.Tensor], list[list[torch.Tensor]]]:
        """Losses by microbatch, and what each parameter's gradient is to be added."""
        parameters = list(self._module.parameters())
        ambient = stand(self._module, note)
        gradients = OwnGradients(parameters, first=self._first)
        try:
            with ambient:
                losses = self._walk.run(
                    self._actions,
                    lambda stage, mb: self._inputs(stage, mb, note),
                    self._target,
                    gradients.weighing,
                )
        except (SwiftError, Interrupted, Broken):
            raise
        except Exception as error:  # the owner's did no such thing
            raise ReplayRefused(f"microbatches of stages {self._indices}: {error}") from error
        finally:
            gradients.close()
        return losses, gradients.taken()

    def _inputs(self, stage: int, mb: int, note: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count, names = note["args"] if stage == 0 else 0, note["kwargs"]
        inputs = [self._channel.external(stage, "X", mb, slot) for slot in range(count + len(names))]
        return tuple(inputs[:count]), dict(zip(names, inputs[count:], strict=True))

    def _target(self, mb: int) -> torch.Tensor:
        return self._channel.external(self._stages[0].num_stages - 1, "T", mb, 0)

    @property
    def _indices(self) -> list[int]:
        return [stage.stage_index for stage in self._stages]

    def _tell(self, owner: int, losses: dict[int, torch.Tensor], strides: Strides) -> None:
        lacking, self._checked.lacking[:] = list(self._checked.lacking), []
        told = {
            "losses": [[mb, dtype_name(loss), list(loss.shape)] for mb, loss in losses.items()],
            "lacking": [
                [stream, key.microbatch, key.slot, dtype_name(t), list(t.shape)] for stream, key, t in lacking
            ],
            "verified": self._checked.verified - self._verified,
            "bytes": self._checked.bytes,
            "records": self._channel.records_read - self._told,
            "microbatches": len(self._own) * len(self._stages),
            "strides": strides,
            "seconds": self._channel.clock.told(),
        }
        self._verified, self._told = self._checked.verified, self._channel.records_read
        self._post.note(owner, told, [*losses.values(), *(tensor for _, _, tensor in lacking)])
        self._checked.bytes.clear()

    def done(self) -> dict[str, Any]:
        return {
            "stages": self._indices,
            "steps": self._steps,
            "microbatches": self._channel.microbatches_replayed,
            "verified": self._checked.verified,
            "records": self._channel.records_read,
            "log_wait_s": self._channel.clock.seconds["log"],
        }

    def close(self) -> None:
        self._channel.end_replay()


def state_digest(state: TrainerState) -> str:
    """XXH3 over names, types, shapes and bytes of everything that a checkpoint would hold."""
    tensors, rest = split(state.state_dict())
    digest = xxhash.xxh3_128(json.dumps(rest).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}|{dtype_name(tensor)}|{tuple(tensor.shape)}|".encode())
        digest.update(byte_view(tensor).data)
    return digest.hexdigest()
