"""What a rank computes in a step, action by action, and the part of it that falls to a share of the microbatches.

A schedule's own list is what says what is computed: a backward that torch splits into input and weight gradients has
no promise of the bits of the whole one, so each microbatch is split, or not, wherever it is computed as it was by the
rank that ran.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""A forward; a whole backward; the two parts of a split one."""
_WAYS = ([FORWARD, BACKWARD], [FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT])


class Action(NamedTuple):
    """A stage's forward or backward of a microbatch; as torch writes it: 3F0."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def of_share(actions: Iterable[Action], share: Collection[int]) -> list[Action]:
    """Those of some microbatches, in the order that they have."""
    return [action for action in actions if action.microbatch in share]


def one_by_one(actions: Iterable[Action]) -> list[Action]:
    """Each microbatch through all stages of the rank before the next one begins: the activations of one are alive.

    What a microbatch needs of itself keeps its order. What it needs of others is the order in which weights' gradients
    are added, which `unordered` has found to be this one.
    """
    return sorted(actions, key=lambda action: action.microbatch)


def ahead(actions: Iterable[Action], count: int) -> list[Action]:
    """Of a stage that others follow: forwards `count` microbatches ahead of backwards, as in 1F1B, if they were one by
    one."""
    return sorted(
        actions, key=lambda action: action.microbatch + (0 if action.kind == FORWARD else count + 0.5)
    )


def unordered(actions: Sequence[Action], stages: Collection[int], microbatches: int) -> str:
    """Why a step of these actions cannot be shared by runs of microbatches; empty: it can.

    Every stage computes every microbatch once, and adds to its weights' gradients in the order of microbatches.
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
