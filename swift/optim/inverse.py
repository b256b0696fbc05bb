"""Undo by computing the step backwards, without extra memory. Not exact: the step rounds."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from swift.errors import ServiceError
from swift.optim import native
from swift.optim import torch_names as many
from swift.optim.rules import Applied, Backwards, Hyper, Rule
from swift.optim.units import DTYPES, Unit, cut, direct


def snapshot(group: dict[str, Any]) -> Hyper:
    """The group's hyperparameters as they are now: they may be tensors, or be changed by a scheduler."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def numbers(hyper: Hyper) -> Hyper:
    """The same with every tensor as a float."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value.item())
        return tuple(plain(item) for item in value) if isinstance(value, tuple | list) else value

    return {key: plain(value) for key, value in hyper.items()}


def unfit(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], names: tuple[str, ...]
) -> str:
    """Why these parameters cannot be computed backwards; empty if they can."""
    for parameter in parameters:
        tensors = [parameter.grad, *(optimizer.state.get(parameter, {}).get(name) for name in names)]
        if parameter.dtype not in DTYPES or type(parameter.detach()) is not torch.Tensor:
            return f"parameters of type {parameter.dtype} are copied"
        for tensor in tensors:
            if tensor is None:
                continue
            if tensor.layout != torch.strided or tensor.dtype != parameter.dtype:
                return "sparse or mixed gradients and state are copied"
    if _overlap(parameters):
        return "parameters that share memory are copied"  # one is taken back before the other is read
    return ""


def _overlap(parameters: list[torch.nn.Parameter]) -> bool:
    spans = []
    for parameter in parameters:
        if parameter.numel():
            reach = sum(
                (size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True)
            )
            spans.append(
                (parameter.data_ptr(), parameter.data_ptr() + (reach + 1) * parameter.element_size())
            )
    spans.sort()
    return any(end > begin for (_, end), (begin, _) in pairwise(spans))


@dataclass(frozen=True)
class Cluster:
    """Parameters of a bucket that are equally old, so that they share a step's constants."""

    members: list[int]
    applied: Applied
    backwards: Backwards
    gradients: list[torch.Tensor]
    columns: list[list[torch.Tensor]]
    """The live tensors: the parameters, and their state by kind."""

    @property
    def kept(self) -> int:
        """How many columns have a value before the step."""
        return 1 if self.applied.first else len(self.columns)

    @cached_property
    def flat(self) -> list[bool]:
        return direct(self.gradients, *self.columns)

    @cached_property
    def units(self) -> list[Unit]:
        return cut(self.gradients, self.columns, self.flat)

    @cached_property
    def one_pass(self) -> native.Pass | None:
        """The fast way to compute it backwards, where there is one."""
        if not native.available([*self.gradients, *(tensor for column in self.columns for tensor in column)]):
            return None
        backwards = (self.backwards.form, self.backwards.constants)
        return native.Pass(backwards, self.gradients, self.columns, kept=self.kept, sane=self.applied.sane)


