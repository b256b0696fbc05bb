"""The rank whose stages are replayed, while others compute a part of them.

    ask → offers → the line is made
    every step: the trainer's own, in which the stages ask this for its share (`swift.runtime.stage.Share`)
    leave → the helpers go back to their own stages; the rest is replayed alone

Whatever others cannot do as this rank would is found out before anything is computed, and said: then nobody helps.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from swift import events
from swift.errors import ReplayRefused
from swift.log.read_filter import ReadFilter
from swift.log.record import RecordKey
from swift.recovery import Help
from swift.runtime import _torch
from swift.runtime.backends.base import Wire
from swift.runtime.channel import Channel
from swift.runtime.manifest import torch_dtype
from swift.runtime.receive_buffers import available_memory
from swift.runtime.shared_replay.actions import Action, ahead, of_share, one_by_one, unordered
from swift.runtime.shared_replay.agreement import Together, decline
from swift.runtime.shared_replay.gradient_chain import GradientChain, Post, taken_apart
from swift.runtime.shared_replay.gradients import OwnGradients, Strides, first_strides, laid_out
from swift.runtime.shared_replay.manifest import manifest, named, standing, tied, together
from swift.runtime.shared_replay.shares import memory_needed, shares, workers
from swift.runtime.stage import LoggedPipelineStage
from swift.runtime.state import TrainerState
from swift.runtime.tensors import same_bits


def why_alone(state: TrainerState) -> str:
    """Why this rank's replay cannot be shared; empty: it can."""
    if why := why_no_help(state):
        return why
    if tied([stage.submod for stage in state.stages]):
        return "stages of one rank share a parameter"  # it is added to by both, not microbatch by microbatch
    return ""


def why_no_help(state: TrainerState) -> str:
    """Why this rank can share no other's replay, under the schedule that all have; empty: it can."""
    if len(state.schedules) != 1:
        return "there is more or less than one schedule"
    stages = _torch.schedule_stages(state.schedules[0])
    if {id(stage) for stage in stages} != {id(stage) for stage in state.stages}:
        return "a stage is not in the schedule"
    if any(type(stage) is not LoggedPipelineStage for stage in stages):
        return "a stage was traced, or is no stage of a pipeline"
    if any(stage.dw_builder is not None for stage in stages):
        return "a stage has a dw_builder"
    if stages[0].num_stages == len(stages):
        return "the whole pipeline is on one rank"  # nothing that it sends could be compared
    actions = actions_of(state)
    if actions is None:
        return f"what {type(state.schedules[0]).__name__} computes in which order is not known"
    microbatches = _torch.schedule_microbatches(state.schedules[0])
    return unordered(actions, [stage.stage_index for stage in stages], microbatches)


def actions_of(state: TrainerState) -> list[Action] | None:
    """What this rank computes in a step; None: not known."""
    actions = _torch.schedule_actions(state.schedules[0])
    return None if actions is None else [Action(*action) for action in actions]


def send_away(rank: int, help: Help, wire: Wire, generation: int, why: str) -> None:
    """(an owner that cannot share its replay) To whoever waits to be asked, and to the other owners of its group."""
    post = Post(wire)
    for helper in help.helpers:
        post.note(helper, None)
    declined = decline(wire, rank, help, why)
    _tell_begin(rank, generation, [], [], help, declined)
    post.settle()


def _tell_begin(
    rank: int,
    generation: int,
    helpers: Sequence[int],
    shares: Sequence[int],
    help: Help,
    declined: dict[str, str],
) -> None:
    events.emit(
        "help_begin",
        rank=rank,
        generation=generation,
        helpers=list(helpers),
        shares=list(shares),
        until=help.until,
        declined=declined,
        **({"together": list(help.together)} if help.together else {}),
    )


