"""Who computes what, in which order, in a call of a schedule that lacks ranks.

A `Call` says what is to be done, `Seconds` what each part of it takes; `plan` puts it in an order
(`swift.recovery.adaptive`). Every rank makes the same plan from the same numbers, or has one that was made ahead
(`swift.runtime.plans_ahead`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from swift.recovery import Assignment
from swift.recovery.adaptive import Action, Costs, Work, found_steps, period, plan_step
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_WEIGHT
from swift.runtime import _torch, _torch_calls
from swift.runtime.reducer import Row
from swift.runtime.shared_sums import Turn

Orders = Mapping[int, tuple[Action, ...]]
"""By slot: what it does, one after the other."""


class Routes(NamedTuple):
    """Who computes what in a call, and when."""

    work: Work
    orders: Orders

    def owner(self, stage: int, origin: int, microbatch: int) -> int:
        return self.work.owners[stage, origin][microbatch]

    def microbatches_of(self, slot: int, stage: int, origin: int) -> list[int]:
        """That this rank computes, ascending."""
        return [mb for mb, owner in enumerate(self.work.owners[stage, origin]) if owner == slot]

    def is_shared(self, stage: int, origin: int) -> bool:
        """Several ranks compute the origin's microbatches there."""
        return len(set(self.work.owners[stage, origin])) > 1

    def sharers(self, slot: int, own: int) -> list[int]:
        """The ranks of this one's stages, ascending. `own`: its own origin."""
        stage = self._stages(slot, own)[0]
        return sorted(
            {owner for origin in range(self.work.origins) for owner in self.work.owners[stage, origin]}
        )

    def share_of(self, slot: int, own: int) -> list[Row]:
        """What a rank has gradients of besides those of its own batch: of batches that it has adopted alone, and a part
        of each that its peers have adopted with it."""
        stage, place = self._stages(slot, own)[0], self.sharers(slot, own).index(slot)
        rows = []
        for origin in range(self.work.origins):
            if self.is_shared(stage, origin):
                rows.append(Row(origin, place))
            elif origin != own and slot in self.work.owners[stage, origin]:
                rows.append(Row(origin, 0))
        return rows

    def turns(self, slot: int, own: int) -> list[Turn]:
        """In which the peers of a rank sum what they share: about as they compute it, and each origin's microbatches
        ascending."""
        sharers, stages = self.sharers(slot, own), self._stages(slot, own)
        ends = {
            (action.stage, action.origin, action.microbatch): (number + 1) / len(self.orders[each])
            for each in sharers
            for number, action in enumerate(self.orders[each])
            if action.kind in (BACKWARD, BACKWARD_WEIGHT)
        }
        turns = []
        for stage in stages:
            for origin in range(self.work.origins):
                latest = 0.0
                for mb, owner in enumerate(
                    self.work.owners[stage, origin] if self.is_shared(stage, origin) else ()
                ):
                    latest = max(latest, ends[stage, origin, mb])
                    turns.append((latest, Turn(stage, origin, mb, sharers.index(owner))))
        return [turn for _, turn in sorted(turns)]

    def _stages(self, slot: int, own: int) -> list[int]:
        """Of this rank. At each of them it computes the same microbatches."""
        owners = self.work.owners
        return [stage for stage, origin in owners if origin == own and slot in owners[stage, own]]


class Seconds(NamedTuple):
    """What parts of a step take, in any unit."""

    stages: tuple[tuple[float, float, float], ...]
    """By stage, of a microbatch: the forward, and the two parts of the backward (for inputs, for weights)."""
    transfer: float = 0.0
    """From one stage's rank to the next one's."""


def equal_seconds(stages: int) -> Seconds:
    """If nobody has measured anything."""
    return Seconds(tuple(_in_parts(1.0, 2.0, _weights_share(stage, stages)) for stage in range(stages)))


