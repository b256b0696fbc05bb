"""Undo by inverting the step, without extra memory. It is not exact, because the step rounds."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from swift_ft import torch_private
from swift_ft.errors import ServiceError
from swift_ft.optimizers import Lamb, Lion
from swift_ft.state import kernels
from swift_ft.state.kernels import Backwards, Form
from swift_ft.state.tensors import overlapping

# Inverses of the optimizers' steps: they compute parameters and state before a step from those after it.
#
# `kernels.cpp` computes them; here are the constants of its rules, in the order of their constructors. No inverse
# restores the same bits, because the step rounds. The error is a few units of the last place, unless the old value is
# much smaller than what was added to it.

Hyper = dict[str, Any]

FORGETS_BELOW = 0.1
"""Lower limit for decay rates: below it, too little of the old value is left to compute it from."""
SHRINKS_BELOW = 0.05
"""Lower limit for the factor 1 - lr·weight_decay on parameters, for the same reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """One step as applied to parameters of one group that have the same age in steps."""

    hyper: Hyper
    """Values of the group at the time, tensors as floats."""
    step: float
    """Steps of these parameters, this one included; 0 if the optimizer does not count."""
    trust_ratio: float
    """(LAMB) That of the step."""
    first: bool
    """True if there was no state before: then only parameters are computed and the state is removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    tensors: Callable[[Hyper], tuple[str, ...]]
    """Returns the names of state tensors of the parameter's shape, in the order in which kernels take them."""
    refuses: Callable[[Hyper], str]
    """Returns why a step with these hyperparameters has no inverse; empty if it has one."""
    backwards: Callable[[Applied], Backwards]


def _sign(hyper: Hyper) -> float:
    return -1.0 if hyper.get("maximize") else 1.0


def _fade(beta: float) -> float:
    """Returns the factor that undoes m ← β·m + (1 - β)·g."""
    return (1 - beta) / beta


def _shrink(hyper: Hyper) -> str:
    factor = 1 - hyper["lr"] * hyper["weight_decay"]
    return "" if factor >= SHRINKS_BELOW else f"lr·weight_decay leaves {factor:.3g} of a parameter"


def _forgets(**rates: float) -> str:
    for name, rate in rates.items():
        if not rate >= FORGETS_BELOW:
            return f"{name}={rate:.3g} forgets the old value"
    return ""


def _sgd(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, momentum, decay, nesterov = h["lr"], h["momentum"], h["weight_decay"], h["nesterov"]
    shrink = 1 / (1 - lr * decay) if nesterov or not momentum else 1.0
    if not momentum:
        return Form.SGD, (sign * lr, shrink)
    by_buffer = lr * momentum if nesterov else lr
    share = 1 - h["dampening"]
    return Form.MOMENTUM, (sign * lr, shrink, by_buffer, sign, decay, share, momentum, float(nesterov))


def _sgd_refuses(h: Hyper) -> str:
    if h["momentum"] and not h["nesterov"]:
        return _forgets(momentum=h["momentum"])
    return (_forgets(momentum=h["momentum"]) if h["momentum"] else "") or _shrink(h)


def _adam(a: Applied) -> Backwards:
    h = a.hyper
    lr, decay, (beta1, beta2) = h["lr"], h["weight_decay"], h["betas"]
    decoupled = h.get("decoupled_weight_decay", False)
    root = math.sqrt(1 - beta2**a.step)
    scale = root / (1 - beta1**a.step)
    grow = 1 / (1 - lr * decay) if decoupled else 1.0
    averages = (grow, _sign(h), 0.0 if decoupled else decay, _fade(beta1), beta2, 1 - beta2)
    return Form.ADAM, (lr, scale, h["eps"] * root, *averages, float(lr != 0))


def _betas_refuse(h: Hyper) -> str:
    beta1, beta2 = h["betas"]
    if h.get("amsgrad"):
        return "AMSGrad keeps a maximum"
    return _forgets(beta1=beta1, beta2=beta2) or (_shrink(h) if h.get("decoupled_weight_decay") else "")


def _lamb(a: Applied) -> Backwards:
    h, (beta1, beta2) = a.hyper, a.hyper["betas"]
    root = math.sqrt(1 - beta2**a.step)
    rate = h["lr"] * a.trust_ratio
    scale = root / (1 - beta1**a.step)  # not in the rate: a tiny update has a trust ratio near overflow
    # The trust ratio is only known after the step, so it cannot be refused beforehand; this bounds the value.
    grow = 1 / max(1 - rate * h["weight_decay"], SHRINKS_BELOW)
    averages = (grow, _sign(h), 0.0, _fade(beta1), beta2, 1 - beta2)
    return Form.ADAM, (rate, scale, h["eps"] * root, *averages, float(rate != 0))


def _lion(a: Applied) -> Backwards:
    h, (beta1, beta2) = a.hyper, a.hyper["betas"]
    grow = 1 / (1 - h["lr"] * h["weight_decay"])
    return Form.LION, (h["lr"], grow, _sign(h), _fade(beta2), 1 - beta1, float(a.first))


def _lion_refuses(h: Hyper) -> str:
    return _forgets(beta2=h["betas"][1]) or _shrink(h)


def _moments(h: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        tensors=lambda h: ("momentum_buffer",) if h["momentum"] else (), refuses=_sgd_refuses, backwards=_sgd
    ),
    torch.optim.Adam: Rule(tensors=_moments, refuses=_betas_refuse, backwards=_adam),
    Lamb: Rule(tensors=_moments, refuses=_betas_refuse, backwards=_lamb),
    Lion: Rule(tensors=lambda h: ("exp_avg",), refuses=_lion_refuses, backwards=_lion),
}
"""The inverses. The steps of other optimizers are taken back by copies."""


