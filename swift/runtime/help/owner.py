"""The rank whose stage is replayed, while others compute a part of it.

    ask → offers → the line is made
    every step: the trainer's own, in which the stage asks this for its share (`swift.runtime.stage.Share`)
    leave → the helpers go back to their own stages; the rest is replayed alone

Whatever others cannot do as this rank would is found out before anything is computed, and said: then nobody helps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.errors import ReplayRefused
from swift.log.record import RecordKey
from swift.log.share import Share
from swift.runtime import _torch
from swift.runtime.channel import Channel
from swift.runtime.destination import available_memory
from swift.runtime.help.gradients import Addends
from swift.runtime.help.line import Line, Post, Wire, taken_apart
from swift.runtime.help.manifest import manifest, named, standing
from swift.runtime.help.shares import memory_needed, shares, workers
from swift.runtime.manifest import torch_dtype
from swift.runtime.stage import LoggedPipelineStage
from swift.runtime.state import TrainerState
from swift.runtime.tensors import same_bits


def can_share(state: TrainerState) -> bool:
    """This rank's replay can be shared, and it can share another's: one stage, in a schedule whose order is known."""
    return (
        len(state.stages) == 1
        and len(state.schedules) == 1
        and type(state.stages[0]) is LoggedPipelineStage
        and state.stages[0].dw_builder is None
        and state.stages[0].num_stages > 1  # else nothing that it sends could be compared
        and _torch.in_order(state.schedules[0])
    )


def send_away(wire: Wire, helpers: Sequence[int]) -> None:
    """(an owner that cannot share its replay) To whoever waits to be asked."""
    post = Post(wire)
    for helper in helpers:
        post.note(helper, None)
    post.settle()


@dataclass
class Helped:
    """What helpers have done in a replay."""

    steps: int = 0
    """That were shared."""
    microbatches: int = 0
    verified: int = 0
    """Sends that were compared with the log."""
    records: int = 0
    """Read from the log."""


class Owner:
    """(restorer) ``ask`` → ``gather`` → per step ``at`` → … → ``close``; (stage) what `Share` says."""

    def __init__(
        self,
        rank: int,
        help: pb.Help,
        wire: Wire,
        channel: Channel,
        state: TrainerState,
        check: Callable[[], None],
    ):
        self._rank = rank
        self._until = help.until
        self._asked = tuple(help.helpers)
        self._post = Post(wire)
        self._channel = channel
        self._check = check
        self._state = state
        (self._stage,) = state.stages
        (self._schedule,) = state.schedules
        self._generation = 0
        self._line: Line | None = None
        self._helpers: tuple[int, ...] = ()
        """In the order of the line."""
        self._own = range(0)
        self._sharing = False
        self._addends: Addends | None = None
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
                    "stage": self._stage.stage_index,
                    "of": self._stage.num_stages,
                    "microbatches": _torch.schedule_microbatches(self._schedule),
                    "tensors": manifest(self._stage.submod),
                },
            )

    def gather(self, from_version: int, generation: int) -> None:
        """Takes those who can, and no more than make it quicker."""
        self._generation = generation
        microbatches = _torch.schedule_microbatches(self._schedule)
        offers = {helper: self._post.read(helper)[0] for helper in self._asked}
        declined = {helper: offer["why"] for helper, offer in offers.items() if offer["why"]}
        able = [helper for helper in self._asked if helper not in declined]
        count = workers(microbatches, 1 + len(able))
        if count > 1 and (why := self._lacks_memory(len(shares(microbatches, count)[-1]))):
            declined[self._rank] = why
            count = 1
        self._helpers = tuple(able[: count - 1])
        for helper in self._asked:
            if helper not in self._helpers:
                self._post.note(helper, None)
        each = shares(microbatches, count)
        line = (*self._helpers, self._rank)
        for helper, part in zip(self._helpers, each, strict=False):
            begin = {"from": from_version, "line": line, "first": part.start, "behind": part.stop}
            self._post.note(helper, begin)
        events.emit(
            "help_begin",
            rank=self._rank,
            generation=generation,
            helpers=list(self._helpers),
            shares=[len(part) for part in each],
            until=self._until,
            declined={str(rank): why for rank, why in declined.items()},
        )
        if not self._helpers:
            return
        self._own = own = each[-1]
        self._line = Line(self._post, line, self._rank, self._check)
        self._stage.share = self
        share = Share(first=own.start, behind=own.stop, of=microbatches, below_step=self._until)
        self._channel.want(share, from_version)

    def _lacks_memory(self, share: int) -> str:
        weights = sum(parameter.nbytes for parameter in self._stage.submod.parameters())
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
        if self._addends is not None:
            self._addends.close()
        self._stage.share = self._addends = self._line = None
        self._sharing = False

    def _leave(self, why: str) -> None:
        for helper in self._helpers:
            self._post.note(helper, None)
        self._post.settle()
        self.close()
        events.emit(
            "help_end", rank=self._rank, generation=self._generation, steps=self.helped.steps, reason=why
        )

    # --- what the stage asks ---

    def begin(self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saves_output: bool) -> None:
        if stage.call > 0:
            return  # gradients of the step's first call are there already
        why = self._unfit(args if stage.is_first else (), kwargs, saves_output)
        if why:
            self._leave(why)
            self._channel.want(None, self._channel.step)
            return
        assert self._line is not None
        note = {
            "step": self._channel.step,
            "args": len(args) if stage.is_first else 0,
            "kwargs": list(kwargs),
            **standing(stage.submod),
        }
        for helper in self._helpers:
            self._post.note(helper, note)
        with torch.no_grad():
            self._line.pass_down([tensor for _, tensor in named(stage.submod)])
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in stage.submod.buffers()]
        self._addends = Addends(list(stage.submod.parameters()))
        self._losses = {}
        self._sharing = True

    def skips(self, mb: int) -> bool:
        return self._sharing and mb not in self._own

    def loss(self, mb: int) -> torch.Tensor:
        return self._losses.setdefault(mb, torch.empty_like(self._stage.loss_like))

    def combine(self) -> None:
        if not self._sharing or self._addends is None or self._line is None:
            return
        parameters = list(self._stage.submod.parameters())
        self._addends.close()
        with torch.no_grad():
            sums = self._line.pass_up(parameters, self._addends.of)
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = None if total is None else _fitted(total, parameter)
        for helper in self._helpers:
            self._take(*self._post.read(helper))
        self._post.settle()
        check_buffers(self._buffers)
        self._addends = None
        self._sharing = False
        self.helped.steps += 1

    def _take(self, told: dict[str, Any], payload: torch.Tensor) -> None:
        """What a helper has besides gradients: losses, and what the log lacked."""
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
        self.helped.verified += told["verified"]
        self.helped.records += told["records"]
        self.helped.microbatches += told["microbatches"]

    def _unfit(self, args: Sequence[Any], kwargs: dict[str, Any], saves_output: bool) -> str:
        """Why helpers would not do what this rank does; empty: they do."""
        stage = self._stage
        module = stage.submod
        external = [*args, *kwargs.values()]
        found = {
            "the schedule runs without a backward first": not stage.has_backward,
            "gradients are there before the first microbatch; use zero_grad(set_to_none=True)": any(
                parameter.grad is not None for parameter in module.parameters()
            ),
            "a forward changes buffers, each microbatch those that the one before has left": stage.changes_buffers,
            "hooks on parameters' gradients": any(map(_torch.gradient_hooks, module.parameters())),
            "sparse gradients": any(getattr(part, "sparse", False) is True for part in module.modules()),
            "an external input is no plain tensor": any(
                not isinstance(value, torch.Tensor) or value.requires_grad for value in external
            ),
        }
        if stage.is_last:
            found |= {
                "the outputs are asked for; call schedule.step with return_outputs=False": saves_output,
                "the loss is no tensor": not isinstance(stage.loss_like, torch.Tensor),
                "the loss is scaled": any(
                    isinstance(value, torch.amp.GradScaler) for value in self._state.objects.values()
                ),
            }
        return next((why for why, unfit in found.items() if unfit), "")


def check_buffers(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ReplayRefused if a shared step has changed them after all."""
    if not all(same_bits(buffer, value) for buffer, value in before):
        raise ReplayRefused("a forward changes buffers, each microbatch those that the one before has left")


def _fitted(total: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In memory of its own, laid out as autograd would have: what sums over a gradient goes by its layout."""
    return torch.empty_like(parameter, requires_grad=False).copy_(total)
