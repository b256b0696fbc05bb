"""Shared replay: a lost stage is replayed by its owner and by survivors together, each with a share of every step's
microbatches. Here: the owner's side.

    owner     the rank that replays: runs the trainer's own step, but computes its share only
    helper    a survivor that builds the stage in addition to its own, and computes microbatches of it
              (`swift_ft.train.replay_helper`)
    line      helpers in the order of their shares, the owner last: gradients go up it, weights down
              (`swift_ft.train.gradient_chain`)

In each step weights go down the line and all ranks compute. The first rank sums its microbatches' gradients as autograd
does. Each next rank adds its own, one by one, to the sum of those before it. So the owner gets bit for bit the sum of a
single process, and does the rest of the trainer's step, which the helpers need not know::

    ask → offers → the line is formed
    every step: the trainer's own step, in which the stages query the owner's share
    leave → the helpers go back to their own stages; the rest is replayed alone

A step that helpers could not compute as this rank would is detected before it is computed; the helpers then leave.
"""

import itertools
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swift_ft import events, torch_private
from swift_ft.comm.backend import Wire
from swift_ft.errors import ReplayRefused
from swift_ft.log.memory import available_memory
from swift_ft.log.reader import ReadFilter
from swift_ft.log.record import RecordKey
from swift_ft.planner import Help
from swift_ft.planner.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from swift_ft.state.tensors import differ
from swift_ft.state.tree import dtype_of
from swift_ft.train.gradient_chain import (
    Addends,
    GradientChain,
    Post,
    Strides,
    first_strides,
    laid_out,
    module_layout,
    module_modes,
    parameters_and_buffers,
    taken_apart,
    tied,
    together,
)
from swift_ft.train.participants import Site
from swift_ft.train.stage import LoggedPipelineStage
from swift_ft.train.training_state import TrainerState

# Distribution of microbatches.


