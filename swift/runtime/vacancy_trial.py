"""A step that lacks ranks, tried out while all are there: what it would compute is compared with what a full world has.

One slot of each stage group is taken for vacant. The peers of its stage compute its microbatches among their own
(`swift.runtime.rerouting`), and it does nothing. What they have of its gradients is summed as it would be then, and
must be what it has computed by itself; what they have of their own must be what it was without that.

So a trainer is refused in its first step if something that belongs to a batch reaches a module or the loss by another
way than the arguments of `schedule.step` (an attribute, a closure), or if a forward depends on earlier ones.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
import xxhash

from swift.checkpoint.state import split
from swift.recovery import Assignment
from swift.runtime import _torch
from swift.runtime.apart import Gradients
from swift.runtime.backends.base import Collectives
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.reducer import Contribution, Row, parts_of, summed_by_origin
from swift.runtime.tensors import byte_view, digest, plain

_WORDS_BYTES = 200
"""Of what a rank tells of a difference."""


class Left(NamedTuple):
    """By a call of a schedule, at one rank."""

    gradients: Gradients
    """Copies."""
    digests: Mapping[str, bytes]
    """Of all else that it leaves to the trainer, by what it is."""


def left_by(
    schedule: Any, call: Mapping[str, Any], stages: Sequence[Any], objects: Mapping[str, Any]
) -> Left:
    """`call`: its arguments, by name. `stages`: this rank's. `objects`: what the trainer has registered, by name."""
    parameters = chain.from_iterable(stage.submod.parameters() for stage in stages)
    gradients = {p: p.grad.detach().clone() for p in parameters if p.grad is not None and p.requires_grad}
    digests = {
        f"buffer {name!r} of stage {stage.stage_index}": _digest(buffer)
        for stage in stages
        for name, buffer in stage.submod.named_buffers()
    }
    digests |= {
        f"the loss of microbatch {mb}": _digest(loss) for mb, loss in enumerate(call.get("losses") or ())
    }
    for stage in _torch.schedule_stages(schedule):
        if stage.is_last:
            outputs = enumerate(stage.output_chunks)
            digests |= {f"the output of microbatch {mb}": _digest(output) for mb, output in outputs}
    for name, value in objects.items():
        tensors, rest = split(value.state_dict())
        digests[f"the state of register({name}=...)"] = digest(tensors, json.dumps(rest)).encode()
    return Left(gradients, digests)


def with_vacancies(assignment: Assignment) -> Assignment:
    """Of each stage group one slot is vacant, of neighbouring ones those of different origins. Raises ValueError if it
    is not a full world."""
    groups = enumerate(assignment.groups())
    vacant = {assignment.at(group, group % assignment.dp_size) for group, _ in groups}
    return assignment.held_by(
        {slot: member for slot, member in assignment.members.items() if slot not in vacant}
    ).rerouted()


def difference(stages: Sequence[Any], one: Left, other: Left) -> str:
    """The first thing that is not the same, bit for bit; empty: all is."""
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            if _differ(one.gradients.get(parameter), other.gradients.get(parameter)):
                return f"the gradient of {name!r} of stage {stage.stage_index}"
    names = [*one.digests, *(name for name in other.digests if name not in one.digests)]
    return next((name for name in names if one.digests.get(name) != other.digests.get(name)), "")


def summed(
    group: ReconfigurableGroup,
    stages: Sequence[Any],
    rows: Sequence[Sequence[Row]],
    mine: Sequence[Contribution],
    scale: int,
) -> Gradients:
    """(all ranks of a stage group) The gradients of the one origin to which all rows belong. `rows`: of each rank, by
    its place; `mine`: this rank's, by row. `scale`: what a sum over microbatches is divided by."""
    given: Gradients = {}
    parameters = dict.fromkeys(p for stage in stages for p in stage.submod.parameters() if p.requires_grad)
    for parameter in parameters:
        bucket = [parameter]
        flat = [torch.cat(parts_of(bucket, contribution)) for contribution in mine]
        sent = torch.stack(flat) if flat else parameter.new_empty(0, parameter.numel() + 1)
        total: list[torch.Tensor] = []

        def run(
            collectives: Collectives, sent: torch.Tensor = sent, total: list[torch.Tensor] = total
        ) -> None:
            total.append(summed_by_origin(collectives, sent, rows, scale))

        group.run(run)
        gradient, used = torch.split(total[0], [parameter.numel(), 1])
        if float(used):
            given[parameter] = gradient.view_as(parameter)
    return given


def all_told(group: ReconfigurableGroup, words: str) -> list[str]:
    """(all ranks) What each has said, by its place."""
    said = words.encode()[:_WORDS_BYTES].ljust(_WORDS_BYTES)
    heard = group.gathered(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    return [bytes(tensor.tolist()).decode(errors="replace").strip() for tensor in heard]


def _differ(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is not other
    return _digest(one) != _digest(other)


def _digest(value: Any) -> bytes:
    """Of all the bits of its tensors."""
    state = xxhash.xxh3_128()
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            state.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            state.update(byte_view(plain(leaf)).data)
    return state.digest()
