"""A survivor that computes microbatches of stages that are not its own.

Its own modules, optimizer and loader stay where they are, in memory, and are not touched: the stages are built beside
them, without an optimizer. If memory does not suffice for both, this rank does not help. A digest of the whole state,
taken before and after, says that it is what it was.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from swift_ft import events, torch_private
from swift_ft.comm.backend import INNER_ACTIVATIONS, INNER_GRADIENTS, Pending, Wire
from swift_ft.comm.process_groups import Interrupted
from swift_ft.comm.worker_thread import Broken
from swift_ft.errors import Divergence, RecordMissing, ReplayRefused, SwiftError
from swift_ft.log.reader import LogReader, ReadFilter
from swift_ft.log.record import RecordKey, digest_of
from swift_ft.log.sender import differs_words
from swift_ft.rpc.codec import PublishedPlan
from swift_ft.state.rng import kept
from swift_ft.state.tensors import byte_view, dtype_name, plain
from swift_ft.state.transfer import available_memory
from swift_ft.state.tree import split
from swift_ft.train.boundary_log import BACKWARD, FORWARD, Channel
from swift_ft.train.gradient_chain import (
    GradientChain,
    OwnGradients,
    Post,
    Strides,
    first_strides,
    layout_difference,
    parameters_and_buffers,
    set_module_modes,
    tied,
    together,
)
from swift_ft.train.shared_replay import (
    BACKWARD_WEIGHT,
    StepAction,
    Together,
    check_buffers,
    copy_of,
    memory_needed,
)
from swift_ft.train.stage import LoggedPipelineStage, logged_loss
from swift_ft.train.training_state import TrainerState

# Some actions of a rank's step, walked over the rank's stages: what they receive and send is the log's business.

Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(stage, microbatch) -> what enters it from outside."""
Target = Callable[[int], torch.Tensor]