def snapshot(group: dict[str, Any]) -> Hyper:
    """Returns a copy of the group's hyperparameters: they may be tensors, or be changed by a scheduler."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def numbers(hyper: Hyper) -> Hyper:
    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value.item())
        return tuple(plain(item) for item in value) if isinstance(value, tuple | list) else value

    return {key: plain(value) for key, value in hyper.items()}


def unfit(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], names: tuple[str, ...]
) -> bool:
    """(before the step) Returns whether these parameters, for whose type and device there is a kernel, cannot be
    computed backwards."""
    if not parameters:
        return True  # none of the bucket's has a gradient
    tensors: list[torch.Tensor] = []
    for parameter in parameters:
        states = [optimizer.state.get(parameter, {}).get(name) for name in names]
        used = [tensor for tensor in (parameter.detach(), parameter.grad, *states) if tensor is not None]
        if type(used[0]) is not torch.Tensor or any(tensor.dtype != parameter.dtype for tensor in used):
            return True
        tensors += used
    if not all(t.layout == torch.strided and torch_private.is_plain_memory(t) for t in tensors):
        return True
    if sum(tensor.numel() for tensor in tensors) >= 1 << 31:
        return True
    named = {str(number): parameter for number, parameter in enumerate(parameters)}
    return bool(overlapping(named))  # one would be undone before the other is read


@dataclass(frozen=True)
class Cluster:
    """Parameters of a bucket that have the same age, so that they share a step's constants."""

    members: list[int]
    first: bool
    columns: list[list[torch.Tensor]]
    """Live tensors: the parameters, and their state by kind."""
    gradients: list[torch.Tensor]
    backwards: Backwards
    sane: bool

    @functools.cached_property
    def one_pass(self) -> kernels.Pass:
        """(on a CPU)"""
        return kernels.Pass(self.backwards, self.gradients, self.columns, kept=self.kept, sane=self.sane)

    @property
    def kept(self) -> int:
        """Returns how many columns have a value before the step."""
        return 1 if self.first else len(self.columns)


class Bucket:
    """The data of a bucket that both kinds of undo need.

    (journal) before the step ``Bucket(...)`` → the optimizer's step → ``applied()``; to undo it: ``clusters``,
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
        self._states: list[dict[str, Any] | None] = []  # keys and small values before the step
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
        self._before = [tensor.clone() for tensor in self._small]
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
        """(after the optimizer's step) Keeps references to the gradients, which a fused step may have unscaled."""
        self.gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self._versions = [gradient._version for gradient in self.gradients]
        found_inf: Any = getattr(self.optimizer, "found_inf", None)
        self._found_inf = found_inf.clone() if isinstance(found_inf, torch.Tensor) else None

    @property
    def skipped(self) -> bool:
        """Returns whether a scaler found an infinity, so that the fused step has changed no value."""
        return self._found_inf is not None and bool(self._found_inf.item())

    def check_gradients(self) -> None:
        if any(g._version != v for g, v in zip(self.gradients, self._versions, strict=True)):
            raise ServiceError(
                "this step cannot be taken back: its gradients were changed in place after it "
                "(use zero_grad(set_to_none=True))"
            )

    def clusters(self, *, sane: bool) -> Iterator[Cluster]:
        """(after the optimizer's step) Yields one cluster per age of parameters."""
        hyper = numbers(self.hyper)
        ages: dict[tuple[bool, float, float], list[int]] = {}
        for index, parameter in enumerate(self.parameters):
            state = self.optimizer.state.get(parameter, {})
            step, trust = float(state.get("step", 0.0)), float(state.get("trust_ratio", 1.0))
            ages.setdefault((self.first[index], step, trust), []).append(index)
        for (first, step, trust), members in ages.items():
            backwards = self.rule.backwards(Applied(hyper=hyper, step=step, trust_ratio=trust, first=first))
            gradients = [self.gradients[i].detach() for i in members]
            columns = self.columns(members, state=True)
            yield Cluster(members, first, columns, gradients, backwards, sane)

    def columns(self, members: list[int], *, state: bool) -> list[list[torch.Tensor]]:
        parameters = [self.parameters[i] for i in members]
        names = self.names if state else ()
        kinds = [[self.optimizer.state[p][name].detach() for p in parameters] for name in names]
        return [[p.detach() for p in parameters], *kinds]

    def restore_scalars(self) -> None:
        """Restores step counters and similar state; removes state that did not exist before the step."""
        if self._small:
            torch_private.copy_all(self._small, self._before)
        for parameter, state in zip(self.parameters, self._states, strict=True):
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                now = self.optimizer.state[parameter]
                now.clear()
                now.update(state)


class Arithmetic:
    """Undo by formula. Before the step ``Arithmetic(bucket)`` → the optimizer's step → ``after()``; later ``undo()``"""

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
        """Undoes the step. Raises ServiceError if the result is not finite: the step made parameters NaN or inf."""
        bucket = self._bucket
        bucket.check_gradients()
        clusters = () if bucket.skipped else bucket.clusters(sane=True)
        if sum(cluster.one_pass.invert() for cluster in clusters):
            raise ServiceError(
                "this step cannot be taken back arithmetically: it made parameters NaN or infinite; "
                "undo='exact' can"
            )
        bucket.restore_scalars()
