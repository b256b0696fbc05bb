"""A survivor that computes microbatches of another rank's stages (helper).

Its own modules, optimizer and loader stay in memory untouched: the other stages are built in addition to them, without
an optimizer. If memory does not suffice for both, this rank does not help. A digest of the whole state, taken before
and after, verifies that it did not change.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from swift_ft import events, torch_private
from swift_ft.comm.process_groups import Interrupted
from swift_ft.comm.worker_thread import Broken
from swift_ft.coordinator_messages import PublishedPlan
from swift_ft.errors import Divergence, RecordMissing, ReplayRefused, SwiftError
from swift_ft.log.memory import available_memory
from swift_ft.log.reader import LogReader, ReadFilter
from swift_ft.log.record import RecordKey, digest_of
from swift_ft.log.sender import differs_words
from swift_ft.planner.schedule import BACKWARD_WEIGHT
from swift_ft.state.digests import digest_of as digest_of_state
from swift_ft.state.rng import kept
from swift_ft.state.tensors import byte_view, dtype_name, plain
from swift_ft.state.tree import split
from swift_ft.train.boundary_log import Capture
from swift_ft.train.gradient_chain import (
    Addends,
    GradientChain,
    Post,
    Strides,
    first_strides,
    layout_difference,
    parameters_and_buffers,
    set_module_modes,
    tied,
    together,
)
from swift_ft.train.participants import Site
from swift_ft.train.profiling import BACKWARD, FORWARD
from swift_ft.train.shared_replay import (
    StepAction,
    check_buffers,
    memory_needed,
)
from swift_ft.train.stage import LoggedPipelineStage, logged_loss
from swift_ft.train.training_state import TrainerState

# Execution of some actions of a rank's step on the rank's stages. Receives and sends go through the log.

Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
"""(stage, microbatch) -> external arguments and keyword arguments of the stage."""
Target = Callable[[int], torch.Tensor]
"""Microbatch -> target of its loss."""


class ActionExecutor(torch_private.Schedule):
    """A schedule that executes a given list of actions.

    Makes the same calls as torch's own runtime, in the same order for each microbatch. Passes tensors between two
    adjacent stages of the rank directly, as torch does in V-schedules. Does not scale gradients.
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
        """Executes `actions`. Returns the losses by microbatch, empty without the last stage. Computes the weight
        gradients of split backwards inside of `weighing()`."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        # Each is read once, also those of which shapes are inferred.
        inputs, target = functools.cache(inputs), functools.cache(target)
        if not self._inferred:
            self._infer(actions[0].microbatch, inputs, target)
        losses: dict[int, Any] = {}
        for index, kind, mb in actions:
            stage = self._by_index[index]
            if kind == FORWARD:
                output = self._forward(stage, mb, inputs)
                if stage.is_last:
                    losses[mb] = self._compute_loss(output, target(mb))  # type: ignore[no-untyped-call]
            elif kind == BACKWARD_WEIGHT:
                with weighing():
                    stage.backward_weight_one_chunk(mb)
            else:
                self._backward(stage, mb, losses.get(mb) if stage.is_last else None, kind == BACKWARD)
        return {mb: loss.detach() for mb, loss in losses.items() if isinstance(loss, torch.Tensor)}

    def _infer(self, mb: int, inputs: Inputs, target: Target) -> None:
        of = {stage.stage_index: inputs(stage.stage_index, mb) for stage in self._stages}
        args = next((of[stage.stage_index][0] for stage in self._stages if stage.is_first), ())
        _, kwargs = of[self._stages[0].stage_index]
        goal = target(mb) if any(stage.is_last for stage in self._stages) else None
        self._initialize_pp_stages(self._stages, args, kwargs, goal, False, False)
        self._inferred = True

    def _forward(self, stage: Any, mb: int, inputs: Inputs) -> Any:
        args, kwargs = inputs(stage.stage_index, mb)
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
        """Returns the stages before and after it, each None if it is not on this rank."""
        return self._by_index.get(stage.stage_index - 1), self._by_index.get(stage.stage_index + 1)

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("actions are given: call run")

    _step_microbatches = step


# Sends of a helper's stage: compared with the log if it has them already, otherwise passed to the owner.


class VerifyingCapture(Capture):
    """A capture that compares sends with the log instead of writing them.

    `logged`: by stream, the digests that the log has. A tensor that the log lacks is kept in `lacking` and passed to
    the owner, because a stream has one writer. External inputs are ignored: the owner records them.
    """

    def __init__(self, logged: Mapping[str, Mapping[RecordKey, bytes]]):
        self._logged = logged
        self.verified = 0
        self.lacking: list[tuple[str, RecordKey, torch.Tensor]] = []
        """Sends that the log lacks."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Compares a tensor with the log's digest, or keeps it for the owner. Raises Divergence if the bits differ."""
        if stream not in self._logged:
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