def seconds_of(told: Sequence[torch.Tensor], transfers: Sequence[float] = ()) -> Seconds:
    """From what ranks have measured: [stages, 3] of each (forward, whole backward, the share of weights in it), with
    nan for what it does not know; and what messages between neighbours took. The median of those that know, in units
    of the mean forward. Of equal stages if nobody knows what one of them takes."""
    medians = torch.stack(list(told)).nanmedian(dim=0).values
    taken, stages = medians[:, :2], len(medians)
    if not bool(torch.isfinite(taken).all() and (taken > 0).all()):
        return equal_seconds(stages)
    # One rounding, whatever the processor: all ranks plan by the same numbers.
    mean = math.fsum(taken[:, 0].tolist()) / stages
    known = sorted(seconds for seconds in transfers if 0 <= seconds < math.inf)
    return Seconds(
        tuple(
            _in_parts(
                forward / mean, backward / mean, _weights_share(stage, stages) if math.isnan(share) else share
            )
            for stage, (forward, backward, share) in enumerate(medians.tolist())
        ),
        known[(len(known) - 1) // 2] / mean if known else 0.0,
    )


def _weights_share(stage: int, stages: int) -> float:
    """Of a backward, if nobody has measured it. Of the first stage it is all: there torch computes the whole backward
    with the weights."""
    return 1.0 if stage == 0 and stages > 1 else 0.5


def _in_parts(forward: float, backward: float, share: float) -> tuple[float, float, float]:
    weights = backward * share
    return forward, backward - weights, weights


class Call(NamedTuple):
    """What is to be done in a call, before anybody has put it in an order. The same at all ranks."""

    owners: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    """((stage, origin), the slot that computes each of its microbatches)."""
    stages: int
    microbatches: int
    split: bool
    """Backwards are."""
    cap: tuple[tuple[int, int], ...] | None
    """(slot, how many activations it may hold at a time). None: any number."""
    staggered: bool
    """What counts is the time between two steps that overlap."""

    def work(self, seconds: Seconds) -> Work:
        """Raises ValueError if some microbatch is computed by nobody."""
        forward, inputs, weights = zip(*seconds.stages, strict=True)
        return Work(
            stages=self.stages,
            origins=len(self.owners) // self.stages,
            microbatches=self.microbatches,
            owners=dict(self.owners),
            split=self.split,
            costs=Costs(
                forward=forward, backward_input=inputs, backward_weight=weights, transfer=seconds.transfer
            ),
            cap=None if self.cap is None else dict(self.cap),
        )


def call_of(assignment: Assignment, schedule: Any, *, split: bool, memory: float, staggered: bool) -> Call:
    """Of this schedule in this generation.

    `split`: backwards are split, also if the schedule's are whole. `memory`: how many times the activations that a rank
    holds in the schedule it may hold, at most.
    """
    stages = _torch.schedule_stages(schedule)
    groups = dict(stages[0].stage_index_to_group_rank)
    microbatches = _torch.schedule_microbatches(schedule)
    owners = []
    for stage, group in sorted(groups.items()):
        for origin in range(assignment.dp_size):
            told = (assignment.owner(group, origin, mb) for mb in range(microbatches))
            owners.append(((stage, origin), tuple(owner for owner in told if owner is not None)))
    held = _torch_calls.activations_held(schedule)
    caps = None if held is None else [math.ceil(count * memory) for count in held]
    cap = (
        None
        if caps is None
        else tuple((slot, caps[assignment.slots[slot].stage_group]) for slot in assignment.occupied)
    )
    split = split or _torch.splits_backward(schedule)
    return Call(tuple(owners), len(groups), microbatches, split, cap, staggered)


@lru_cache(maxsize=8)
def plan(call: Call, seconds: Seconds) -> Routes:
    """As `planned`, once for each."""
    return planned(call, seconds)


def planned(call: Call, seconds: Seconds) -> Routes:
    """The quickest order that is found. Raises ValueError as `Call.work`."""
    work = call.work(seconds)
    steps = [plan_step(work), *(found_steps(work) if call.staggered else ())]
    if seconds != equal_seconds(call.stages):
        # The rules are no exact method: now and then they find more where all stages are alike.
        steps.append(plan_step(call.work(equal_seconds(call.stages))))
    return Routes(work, min(steps, key=lambda step: period(work, step, staggered=call.staggered)).orders())