def workers(microbatches: int, available: int) -> int:
    """Returns the smallest number of ranks that gives the same largest share as all `available` ranks."""
    largest = -(-microbatches // max(1, min(available, microbatches)))
    return -(-microbatches // largest)


def shares(microbatches: int, count: int) -> list[range]:
    """Returns runs of microbatches for `count` ranks in the order of the line. The remainder of the division goes to
    the first ranks, because the last one, the owner, also does the optimizer's step."""
    each, left = divmod(microbatches, count)
    bounds = [0]
    for index in range(count):
        bounds.append(bounds[-1] + each + (index < left))
    return [range(begin, end) for begin, end in itertools.pairwise(bounds)]


def memory_needed(weights: int, share: int) -> int:
    """Returns the bytes for gradients of a share, in addition to the module and its activations: one buffer each on
    the way up and down the line, and each microbatch's gradients until the sum of those before them arrives."""
    return weights * (2 + share)


# Actions of a rank in a step, and the part of them in a share of the microbatches.
#
# The schedule's own list decides. torch does not promise that a backward split into input and weight gradients has the
# bits of a whole one, so a helper splits each microbatch's backward exactly if the rank that ran it did.

_WAYS = ([FORWARD, BACKWARD], [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT])


class StepAction(NamedTuple):
    """A stage's forward or backward of a microbatch, in torch's notation: 3F0."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def of_share(actions: Iterable[StepAction], share: Collection[int]) -> list[StepAction]:
    return [action for action in actions if action.microbatch in share]


def one_by_one(actions: Iterable[StepAction]) -> list[StepAction]:
    """Orders actions so that each microbatch passes all stages of the rank before the next one: only one's activations
    are alive.

    The order within a microbatch is kept. Between microbatches only the order of adding weight gradients matters, and
    `unordered` has checked that it is this one.
    """
    return sorted(actions, key=lambda action: action.microbatch)


def unordered(actions: Sequence[StepAction], stages: Collection[int], microbatches: int) -> str:
    """Returns why a step of these actions cannot be shared by runs of microbatches; empty if it can.

    Every stage must compute every microbatch once, and add to its weight gradients in the order of microbatches.
    """
    done: dict[tuple[int, int], list[str]] = {}
    added: dict[int, list[int]] = {stage: [] for stage in stages}
    for action in actions:
        if action.stage not in added:
            return f"{action} is of a stage that is not this rank's"
        done.setdefault((action.stage, action.microbatch), []).append(action.kind)
        if action.kind in (BACKWARD, BACKWARD_WEIGHT):
            added[action.stage].append(action.microbatch)
    for at in ((stage, mb) for stage in added for mb in range(microbatches)):
        if done.pop(at, []) not in _WAYS:
            return f"stage {at[0]} has not one forward and one backward of microbatch {at[1]} in its schedule"
    if done:
        return f"the schedule has more than {microbatches} microbatches"
    for stage, order in added.items():
        if order != sorted(order):
            return f"the gradients of stage {stage} are not added in the order of microbatches"
    return ""


def why_alone(state: TrainerState) -> str:
    """Returns why this rank's replay cannot be shared; empty if it can."""
    if why := why_no_help(state):
        return why
    if tied([stage.submod for stage in state.stages]):
        return "stages of one rank share a parameter"  # both add to its gradient, not in the order of microbatches
    return ""


def why_no_help(state: TrainerState) -> str:
    """Returns why this rank cannot help in another's replay, under the schedule common to all; empty if it can."""
    if len(state.schedules) != 1:
        return "there is more or less than one schedule"
    stages = torch_private.schedule_stages(state.schedules[0])
    if {id(stage) for stage in stages} != {id(stage) for stage in state.stages}:
        return "a stage is not in the schedule"
    if any(type(stage) is not LoggedPipelineStage for stage in stages):
        return "a stage was traced, or is no stage of a pipeline"
    if any(stage.dw_builder is not None for stage in stages):
        return "a stage has a dw_builder"
    if stages[0].num_stages == len(stages):
        return "the whole pipeline is on one rank"  # it has no sends that could be compared
    actions = actions_of(state)
    if actions is None:
        return f"what {type(state.schedules[0]).__name__} computes in which order is not known"
    microbatches = torch_private.schedule_microbatches(state.schedules[0])
    return unordered(actions, [stage.stage_index for stage in stages], microbatches)


def actions_of(state: TrainerState) -> list[StepAction] | None:
    """Returns the actions of this rank in a step; None if they are not known."""
    actions = torch_private.schedule_actions(state.schedules[0])
    return None if actions is None else [StepAction(*action) for action in actions]


def send_away(rank: int, help: Help, wire: Wire, generation: int, why: str) -> None:
    """(an owner that cannot share its replay) Releases its helpers."""
    post = Post(wire)
    for helper in help.helpers:
        post.note(helper, None)
    _tell_begin(rank, generation, [], [], help, {str(rank): why})
    post.wait_sent()


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
    )


@dataclass
class Helped:
    """Totals of the helpers' work in a replay."""

    steps: int = 0
    """Steps that were shared."""
    microbatches: int = 0
    """Microbatches computed by helpers, counted once for each stage."""
    verified: int = 0
    """Sends that were compared with the log."""
    records: int = 0
    """Records read from the log."""


class Owner:
    """The owner's side of a shared replay.

    (restorer) ``ask`` → ``gather`` → per step ``at`` → … → ``close``; (stage) ``begin`` and what follows it
    """

    def __init__(self, site: Site, help: Help):
        self._site = site
        self._help = help
        self._until = help.until
        self._asked = tuple(help.helpers)
        self._post = Post(site.world)
        (schedule,) = site.state.schedules
        self._stages = torch_private.schedule_stages(schedule)
        self._last = next((stage for stage in self._stages if stage.is_last), None)
        self._module = together(self._stages)
        self._microbatches = torch_private.schedule_microbatches(schedule)
        self._generation = 0
        self._line: GradientChain | None = None
        self._helpers: tuple[int, ...] = ()
        """Helpers in the order of the line."""
        self._own = range(0)
        """Microbatches of this rank's share."""
        self._sharing = False
        """The step under way is shared."""
        self._begun = -1
        """Latest step for which it is decided whether it is shared."""
        self._reduced: list[tuple[Any, int]] = []
        """(stage, scale) of stages whose share of the step is computed here."""
        self._gradients: Addends | None = None
        self._losses: dict[int, torch.Tensor] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.helped = Helped()

    # --- before and after ---

    def ask(self) -> None:
        """Asks the helpers to build the stages, which they do while this rank loads its checkpoint."""
        for helper in self._asked:
            self._post.note(
                helper,
                {
                    "stages": [stage.stage_index for stage in self._stages],
                    "of": self._stages[0].num_stages,
                    "microbatches": self._microbatches,
                    "tensors": module_layout(self._module),
                },
            )

    def gather(self, from_version: int, generation: int) -> None:
        """Reads the helpers' offers and forms the line of those that can help, no more than make the replay faster."""
        self._generation = generation
        microbatches = self._microbatches
        offers = {helper: self._post.read(helper)[0] for helper in self._asked}
        able = [helper for helper in self._asked if not offers[helper]["why"]]
        declined = {str(helper): offer["why"] for helper, offer in offers.items() if offer["why"]}
        count = workers(microbatches, 1 + len(able))
        if count > 1 and (lacking := self._lacks_memory(len(shares(microbatches, count)[-1]))):
            declined[str(self._site.rank)] = lacking
            count = 1
        self._helpers = tuple(able[: count - 1])
        for helper in self._asked:
            if helper not in self._helpers:
                self._post.note(helper, None)
        each = shares(microbatches, count)
        line = (*self._helpers, self._site.rank)
        actions = actions_of(self._site.state)
        assert actions is not None, "nobody owns a shared replay of an unknown schedule"
        for helper, part in zip(self._helpers, each, strict=False):
            begin: dict[str, Any] = {
                "from": from_version,
                "line": line,
                "first": part.start,
                "behind": part.stop,
            }
            begin["actions"] = one_by_one(of_share(actions, part))
            self._post.note(helper, begin)
        sizes = [len(part) for part in each]
        _tell_begin(self._site.rank, generation, self._helpers, sizes, self._help, declined)
        if not self._helpers:
            return
        self._own = own = each[-1]
        self._line = GradientChain(self._post, line, self._site.rank, self._site.member.check)
        for stage in self._stages:
            stage.share = self
        share = ReadFilter(first=own.start, behind=own.stop, of=microbatches, below_step=self._until)
        self._site.channel.want(share, from_version)

    def _lacks_memory(self, share: int) -> str:
        weights = sum(parameter.nbytes for parameter in self._module.parameters())
        needed, free = memory_needed(weights, share), available_memory()
        if free is None or needed <= free:
            return ""
        return f"sharing needs {needed >> 20} MiB of memory, and {free >> 20} MiB are free"

    def at(self, version: int) -> None:
        """(before each step) Ends the sharing if the step is past its last shared one."""
        if self._line is not None and version >= self._until:
            self._leave("")

    def close(self) -> None:
        """Removes all hooks from parameters and stages, and leaves the line."""
        if self._gradients is not None:
            self._gradients.close()
        for stage in self._stages:
            stage.share = None
        self._gradients = self._line = None
        self._sharing = False

    def _leave(self, why: str) -> None:
        for helper in self._helpers:
            self._post.note(helper, None)
        self._post.wait_sent()
        self.close()
        events.emit(
            "help_end", rank=self._site.rank, generation=self._generation, steps=self.helped.steps, reason=why
        )

    # --- called by the stages ---

    def begin(self, stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any], saves_output: bool) -> None:
        """(a forward) At a step's first one, notifies the helpers and passes them the weights. The inputs are external.

        If the step cannot be shared, the helpers leave, and this rank goes on alone.
        """
        if self.begun(stage):
            return
        self._begun = self._site.channel.step
        first = any(stage.is_first for stage in self._stages)
        if why := self._unfit(args if first else (), kwargs, saves_output):
            self._leave(why)
            self._site.channel.want(None, self._site.channel.step)
            return
        assert self._line is not None
        note = {
            "step": self._site.channel.step,
            "args": len(args) if first else 0,
            "kwargs": list(kwargs),
            **module_modes(self._module),
        }
        for helper in self._helpers:
            self._post.note(helper, note)
        with torch.no_grad():
            self._line.pass_down([tensor for _, tensor in parameters_and_buffers(self._module)])
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        parameters = list(self._module.parameters())
        self._gradients = Addends(parameters)
        self._losses = {}
        self._reduced = []
        self._sharing = True

    def begun(self, stage: Any) -> bool:
        """Returns whether the schedule's current call is distributed over the ranks already."""
        # In a second call of a schedule within a step, gradients of the first call exist already.
        return stage.call > 0 or self._begun == self._site.channel.step

    def skips(self, mb: int) -> bool:
        """Returns whether another rank computes the microbatch."""
        return self._sharing and mb not in self._own

    def loss(self, mb: int) -> torch.Tensor:
        """Returns the loss of a skipped microbatch. `combine` fills in its value."""
        assert self._last is not None
        return self._losses.setdefault(mb, torch.empty_like(self._last.loss_like))

    def weighing(self) -> AbstractContextManager[None]:
        """Wraps the second part of a split backward, which adds to gradients without calling autograd's hooks."""
        return nullcontext() if self._gradients is None else self._gradients.weighing()

    def combine(self, stage: Any, scale: int) -> list[tuple[Any, int]]:
        """(this rank's part of the stage is computed) At the call for its last stage, adds all ranks' gradients in
        order. Returns the stages that are complete now, each with the divisor of its gradients."""
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

    def _combine(self, gradients: Addends, line: GradientChain) -> None:
        parameters = list(self._module.parameters())
        own = gradients.collect()
        strides = first_strides(own)
        with torch.no_grad():
            sums = line.pass_up(parameters, own)
        told = [self._take(*self._post.read(helper)) for helper in self._helpers]
        self._post.wait_sent()
        check_buffers(self._buffers)
        for parameter, total, *candidates in zip(parameters, sums, *told, strides, strict=True):
            first = next((strides_of for strides_of in candidates if strides_of is not None), None)
            parameter.grad = None if total is None or first is None else laid_out(total, first)

    def _take(self, told: dict[str, Any], payload: torch.Tensor) -> Strides:
        """Takes over a helper's losses and the records that the log lacked. Returns its gradients' strides. Raises
        ReplayRefused for a loss of another type or shape."""
        shapes = [(dtype_of(dtype), shape) for *_, dtype, shape in [*told["losses"], *told["lacking"]]]
        tensors = taken_apart(payload, shapes)
        for (mb, *_), value in zip(told["losses"], tensors, strict=False):
            loss = self.loss(mb)
            if (loss.dtype, loss.shape) != (value.dtype, value.shape):
                raise ReplayRefused(f"the loss of microbatch {mb} has another type or shape on its helper")
            loss.copy_(value)
        for (stream, mb, slot, *_), value in zip(
            told["lacking"], tensors[len(told["losses"]) :], strict=True
        ):
            # (a helper has computed it, and the log lacks it)
            self._site.channel.record(stream, RecordKey(self._site.channel.step, mb, slot), value, now=True)
        self.helped.verified += told["verified"]
        self.helped.records += told["records"]
        self.helped.microbatches += told["microbatches"]
        strides: Strides = told["strides"]
        return strides

    def _unfit(self, args: Sequence[Any], kwargs: dict[str, Any], saves_output: bool) -> str:
        """Returns why helpers would compute something else than this rank; empty if they would not."""
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
            "hooks on parameters' gradients": any(map(torch_private.gradient_hooks, module.parameters())),
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
                    isinstance(value, torch.amp.GradScaler) for value in self._site.state.objects.values()
                ),
            }
        return next((why for why, unfit in reasons.items() if unfit), "")


def check_buffers(before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ReplayRefused if a shared step has changed a buffer. `before`: (buffer, its copy from before the step)."""
    if any(differ(before)):
        raise ReplayRefused("a forward changes buffers, each microbatch those that the one before has left")