class ActionExecutor(torch_private.Schedule):
    """A schedule that is given its actions.

    It calls what torch's own runtime calls, in the same order for each microbatch, and hands what passes between two
    adjacent stages of the rank from one to the other, as that does in V-schedules. Gradients are not scaled.
    """

    def __init__(self, stages: Sequence[Any], microbatches: int, loss_fn: Any):
        super().__init__(microbatches, loss_fn)
        self._stages = list(stages)
        self._by_index = {stage.stage_index: stage for stage in stages}
        self._inferred = False

    def run(
        self,
        actions: Sequence[StepAction],
        inputs: Inputs,
        target: Target,
        weighing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> dict[int, torch.Tensor]:
        """The losses by microbatch, if the last stage is among them. Weights' gradients of split backwards are computed
        inside of `weighing()`."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        outside = Once(inputs, target)
        if not self._inferred:
            self._infer(actions[0].microbatch, outside)
        self._begin(actions)
        losses: dict[int, Any] = {}
        for index, kind, mb in actions:
            stage = self._by_index[index]
            if kind == FORWARD:
                output = self._forward(stage, mb, outside)
                if stage.is_last:
                    losses[mb] = self._compute_loss(output, outside.target(mb))  # type: ignore[no-untyped-call]
            elif kind == BACKWARD_WEIGHT:
                with weighing():
                    stage.backward_weight_one_chunk(mb)
            else:
                self._backward(stage, mb, losses.get(mb) if stage.is_last else None, kind == BACKWARD)
        self._end()
        return {mb: loss.detach() for mb, loss in losses.items() if isinstance(loss, torch.Tensor)}

    def _begin(self, actions: Sequence[StepAction]) -> None:
        """Shapes are known, nothing is computed yet."""

    def _end(self) -> None:
        """All is computed."""

    def _infer(self, mb: int, outside: "Once") -> None:
        """Shapes, as every process does it before its first forward."""
        of = {stage.stage_index: outside.ahead(stage.stage_index, mb) for stage in self._stages}
        args = next((of[stage.stage_index][0] for stage in self._stages if stage.is_first), ())
        _, kwargs = of[self._stages[0].stage_index]
        goal = outside.target_ahead(mb) if any(stage.is_last for stage in self._stages) else None
        self._initialize_pp_stages(self._stages, args, kwargs, goal, False, False)
        self._inferred = True

    def _forward(self, stage: Any, mb: int, outside: "Once") -> Any:
        args, kwargs = outside.inputs(stage.stage_index, mb)
        before, behind = self._beside(stage)
        if before is None:
            stage.get_fwd_recv_ops(mb)
        output = stage.forward_one_chunk(mb, args, kwargs, save_forward_output=False)
        if behind is None:
            stage.get_fwd_send_ops(mb)
        else:
            behind.set_local_fwd_input(output, mb)
        return output

    def _backward(self, stage: Any, mb: int, loss: Any, whole: bool) -> None:
        before, behind = self._beside(stage)
        if behind is None:
            stage.get_bwd_recv_ops(mb)
        stage.backward_one_chunk(mb, loss=loss, full_backward=whole, last_backward=False)
        if before is None:
            stage.get_bwd_send_ops(mb)
        else:
            before.set_local_bwd_input(stage.get_local_bwd_output(mb), mb)

    def _beside(self, stage: Any) -> tuple[Any, Any]:
        """The stages before and behind it, where they are on this rank."""
        return self._by_index.get(stage.stage_index - 1), self._by_index.get(stage.stage_index + 1)

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("actions are given: call run")

    _step_microbatches = step


class Once:
    """What enters from outside: each is read once, though shapes are inferred from the first before it is used."""

    def __init__(self, inputs: Inputs, target: Target):
        self._inputs, self._target = inputs, target
        self._ahead: dict[tuple[int, int], tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._targets: dict[int, torch.Tensor] = {}

    def ahead(self, stage: int, mb: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._ahead[stage, mb] = self._inputs(stage, mb)
        return self._ahead[stage, mb]

    def target_ahead(self, mb: int) -> torch.Tensor:
        self._targets[mb] = self._target(mb)
        return self._targets[mb]

    def inputs(self, stage: int, mb: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._ahead.pop((stage, mb), None) or self._inputs(stage, mb)

    def target(self, mb: int) -> torch.Tensor:
        target = self._targets.pop(mb, None)
        return self._target(mb) if target is None else target


# What a helper does with the tensors that its stage sends: the log has them already, or the owner gets them.


class VerifyingCapture:
    """A `Capture` (swift_ft.train.boundary_log) that writes nothing.

    ``record``: compares with `logged`, by stream the digests that the log has; what it lacks is kept, until the owner
    is given it (`lacking`): a stream has one writer. What a stage takes in from outside is the owner's to record.
    """

    def __init__(self, logged: Mapping[str, Mapping[RecordKey, bytes]]):
        self._logged = logged
        self.compares = True
        """False: the owner is off the log, so nothing is compared, and nothing that the log lacks belongs there."""
        self.verified = 0
        self.bytes: Counter[str] = Counter()
        """By stream, of what was compared since somebody has cleared it."""
        self.lacking: list[tuple[str, RecordKey, torch.Tensor]] = []

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Compares a tensor with the log's digest, or keeps it for the owner. Raises Divergence: other bits."""
        if stream not in self._logged or not self.compares:
            return
        had = self._logged[stream].get(key)
        if had is None:
            self.lacking.append((stream, key, tensor.detach().clone()))
            return
        flat = plain(tensor)
        digest = digest_of(dtype_name(tensor), tuple(tensor.shape), byte_view(flat).data)
        if digest != had:
            raise Divergence(differs_words(stream, key, had, digest, who="a helper"))
        self.verified += 1
        self.bytes[stream] += tensor.nbytes

    def wait_copied(self) -> None:
        """Nothing was lent."""

    drop = wait_copied


# A copy of a recovery group: helpers that compute the same microbatches of neighbouring stages, as a small pipeline.
#
# A helper gets activations from the helper of the stage before and gradients from that of the stage behind, over the
# group of all ranks; what crosses the recovery group's ends comes out of the log. Receives are posted for the whole
# step at once and sends are not waited for, so nobody is held up by anything but what it computes with.


class CopyPipeline:
    """A helper's place in its copy: `ranks`, by stage."""

    def __init__(self, wire: Wire, rank: int, ranks: Sequence[int]):
        place = list(ranks).index(rank)
        self._post = Post(wire)
        self._together = Together(rank, ranks, wire)
        self._before = ranks[place - 1] if place else None
        self._behind = ranks[place + 1] if place + 1 < len(ranks) else None
        self.alone = len(ranks) == 1
        """No copy of several."""

    def receive(self, ops: Sequence[dist.P2POp], *, forward: bool) -> list[Pending]:
        """`ops`: what the owner would do, who has other neighbours."""
        peer = self._before if forward else self._behind
        return [self._post.receive(op.tensor.detach(), *_way(peer, forward)) for op in ops]

    def send(self, ops: Sequence[dist.P2POp], *, forward: bool) -> None:
        peer = self._behind if forward else self._before
        for op in ops:
            self._post.send(op.tensor.detach().contiguous(), *_way(peer, forward))

    def compare(self, given: Sequence[int]) -> None:
        """Raises ReplayRefused unless all helpers of the copy were given the same."""
        self._together.compare(given)

    def wait_sent(self) -> None:
        """Waits until all that was sent has arrived. Raises Broken if it does not."""
        try:
            self._post.wait_sent()
        except RuntimeError as error:
            raise Broken(str(error)) from error


def _way(peer: int | None, forward: bool) -> tuple[int, int]:
    assert peer is not None, "what passes over the ends of the group is in the log"
    return peer, INNER_ACTIVATIONS if forward else INNER_GRADIENTS


class InCopy(ActionExecutor):
    """A walk over a stage whose neighbours other helpers of the copy walk over. (Where `inner` is alone: a walk.)"""

    def __init__(self, stages: Sequence[Any], microbatches: int, loss_fn: Any, inner: CopyPipeline):
        super().__init__(stages, microbatches, loss_fn)
        self._inner = inner
        self._activations: dict[int, list[Pending]] = {}
        self._gradients: dict[int, list[Pending]] = {}

    def _begin(self, actions: Sequence[StepAction]) -> None:
        if self._inner.alone:
            return
        (stage,) = self._stages
        for mb in dict.fromkeys(action.microbatch for action in actions):
            self._activations[mb] = self._inner.receive(stage.get_fwd_recv_ops(mb), forward=True)
            self._gradients[mb] = self._inner.receive(stage.get_bwd_recv_ops(mb), forward=False)

    def _end(self) -> None:
        self._inner.wait_sent()

    def _forward(self, stage: Any, mb: int, outside: Once) -> Any:
        if self._inner.alone:
            return super()._forward(stage, mb, outside)
        args, kwargs = outside.inputs(stage.stage_index, mb)
        wait_for(self._activations.pop(mb))
        output = stage.forward_one_chunk(mb, args, kwargs, save_forward_output=False)
        self._inner.send(stage.get_fwd_send_ops(mb), forward=True)
        return output

    def _backward(self, stage: Any, mb: int, loss: Any, whole: bool) -> None:
        if self._inner.alone:
            super()._backward(stage, mb, loss, whole)
            return
        wait_for(self._gradients.pop(mb))
        stage.backward_one_chunk(mb, loss=loss, full_backward=whole, last_backward=False)
        self._inner.send(stage.get_bwd_send_ops(mb), forward=False)


def wait_for(arriving: Sequence[Pending]) -> None:
    """An error of the transport is no error of the module's. Raises Broken for it."""
    try:
        for pending in arriving:
            pending.wait()
    except RuntimeError as error:
        raise Broken(str(error)) from error


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
        self._post.wait_sent()
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
        if why := layout_difference(asked["tensors"], module):
            return [], f"another module than the owner's: {why}"
        if own & {tensor.data_ptr() for _, tensor in parameters_and_buffers(module) if tensor.numel()}:
            return [], "the module that was made shares memory with this rank's own stage"
        weights = sum(tensor.nbytes for _, tensor in parameters_and_buffers(module))
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
        self._actions = [StepAction(*action) for action in begin["actions"]]
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
        self._walk = InCopy(self._stages, asked["microbatches"], torch_private.loss_function(schedule), inner)
        torch_private.wrap_loss(self._walk, logged_loss(self._stages, self._channel))
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
            self._post.wait_sent()
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
        for stage in self._stages:
            stage.begin_step()
        self._checked.compares = note["compared"]
        tensors = [tensor for _, tensor in parameters_and_buffers(self._module)]
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
        ambient = set_module_modes(self._module, note)
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