_EVERY_STEP = 1 << 62
"""A `below_step` above every step."""

MakeModule = Callable[[int], torch.nn.Module]


class Helper:
    """(restorer) A rank's help in one replay: ``run`` returns once the owner needs it no more, the state unchanged."""

    def __init__(self, site: Site, make_module: MakeModule):
        self._site = site
        self._make_module = make_module
        self._post = Post(site.world)

    def run(self, owner: int, published: PublishedPlan, job: str) -> None:
        """Builds the owner's stages and computes their microbatches until the owner ends it. Raises ReplayRefused if
        the owner's step cannot be repeated or this rank's own state has changed, Divergence if a send differs from the
        log, Interrupted once a newer generation is published."""
        before = digest_of_state(self._site.state.state_dict())
        asked, _ = self._post.read(owner)
        if asked is None:
            return
        modules, why = self._build(asked)
        self._post.note(owner, {"why": why})
        begin, _ = self._post.read(owner)
        self._post.wait_sent()
        if why:
            events.emit(
                "help_declined",
                rank=self._site.rank,
                generation=published.generation,
                owner=owner,
                reason=why,
            )
        if modules and begin is not None:
            reader = LogReader(published.sources, job)
            work = _Work(self._site, asked, begin, modules, self._post)
            try:
                work.run(owner, reader)
            finally:
                work.close()
                reader.close()
            events.emit(
                "helped", rank=self._site.rank, generation=published.generation, owner=owner, **work.done()
            )
        if digest_of_state(self._site.state.state_dict()) != before:
            self._site.state.present = False
            raise ReplayRefused(
                f"the state of rank {self._site.rank} changed while it helped rank {owner}: what session.help_replay "
                "was given must make a module that shares nothing with the stage's own"
            )

    def _build(self, asked: dict[str, Any]) -> tuple[list[torch.nn.Module], str]:
        """Returns the stages' modules, or an empty list and the reason why this rank does not help."""
        own = {
            tensor.data_ptr() for tensor in split(self._site.state.state_dict())[0].values() if tensor.numel()
        }
        try:
            with kept():  # the trainer's function may seed the random generators
                modules = [self._make_module(index) for index in asked["stages"]]
        except Exception as error:  # noqa: BLE001  (the trainer's code: training goes on without this help)
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
        # Only helpers after the first keep single gradients. The line then has three ranks or more: a third each.
        share = -(-asked["microbatches"] // 3)
        needed = memory_needed(weights, share)
        free = available_memory()
        if free is not None and needed > free:
            return [], f"it needs {needed >> 20} MiB of memory, and {free >> 20} MiB are free"
        return modules, ""


class _Work:
    """Replay of the owner's stages on this helper, from the first step to the owner's last note."""

    def __init__(
        self,
        site: Site,
        asked: dict[str, Any],
        begin: dict[str, Any],
        modules: list[torch.nn.Module],
        post: Post,
    ):
        (schedule,) = site.state.schedules
        self._post = post
        self._check = site.member.check
        self._line = GradientChain(post, begin["line"], site.rank, self._check)
        self._first = begin["line"][0] == site.rank
        self._from = begin["from"]
        self._own = range(begin["first"], begin["behind"])
        self._actions = [StepAction(*action) for action in begin["actions"]]
        self._share = ReadFilter(
            first=self._own.start, behind=self._own.stop, of=asked["microbatches"], below_step=_EVERY_STEP
        )
        self._logged: dict[str, dict[RecordKey, bytes]] = {}
        self._checked = VerifyingCapture(self._logged)
        self._channel = site.channel.beside(self._checked)
        self._stages = [
            self._stage(module, index, asked["of"], site.state)
            for module, index in zip(modules, asked["stages"], strict=True)
        ]
        self._module = together(self._stages)
        loss_fn = torch_private.loss_function(schedule)
        self._walk = ActionExecutor(self._stages, asked["microbatches"], loss_fn)
        torch_private.wrap_loss(self._walk, logged_loss(self._stages, self._channel))
        self._steps = self._verified = self._told = 0

    def _stage(self, module: torch.nn.Module, index: int, of: int, state: TrainerState) -> Any:
        """Returns the stage with the owner's placement, so it has the same neighbours, on the same ranks."""
        own = state.stages[0]
        stage: Any = LoggedPipelineStage(module, index, of, own.device, group=own.group)
        stage.stage_index_to_group_rank = dict(own.stage_index_to_group_rank)
        stage.group_rank = stage.stage_index_to_group_rank[index]
        stage._attach(self._channel, state.updates)
        return stage

    def run(self, owner: int, reader: LogReader) -> None:
        for stream in self._streams():
            self._logged[stream] = {}
            with suppress(RecordMissing):  # the owner had not logged a record yet
                self._logged[stream] = reader.digests(stream, self._from, cancelled=self._called_off)
        self._channel.begin_replay(reader, self._from, ())
        self._channel.want(self._share, self._from)
        self._channel.read_ahead(stream for stage in self._stages for stream in stage.streams_read())
        while (note := self._next(owner)) is not None:
            self._step(owner, note)

    def _called_off(self) -> bool:
        """Returns False, or raises Interrupted."""
        self._check()
        return False

    def _next(self, owner: int) -> dict[str, Any] | None:
        note, _ = self._post.read(owner)
        self._post.wait_sent()
        told: dict[str, Any] | None = note
        return told

    def _streams(self) -> Iterator[str]:
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
        tensors = [tensor for _, tensor in parameters_and_buffers(self._module)]
        with torch.no_grad():
            self._line.pass_down(tensors)
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        losses, addends = self._compute(note)
        strides = first_strides(addends)
        with torch.no_grad():
            self._line.pass_up(list(self._module.parameters()), addends)
        check_buffers(buffers)
        self._send_results(owner, losses, strides)
        self._steps += 1

    def _compute(self, note: dict[str, Any]) -> tuple[dict[int, torch.Tensor], list[list[torch.Tensor]]]:
        """Returns the losses by microbatch, and the addends of each parameter's gradient. Raises ReplayRefused for an
        error of the module's."""
        parameters = list(self._module.parameters())
        ambient = set_module_modes(self._module, note)
        gradients = Addends(parameters, first=self._first)
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
        except Exception as error:  # the owner's step did not raise
            raise ReplayRefused(f"microbatches of stages {self._indices}: {error}") from error
        finally:
            gradients.close()
        return losses, gradients.collect()

    def _inputs(self, stage: int, mb: int, note: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        count, names = note["args"] if stage == 0 else 0, note["kwargs"]
        inputs = [
            self._channel.external(stage, "X", mb, slot, self._device) for slot in range(count + len(names))
        ]
        return tuple(inputs[:count]), dict(zip(names, inputs[count:], strict=True))

    def _target(self, mb: int) -> torch.Tensor:
        return self._channel.external(self._stages[0].num_stages - 1, "T", mb, 0, self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device(self._stages[0].device)

    @property
    def _indices(self) -> list[int]:
        return [stage.stage_index for stage in self._stages]

    def _send_results(self, owner: int, losses: dict[int, torch.Tensor], strides: Strides) -> None:
        lacking, self._checked.lacking[:] = list(self._checked.lacking), []
        told = {
            "losses": [[mb, dtype_name(loss), list(loss.shape)] for mb, loss in losses.items()],
            "lacking": [
                [stream, key.microbatch, key.slot, dtype_name(t), list(t.shape)] for stream, key, t in lacking
            ],
            "verified": self._checked.verified - self._verified,
            "records": self._channel.records_read - self._told,
            "microbatches": len(self._own) * len(self._stages),
            "strides": strides,
        }
        self._verified, self._told = self._checked.verified, self._channel.records_read
        self._post.note(owner, told, [*losses.values(), *(tensor for _, _, tensor in lacking)])

    def done(self) -> dict[str, Any]:
        return {
            "stages": self._indices,
            "steps": self._steps,
            "microbatches": self._channel.microbatches_replayed,
            "verified": self._checked.verified,
            "records": self._channel.records_read,
        }

    def close(self) -> None:
        self._channel.end_replay()