@dataclass
class Helped:
    """What helpers have done in a replay."""

    steps: int = 0
    """That were shared."""
    microbatches: int = 0
    """Of every stage."""
    verified: int = 0
    """Sends that were compared with the log."""
    records: int = 0
    """Read from the log."""
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of each helper: where its time went (`swift.runtime.shared_replay.waits`)."""


class Owner:
    """(restorer) ``ask`` → ``gather`` → per step ``at`` → … → ``close``; (stage) what `Share` says."""

    def __init__(
        self,
        rank: int,
        help: Help,
        wire: Wire,
        channel: Channel,
        state: TrainerState,
        check: Callable[[], None],
    ):
        self._rank = rank
        self._help = help
        self._until = help.until
        self._asked = tuple(help.helpers)
        self._together = Together(rank, help.together or (rank,), wire)
        self._post = Post(wire)
        self._channel = channel
        self._check = check
        self._state = state
        (schedule,) = state.schedules
        self._stages = _torch.schedule_stages(schedule)
        self._last = next((stage for stage in self._stages if stage.is_last), None)
        self._module = together(self._stages)
        self._microbatches = _torch.schedule_microbatches(schedule)
        self._generation = 0
        self._line: GradientChain | None = None
        self._helpers: tuple[int, ...] = ()
        """In the order of the line."""
        self._own = range(0)
        self._sharing = False
        self._begun = -1
        """The step that was looked at already."""
        self._reduced: list[tuple[Any, int]] = []
        """Stages of which this rank has computed its share of the step."""
        self._gradients: OwnGradients | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.helped = Helped()

    # --- before and after ---

    def ask(self) -> None:
        """The helpers build the stage while this rank loads its checkpoint."""
        for helper in self._asked:
            self._post.note(
                helper,
                {
                    "stages": [stage.stage_index for stage in self._stages],
                    "of": self._stages[0].num_stages,
                    "microbatches": self._microbatches,
                    "tensors": manifest(self._module),
                },
            )

    def gather(self, from_version: int, generation: int) -> None:
        """Takes those who can, and no more than make it quicker."""
        self._generation = generation
        microbatches = self._microbatches
        offers = {helper: self._post.read(helper)[0] for helper in self._asked}
        able = [copy for copy, helper in enumerate(self._asked) if not offers[helper]["why"]]
        why = {str(helper): offer["why"] for helper, offer in offers.items() if offer["why"]}
        able, declined = self._together.choose(able, why)
        count = workers(microbatches, 1 + len(able))
        if count > 1:
            lacking = self._lacks_memory(len(shares(microbatches, count)[-1]))
            if lacks := self._together.first_reason(lacking):
                declined |= lacks
                count = 1
        self._helpers = tuple(self._asked[copy] for copy in able[: count - 1])
        for helper in self._asked:
            if helper not in self._helpers:
                self._post.note(helper, None)
        each = shares(microbatches, count)
        line = (*self._helpers, self._rank)
        actions = actions_of(self._state)
        assert actions is not None, "nobody owns a shared replay of an unknown schedule"
        for helper, part in zip(self._helpers, each, strict=False):
            begin: dict[str, Any] = {
                "from": from_version,
                "line": line,
                "first": part.start,
                "behind": part.stop,
            }
            begin["actions"] = ahead(one_by_one(of_share(actions, part)), self._together.behind)
            self._post.note(helper, begin)
        sizes = [len(part) for part in each]
        _tell_begin(self._rank, generation, self._helpers, sizes, self._help, declined)
        if not self._helpers:
            return
        self._own = own = each[-1]
        self._line = GradientChain(self._post, line, self._rank, self._check)
        for stage in self._stages:
            stage.share = self
        share = ReadFilter(first=own.start, behind=own.stop, of=microbatches, below_step=self._until)
        self._channel.want(share, from_version)

    def _lacks_memory(self, share: int) -> str:
        weights = sum(parameter.nbytes for parameter in self._module.parameters())
        needed, free = memory_needed(weights, share), available_memory()
        if free is None or needed <= free:
            return ""
        return f"sharing needs {needed >> 20} MiB of memory, and {free >> 20} MiB are free"

    def at(self, version: int) -> None:
        """This step is next."""
        if self._line is not None and version >= self._until:
            self._leave("")

    def close(self) -> None:
        """Nothing of this rank waits for, or hooks into, anything any more."""
        if self._gradients is not None:
            self._gradients.close()
        for stage in self._stages:
            stage.share = None
        self._gradients = self._line = None
        self._sharing = False

    def _leave(self, why: str) -> None:
        for helper in self._helpers:
            self._post.note(helper, None)
        self._post.settle()
        self.close()
        events.emit(
            "help_end", rank=self._rank, generation=self._generation, steps=self.helped.steps, reason=why
        )

    # --- what the stages ask ---

    def begin(self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saves_output: bool) -> None:
        """As `Share.begin`: at a step's first forward it tells the helpers, and passes them the weights.

        If this step cannot be shared, the helpers leave, and this rank goes on alone.
        """
        if self.begun(stage):
            return
        self._begun = self._channel.step
        first = any(stage.is_first for stage in self._stages)
        why = self._unfit(args if first else (), kwargs, saves_output)
        why = self._together.at(self._channel.step, self._own, why)
        if why:
            self._leave(why)
            self._channel.want(None, self._channel.step)
            return
        assert self._line is not None
        note = {
            "step": self._channel.step,
            "args": len(args) if first else 0,
            "kwargs": list(kwargs),
            "compared": not self._channel.off_log,
            "logged_by": [str(groups) for groups in self._channel.logged_by],
            **standing(self._module),
        }
        for helper in self._helpers:
            self._post.note(helper, note)
        with torch.no_grad(), self._channel.clock.line():
            self._line.pass_down([tensor for _, tensor in named(self._module)])
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        parameters = list(self._module.parameters())
        self._gradients = OwnGradients(parameters, first=False)
        self._losses = {}
        self._reduced = []
        self._sharing = True

    def begun(self, stage: Any) -> bool:
        # Where a schedule is run again in a step, gradients of its first call are there already.
        return stage.call > 0 or self._begun == self._channel.step

    def skips(self, mb: int) -> bool:
        return self._sharing and mb not in self._own

    def loss(self, mb: int) -> torch.Tensor:
        assert self._last is not None
        return self._losses.setdefault(mb, torch.empty_like(self._last.loss_like))

    def weighing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._gradients is None else self._gradients.weighing()

    def combine(self, stage: Any, scale: int) -> list[tuple[Any, int]]:
        """As `Share.combine`: when the last stage asks, gradients of all workers are added in order."""
        if not self._sharing or self._gradients is None or self._line is None:
            return [(stage, scale)]
        self._reduced.append((stage, scale))
        if len(self._reduced) < len(self._stages):
            return []
        self._combine(self._gradients, self._line)
        self._gradients = None
        self._sharing = False
        self.helped.steps += 1
        return self._reduced

    def _combine(self, gradients: OwnGradients, line: GradientChain) -> None:
        parameters = list(self._module.parameters())
        own = gradients.taken()
        strides = first_strides(own)
        with torch.no_grad(), self._channel.clock.line():
            sums = line.pass_up(parameters, own)
        told = [self._told(helper) for helper in self._helpers]
        with self._channel.clock.line():
            self._post.settle()
        check_buffers(self._buffers)
        for parameter, total, *candidates in zip(parameters, sums, *told, strides, strict=True):
            first = next((strides_of for strides_of in candidates if strides_of is not None), None)
            parameter.grad = None if total is None or first is None else laid_out(total, first)

    def _told(self, helper: int) -> Strides:
        with self._channel.clock.line():
            told, payload = self._post.read(helper)
        self.helped.seconds[helper] = told["seconds"]
        return self._take(told, payload)

    def _take(self, told: dict[str, Any], payload: torch.Tensor) -> Strides:
        """What a helper has besides gradients: losses, and what the log lacked; and how its gradients are laid out."""
        shapes = [(torch_dtype(dtype), shape) for *_, dtype, shape in [*told["losses"], *told["lacking"]]]
        tensors = taken_apart(payload, shapes)
        for (mb, *_), value in zip(told["losses"], tensors, strict=False):
            loss = self.loss(mb)
            if (loss.dtype, loss.shape) != (value.dtype, value.shape):
                raise ReplayRefused(f"the loss of microbatch {mb} has another type or shape on its helper")
            loss.copy_(value)
        for (stream, mb, slot, *_), value in zip(
            told["lacking"], tensors[len(told["losses"]) :], strict=True
        ):
            self._channel.hand_in(stream, RecordKey(self._channel.step, mb, slot), value)
        for stream, size in told["bytes"].items():  # of this rank's step, wherever it was computed
            self._channel.profile.logged(stream, size)
        self.helped.verified += told["verified"]
        self.helped.records += told["records"]
        self.helped.microbatches += told["microbatches"]
        strides: Strides = told["strides"]
        return strides

    def _unfit(self, args: Sequence[Any], kwargs: dict[str, Any], saves_output: bool) -> str:
        """Why helpers would not do what this rank does; empty: they do."""
        stages, module, last = self._stages, self._module, self._last
        external = [*args, *kwargs.values()]
        reasons = {
            "the schedule runs without a backward first": not stages[0].has_backward,
            "gradients are there before the first microbatch; use zero_grad(set_to_none=True)": any(
                parameter.grad is not None for parameter in module.parameters()
            ),
            "a forward changes buffers, each microbatch those that the one before has left": any(
                stage.changes_buffers for stage in stages
            ),
            "hooks on parameters' gradients": any(map(_torch.gradient_hooks, module.parameters())),
            "sparse gradients": any(getattr(part, "sparse", False) is True for part in module.modules()),
            "an external input is no plain tensor": any(
                not isinstance(value, torch.Tensor) or value.requires_grad for value in external
            ),
            "an external input is not contiguous": any(
                isinstance(value, torch.Tensor) and not value.is_contiguous() for value in external
            ),
        }
        if last is not None:
            reasons |= {
                "the outputs are asked for; call schedule.step with return_outputs=False": saves_output,
                "the loss is no tensor": not isinstance(last.loss_like, torch.Tensor),
                "the loss is scaled": any(
                    isinstance(value, torch.amp.GradScaler) for value in self._state.objects.values()
                ),
            }
        return next((why for why, unfit in reasons.items() if unfit), "")


def check_buffers(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ReplayRefused if a shared step has changed them after all."""
    if not all(same_bits(buffer, value) for buffer, value in before):
        raise ReplayRefused("a forward changes buffers, each microbatch those that the one before has left")