class Bucket:
    """What both ways of computing a bucket backwards need to know of it.

    (journal) before the step ``Bucket(...)`` → the optimizer's step → ``applied()``; to take it back: ``clusters``,
    then ``restore_scalars``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rule: Rule,
        group: dict[str, Any],
        parameters: list[torch.nn.Parameter],
    ):
        self.optimizer = optimizer
        self.rule = rule
        self.parameters = parameters
        self.hyper = snapshot(group)
        self.names = rule.tensors(self.hyper)
        self._states: list[dict[str, Any] | None] = []  # keys and small values, as they were
        self._small: list[torch.Tensor] = []
        for parameter in parameters:
            state = optimizer.state.get(parameter)
            self._states.append(None if state is None else dict(state))
            if state:
                self._small += [
                    value
                    for name, value in state.items()
                    if name not in self.names and isinstance(value, torch.Tensor)
                ]
        self._before: list[torch.Tensor] = many.clone(self._small) if self._small else []
        self.first = [self._is_first(state) for state in self._states]
        self.gradients: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._found_inf: torch.Tensor | None = None

    def _is_first(self, state: dict[str, Any] | None) -> bool:
        return not state or any(state.get(name) is None for name in self.names)

    @property
    def scalar_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._before)

    def applied(self) -> None:
        """(after the optimizer's step) Takes references to the gradients, which a fused step may have unscaled."""
        self.gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._versions = [many.version(gradient) for gradient in self.gradients]
        found_inf: Any = getattr(self.optimizer, "found_inf", None)
        self._found_inf = found_inf.clone() if isinstance(found_inf, torch.Tensor) else None

    @property
    def skipped(self) -> bool:
        """A scaler has found an infinity, and the fused step has left everything as it was."""
        return self._found_inf is not None and bool(self._found_inf.item())

    def check_gradients(self) -> None:
        if any(many.version(g) != v for g, v in zip(self.gradients, self._versions, strict=True)):
            raise ServiceError(
                "this step cannot be taken back: its gradients were changed in place after it "
                "(use zero_grad(set_to_none=True))"
            )

    def clusters(self, *, sane: bool) -> Iterator[Cluster]:
        """(after the optimizer's step) One per age of parameters."""
        hyper = numbers(self.hyper)
        ages: dict[tuple[bool, tuple[float, ...]], list[int]] = {}
        needed = ("step", *self.rule.scalars)
        for index, parameter in enumerate(self.parameters):
            state = self.optimizer.state.get(parameter, {})
            values = tuple(float(state[name]) if name in state else 0.0 for name in needed)
            ages.setdefault((self.first[index], values), []).append(index)
        for (first, values), members in ages.items():
            step, *others = values
            applied = Applied(
                hyper=hyper,
                step=step,
                scalars=dict(zip(self.rule.scalars, others, strict=True)),
                first=first,
                sane=sane,
            )
            yield self._cluster(members, applied)

    def _cluster(self, members: list[int], applied: Applied) -> Cluster:
        gradients = [self.gradients[i].detach() for i in members]
        columns = self.columns(members, state=True)
        return Cluster(members, applied, self.rule.backwards(applied), gradients, columns)

    def columns(self, members: list[int], *, state: bool) -> list[list[torch.Tensor]]:
        """The live tensors: the parameters, and their state by kind."""
        parameters = [self.parameters[i] for i in members]
        names = self.names if state else ()
        kinds = [[self.optimizer.state[p][name].detach() for p in parameters] for name in names]
        return [[p.detach() for p in parameters], *kinds]

    def restore_scalars(self) -> None:
        """Step counters and the like; state that did not exist before the step goes."""
        if self._small:
            many.copy_(self._small, self._before)
        for parameter, state in zip(self.parameters, self._states, strict=True):
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                now = self.optimizer.state[parameter]
                now.clear()
                now.update(state)


class Arithmetic:
    """(journal) before the step ``Arithmetic(bucket)`` → the optimizer's step → ``after()``; later ``undo()``."""

    exact = False

    def __init__(self, bucket: Bucket):
        self._bucket = bucket

    @property
    def extra_bytes(self) -> int:
        return self._bucket.scalar_bytes

    def after(self) -> None:
        self._bucket.applied()

    @torch.no_grad()
    def undo(self) -> None:
        """Raises ServiceError if the parameters do not come out finite: the step made them NaN or infinite."""
        bucket = self._bucket
        bucket.check_gradients()
        if not bucket.skipped:
            finite = [self._take_back(cluster) for cluster in bucket.clusters(sane=True)]
            if not all(finite):
                raise ServiceError(
                    "this step cannot be taken back arithmetically: it made parameters NaN or infinite; "
                    "undo='exact' can"
                )
        bucket.restore_scalars()

    def _take_back(self, cluster: Cluster) -> bool:
        """Whether the parameters have come out finite."""
        if cluster.one_pass is not None:
            return cluster.one_pass.invert() == 0
        sums: list[torch.Tensor] = []
        for unit in cluster.units:
            columns = [unit.column(i) for i in range(unit.width)]
            cluster.backwards.kernel(columns[0], unit.gradient(), columns[1:])
            wide = torch.float64 if columns[0].dtype == torch.float64 else torch.float32
            sums.append(columns[0].sum(dtype=wide))
            if not unit.direct:
                for index in range(cluster.kept):
                    unit.store(index, columns[index])
        if not sums or bool(torch.stack(sums).isfinite().all()):
            return True
        # A sum may overflow where no element has.
        return all(bool(parameter.isfinite().all()) for parameter in cluster.columns[0])
