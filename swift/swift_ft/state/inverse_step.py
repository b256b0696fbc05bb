"""Undo by inverting the step, without extra memory. It is not exact, because the step rounds."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from swift_ft.errors import ServiceError
from swift_ft.optimizers import Lamb, Lion
from swift_ft.state import kernels, optimizer_names
from swift_ft.state.kernels import DTYPES, Form, Unit, cut, direct

# Error of an undo, for drills and benchmarks that also keep a copy.


@dataclass(slots=True)
class Error:
    """Error sums over parameters."""

    elements: int = 0
    equal: int = 0
    ulps: float = 0.0
    ulps_max: float = 0.0
    squares: float = 0.0
    step_squares: float = 0.0

    def add(self, truth: torch.Tensor, got: torch.Tensor, stepped_squares: float) -> None:
        """Adds one parameter. `stepped_squares`: squared length of the step that was undone."""
        if not truth.numel():
            return
        apart = (_order(truth) - _order(got)).abs()
        self.elements += truth.numel()
        self.equal += int((apart == 0).sum())
        self.ulps += float(apart.sum(dtype=torch.float64))
        self.ulps_max = max(self.ulps_max, float(apart.max()))
        self.squares += squares(truth, got)
        self.step_squares += stepped_squares

    @property
    def ulps_mean(self) -> float:
        return self.ulps / max(self.elements, 1)

    @property
    def exact_share(self) -> float:
        return self.equal / self.elements if self.elements else 1.0

    @property
    def step_error(self) -> float:
        return float((self.squares / self.step_squares) ** 0.5) if self.step_squares else 0.0


def squares(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the squared distance, over the elements that are finite in both."""
    return float((a.detach().double() - b.detach().double()).nan_to_num_(0.0, 0.0, 0.0).square().sum())


def _order(tensor: torch.Tensor) -> torch.Tensor:
    """Returns integers in the order of the values, neighbours one apart; both zeros are 0."""
    integers = DTYPES[tensor.dtype]
    bits = tensor.detach().contiguous().view(integers).to(torch.int64)
    smallest = torch.iinfo(integers).min
    return torch.where(bits < 0, smallest - bits, bits)


# Inverses of the optimizers' steps: they compute parameters and state before a step from those after it.
#
# Sources: torch.optim (2.13), `swift_ft.optimizers`. No inverse restores the same bits, because the step rounds. The
# error is a few units of the last place, unless the old value is much smaller than what was added to it.
#
# A kernel works in place on flat tensors of one length N: parameters `p`, gradients `g` (not changed), state `s`.
# Each has a twin in `kernels.cpp` that does the same in one pass, given `Backwards.constants` in the order of the
# twin's constructor.
# `sane` requests values that training can continue with where rounding has destroyed the old one: no NaN, and a second
# moment that is neither negative nor smaller than its own rounding error. Without it the values are only repeatable,
# which suffices for the exact undo.

Tensor = torch.Tensor
Kernel = Callable[[Tensor, Tensor, list[Tensor]], None]
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
    scalars: dict[str, float]
    """Other state with one number per parameter, after the step."""
    first: bool
    """True if there was no state before: then only parameters are computed and the state is removed."""
    sane: bool


@dataclass(frozen=True, slots=True)
class Backwards:
    """The inverse of a step, for tensors of any device and for `kernels.Pass`."""

    kernel: Kernel
    form: Form
    constants: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The inverse of one optimizer class."""

    tensors: Callable[[Hyper], tuple[str, ...]]
    """Returns the names of state tensors of the parameter's shape, in the order in which kernels take them."""
    refuses: Callable[[Hyper], str]
    """Returns why a step with these hyperparameters has no inverse; empty if it has one."""
    backwards: Callable[[Applied], "Backwards"]
    scalars: tuple[str, ...] = ()
    """Names of one-number state that the kernel needs, other than `step`."""


# --- shared by several optimizers ---


def _sign(hyper: Hyper) -> float:
    return -1.0 if hyper.get("maximize") else 1.0


def _decayed(g: Tensor, p: Tensor, sign: float, decay: float) -> Tensor:
    """Returns ±g + decay·p, the gradient as the step used it. The result may be `g` itself."""
    if decay:
        return torch.add(g, p, alpha=decay) if sign > 0 else torch.mul(p, decay).sub_(g)
    return g if sign > 0 else -g


def _fade(beta: float) -> float:
    """Returns the factor that undoes m ← β·m + (1 - β)·g, also in `kernels.cpp`."""
    return (1 - beta) / beta


def _forget_first(m: Tensor, g: Tensor, beta: float) -> None:
    """Undoes m ← β·m + (1 - β)·g."""
    m.lerp_(g, -_fade(beta))


def _forget_second(v: Tensor, g: Tensor, beta: float, sane: bool, *others: Tensor) -> None:
    """Undoes v ← β·v + (1 - β)·g²."""
    v.mul_(1 / beta).addcmul_(g, g, value=-(1 - beta) / beta)
    if sane:
        _make_sane(v, g, beta, 1 - beta, *others)


def _make_sane(v: Tensor, g: Tensor, old: float, new: float, *others: Tensor) -> None:
    """Raises v to a floor where rounding has destroyed it. v: the estimate before v ← old·v + new·g².

    The estimate's error is one unit in the last place of the value after the step. A smaller v is meaningless, and a
    small v causes large steps. Where the value after the step has overflowed, v and `others` restart from zero.
    """
    least, most = torch.aminmax(v)
    if least.item() > 0 and most.item() < math.inf:
        return
    after = torch.addcmul(v * old, g, g, value=new)
    lost = ~(torch.isfinite(v) & torch.isfinite(after))
    torch.maximum(v, after.mul_(torch.finfo(v.dtype).eps), out=v)
    v.clamp_(min=0)
    for tensor in (v, *others):
        tensor.masked_fill_(lost, 0)


def _solve(p: Tensor, g: Tensor, denominator: Tensor, rate: float, decay: float, bound: float) -> None:
    """Undoes p ← p - rate·(g + decay·p)/denominator, where the fraction lies within ±bound.

    Where the decay is as strong as the denominator there is no inverse; the bound then limits the error.
    """
    if not decay:
        p.addcdiv_(g, denominator, value=rate)
        return
    denominator = torch.maximum(denominator - rate * decay, denominator * 0.5)
    p.add_(torch.add(g, p, alpha=decay).div_(denominator).clamp_(-bound, bound), alpha=rate)


def _shrink(hyper: Hyper) -> str:
    """Returns why decoupled weight decay cannot be undone; empty if it can."""
    factor = 1 - hyper["lr"] * hyper["weight_decay"]
    return "" if factor >= SHRINKS_BELOW else f"lr·weight_decay leaves {factor:.3g} of a parameter"


def _forgets(**rates: float) -> str:
    """Returns which decay rate is too small; empty if none is."""
    for name, rate in rates.items():
        if not rate >= FORGETS_BELOW:
            return f"{name}={rate:.3g} forgets the old value"
    return ""


# --- SGD ---


def _sgd(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, momentum, decay = h["lr"], h["momentum"], h["weight_decay"]

    def plain(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        p.add_(g, alpha=sign * lr)
        if decay:
            p.mul_(1 / (1 - lr * decay))

    def with_momentum(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        buffer = s[0]
        if h["nesterov"]:
            p.add_(buffer, alpha=lr * momentum)
            plain(p, g, s)
        else:
            p.add_(buffer, alpha=lr)
        if a.first:
            return
        used = _decayed(g, p, sign, decay)
        buffer.sub_(used, alpha=1 - h["dampening"]).mul_(1 / momentum)

    shrink = 1 / (1 - lr * decay) if h["nesterov"] or not momentum else 1.0
    if not momentum:
        return Backwards(plain, Form.SGD, (sign * lr, shrink))
    by_buffer = lr * momentum if h["nesterov"] else lr
    constants = (
        sign * lr,
        shrink,
        by_buffer,
        sign,
        decay,
        1 - h["dampening"],
        momentum,
        float(h["nesterov"]),
    )
    return Backwards(with_momentum, Form.MOMENTUM, constants)


def _sgd_refuses(h: Hyper) -> str:
    if h["momentum"] and not h["nesterov"]:
        return _forgets(momentum=h["momentum"])
    return (_forgets(momentum=h["momentum"]) if h["momentum"] else "") or _shrink(h)


# --- Adam and its variants ---


def _adam(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, eps, decay = h["lr"], h["eps"], h["weight_decay"]
    (beta1, beta2), decoupled = h["betas"], h.get("decoupled_weight_decay", False)
    root = math.sqrt(1 - beta2**a.step)
    size = lr * root / (1 - beta1**a.step)
    grow = 1 / (1 - lr * decay) if decoupled else 1.0

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        # torch's fused AdamW does each half in one pass, given unusual constants:
        # first p ← (p + size·m/(√v + eps·root))·grow, with constant moments,
        m, v = s
        if size:
            optimizer_names.adamw_(
                p, m, m, v, lr=-size * grow, decay=(grow - 1) / (size * grow), eps=eps * root
            )
        if a.first:
            return
        # then the moments backwards, with rates over 1 and a dummy parameter.
        used = _decayed(g, p, 1.0 if decoupled or not decay else sign, 0.0 if decoupled else decay)
        flip = sign < 0 and used is g
        optimizer_names.adamw_(torch.empty_like(p), used, m, v, betas=(1 / beta1, 1 / beta2), maximize=flip)
        if a.sane:
            _make_sane(v, used, beta2, 1 - beta2, m)

    coupled = 0.0 if decoupled else decay
    scale = root / (1 - beta1**a.step)
    constants = (lr, scale, eps * root, grow, sign, coupled, _fade(beta1), beta2, 1 - beta2, float(lr != 0))
    return Backwards(kernel, Form.ADAM, constants)


def _betas_refuse(h: Hyper) -> str:
    beta1, beta2 = h["betas"]
    if h.get("amsgrad"):
        return "AMSGrad keeps a maximum"
    return _forgets(beta1=beta1, beta2=beta2) or (_shrink(h) if h.get("decoupled_weight_decay") else "")


def _radam(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, eps, decay = h["lr"], h["eps"], h["weight_decay"]
    (beta1, beta2), decoupled = h["betas"], h["decoupled_weight_decay"]
    correction2 = 1 - beta2**a.step
    rho_end = 2 / (1 - beta2) - 1
    rho = rho_end - 2 * a.step * beta2**a.step / correction2
    size = lr / (1 - beta1**a.step)
    if rho > 5:
        size *= math.sqrt((rho - 4) * (rho - 2) * rho_end / ((rho_end - 4) * (rho_end - 2) * rho))
        size *= math.sqrt(correction2)
    grow = 1 / (1 - lr * decay) if decoupled else 1.0

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        m, v = s
        if rho > 5:
            p.addcdiv_(m, v.sqrt().add_(eps), value=size)
        else:
            p.add_(m, alpha=size)
        if grow != 1:
            p.mul_(grow)
        if a.first:
            return
        used = _decayed(g, p, sign, 0.0 if decoupled else decay)
        _forget_first(m, used, beta1)
        _forget_second(v, used, beta2, a.sane, m)

    coupled = 0.0 if decoupled else decay
    averages = (grow, sign, coupled, _fade(beta1), beta2, 1 - beta2)
    constants = (lr, size / lr if lr else 0.0, eps, *averages, float(rho > 5 and lr != 0))
    return Backwards(kernel, Form.ADAM, constants)


def _nadam(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, eps, decay = h["lr"], h["eps"], h["weight_decay"]
    (beta1, beta2), decoupled = h["betas"], h["decoupled_weight_decay"]
    root = math.sqrt(1 - beta2**a.step)
    mu = beta1 * (1 - 0.5 * 0.96 ** (a.step * h["momentum_decay"]))
    mu_next = beta1 * (1 - 0.5 * 0.96 ** ((a.step + 1) * h["momentum_decay"]))
    product = a.scalars["mu_product"]
    by_gradient = root * lr * (1 - mu) / (1 - product)
    by_moment = root * lr * mu_next / (1 - product * mu_next)
    grow = 1 / (1 - lr * decay) if decoupled else 1.0
    bound = (by_gradient + by_moment) / math.sqrt(1 - beta2)

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        m, v = s
        denominator = v.sqrt().add_(eps * root)
        if decay and not decoupled:
            pull = torch.mul(m, by_moment).add_(g, alpha=sign * by_gradient)
            _solve(p, pull, denominator, 1.0, by_gradient * decay, bound)
        else:
            p.addcdiv_(m, denominator, value=by_moment).addcdiv_(g, denominator, value=sign * by_gradient)
        if grow != 1:
            p.mul_(grow)
        if a.first:
            return
        used = _decayed(g, p, sign, 0.0 if decoupled else decay)
        _forget_first(m, used, beta1)
        _forget_second(v, used, beta2, a.sane, m)

    coupled = 0.0 if decoupled else decay
    moments = (by_moment, sign * by_gradient, eps * root, grow, sign, coupled, _fade(beta1))
    solve = (1.0, by_gradient * coupled, bound if coupled else math.inf)
    return Backwards(kernel, Form.NADAM, (*moments, *solve, beta2, 1 - beta2))


def _lamb(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    beta1, beta2 = h["betas"]
    root = math.sqrt(1 - beta2**a.step)
    rate = h["lr"] * a.scalars["trust_ratio"]
    scale = root / (1 - beta1**a.step)  # not in the rate: a tiny update has a trust ratio near overflow
    # The trust ratio is only known after the step, so it cannot be refused beforehand; this bounds the value.
    grow = 1 / max(1 - rate * h["weight_decay"], SHRINKS_BELOW)

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        m, v = s
        p.add_(torch.div(m, v.sqrt().add_(h["eps"] * root)).mul_(scale), alpha=rate).mul_(grow)
        if a.first:
            return
        used = _decayed(g, p, sign, 0.0)
        _forget_first(m, used, beta1)
        _forget_second(v, used, beta2, a.sane, m)

    constants = (
        rate,
        scale,
        h["eps"] * root,
        grow,
        sign,
        0.0,
        _fade(beta1),
        beta2,
        1 - beta2,
        float(rate != 0),
    )
    return Backwards(kernel, Form.ADAM, constants)


def _lion(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, (beta1, beta2) = h["lr"], h["betas"]
    grow = 1 / (1 - lr * h["weight_decay"])

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        used = _decayed(g, p, sign, 0.0)
        if a.first:
            p.add_(torch.sign(used), alpha=lr).mul_(grow)
            return
        (m,) = s
        _forget_first(m, used, beta2)
        if a.sane and not bool(m.sum(dtype=_wide(m)).isfinite()):
            m.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        p.add_(torch.lerp(m, used, 1 - beta1).sign_(), alpha=lr).mul_(grow)

    return Backwards(kernel, Form.LION, (lr, grow, sign, _fade(beta2), 1 - beta1, float(a.first)))


def _lion_refuses(h: Hyper) -> str:
    return _forgets(beta2=h["betas"][1]) or _shrink(h)


# --- Adagrad, RMSprop, Adadelta ---


def _adagrad(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    rate = h["lr"] / (1 + (a.step - 1) * h["lr_decay"])

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        (total,) = s
        denominator = total.sqrt().add_(h["eps"])
        # p ← p - rate·(±g + decay·p)/d is p ← p - (±rate)·(g ± decay·p)/d.
        _solve(p, g, denominator, sign * rate, sign * h["weight_decay"], 1.0)
        if a.first:
            return
        used = _decayed(g, p, sign, h["weight_decay"])
        total.addcmul_(used, used, value=-1)
        if a.sane:
            _make_sane(total, used, 1.0, 1.0)

    decay = h["weight_decay"]
    bound = 1.0 if decay else math.inf
    constants = (h["eps"], sign, decay, sign * rate, sign * decay, bound, 1.0, 1.0)
    return Backwards(kernel, Form.ADAGRAD, constants)


def _rmsprop_tensors(h: Hyper) -> tuple[str, ...]:
    return (
        "square_avg",
        *(("momentum_buffer",) if h["momentum"] > 0 else ()),
        *(("grad_avg",) if h["centered"] else ()),
    )


def _rmsprop(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, alpha, momentum, decay = h["lr"], h["alpha"], h["momentum"], h["weight_decay"]
    # Gradients that are always equal have no variance, so there is no bound.
    bound = (1 - alpha) ** -0.5 if alpha < 1 and not h["centered"] else math.inf

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        v = s[0]
        mean = s[-1] if h["centered"] else None
        root = v.sqrt() if mean is None else torch.addcmul(v, mean, mean, value=-1).sqrt_()
        root.add_(h["eps"])
        if momentum > 0:
            p.add_(s[1], alpha=lr)
        else:
            _solve(p, g, root, sign * lr, sign * decay, bound)
        if a.first:
            return
        used = _decayed(g, p, sign, decay)
        if momentum > 0:
            s[1].addcdiv_(used, root, value=-1).mul_(1 / momentum)
        if mean is not None:
            _forget_first(mean, used, alpha)
        _forget_second(v, used, alpha, a.sane, *s[1:])
        if a.sane and mean is not None:
            # A variance that rounding has made negative would cause a NaN in the next step.
            torch.maximum(v, mean * mean * (1 + 64 * torch.finfo(v.dtype).eps), out=v)

    averages = (h["eps"], sign, decay, lr, momentum, _fade(alpha))
    form = {
        (False, False): Form.RMSPROP,
        (True, False): Form.RMSPROP_MOMENTUM,
        (False, True): Form.RMSPROP_CENTERED,
        (True, True): Form.RMSPROP_MOMENTUM_CENTERED,
    }[momentum > 0, bool(h["centered"])]
    solve = (sign * lr, sign * decay, bound if decay else math.inf)
    return Backwards(kernel, form, (*averages, *solve, alpha, 1 - alpha))


def _rmsprop_refuses(h: Hyper) -> str:
    return _forgets(alpha=h["alpha"]) or (_forgets(momentum=h["momentum"]) if h["momentum"] > 0 else "")


def _adadelta(a: Applied) -> Backwards:
    h, sign = a.hyper, _sign(a.hyper)
    lr, rho, eps, decay = h["lr"], h["rho"], h["eps"], h["weight_decay"]

    def kernel(p: Tensor, g: Tensor, s: list[Tensor]) -> None:
        v, deltas = s
        root = torch.add(v, eps).sqrt_()
        # With weight decay the gradient depends on the old parameter; each iteration gains the digits of lr·decay.
        after = p.clone() if decay else p
        for _ in range((6 if p.dtype == torch.float64 else 3) if decay else 1):
            used = _decayed(g, p, sign, decay)
            ratio = torch.div(used, root)
            square = ratio * ratio
            old = torch.sub(deltas, square, alpha=(1 - rho) * eps).div_(square.mul_(1 - rho).add_(rho))
            old.clamp_(min=0)
            torch.addcmul(after, ratio, torch.add(old, eps).sqrt_(), value=lr, out=p)
        if a.first:
            return
        deltas.copy_(old)
        _forget_second(v, _decayed(g, p, sign, decay), rho, a.sane, deltas)

    return Backwards(kernel, Form.ADADELTA, (lr, eps, rho, sign, decay, rho, 1 - rho))


def _wide(tensor: Tensor) -> torch.dtype:
    """Returns a dtype in which a sum over many elements does not overflow."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _moments(h: Hyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq")


RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule(
        tensors=lambda h: ("momentum_buffer",) if h["momentum"] else (), refuses=_sgd_refuses, backwards=_sgd
    ),
    torch.optim.Adam: Rule(tensors=_moments, refuses=_betas_refuse, backwards=_adam),
    torch.optim.RAdam: Rule(tensors=_moments, refuses=_betas_refuse, backwards=_radam),
    torch.optim.NAdam: Rule(
        tensors=_moments, refuses=_betas_refuse, backwards=_nadam, scalars=("mu_product",)
    ),
    torch.optim.Adagrad: Rule(tensors=lambda h: ("sum",), refuses=lambda h: "", backwards=_adagrad),
    torch.optim.RMSprop: Rule(tensors=_rmsprop_tensors, refuses=_rmsprop_refuses, backwards=_rmsprop),
    torch.optim.Adadelta: Rule(
        tensors=lambda h: ("square_avg", "acc_delta"),
        refuses=lambda h: _forgets(rho=h["rho"]),
        backwards=_adadelta,
    ),
    Lamb: Rule(tensors=_moments, refuses=_betas_refuse, backwards=_lamb, scalars=("trust_ratio",)),
    Lion: Rule(tensors=lambda h: ("exp_avg",), refuses=_lion_refuses, backwards=_lion),
}


def snapshot(group: dict[str, Any]) -> Hyper:
    """Returns a copy of the group's hyperparameters: they may be tensors, or be changed by a scheduler."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def numbers(hyper: Hyper) -> Hyper:
    """Returns the hyperparameters with every tensor as a float."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return float(value.item())
        return tuple(plain(item) for item in value) if isinstance(value, tuple | list) else value

    return {key: plain(value) for key, value in hyper.items()}


def unfit(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], names: tuple[str, ...]
) -> str:
    """Returns why these parameters cannot be computed backwards; empty if they can."""
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
        return "parameters that share memory are copied"  # one would be undone before the other is read
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
    """Parameters of a bucket that have the same age, so that they share a step's constants."""

    members: list[int]
    applied: Applied
    backwards: Backwards
    gradients: list[torch.Tensor]
    columns: list[list[torch.Tensor]]
    """Live tensors: the parameters, and their state by kind."""

    @property
    def kept(self) -> int:
        """Returns how many columns have a value before the step."""
        return 1 if self.applied.first else len(self.columns)

    @cached_property
    def flat(self) -> list[bool]:
        return direct(self.gradients, *self.columns)

    @cached_property
    def units(self) -> list[Unit]:
        return cut(self.gradients, self.columns, self.flat)

    @cached_property
    def one_pass(self) -> kernels.Pass | None:
        """Returns the fast inverse, None if there is none for these tensors."""
        if not kernels.available(
            [*self.gradients, *(tensor for column in self.columns for tensor in column)]
        ):
            return None
        backwards = (self.backwards.form, self.backwards.constants)
        return kernels.Pass(backwards, self.gradients, self.columns, kept=self.kept, sane=self.applied.sane)


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
        self._before: list[torch.Tensor] = optimizer_names.clone(self._small) if self._small else []
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
        self._versions = [optimizer_names.version(gradient) for gradient in self.gradients]
        found_inf: Any = getattr(self.optimizer, "found_inf", None)
        self._found_inf = found_inf.clone() if isinstance(found_inf, torch.Tensor) else None

    @property
    def skipped(self) -> bool:
        """Returns whether a scaler found an infinity, so that the fused step has changed no value."""
        return self._found_inf is not None and bool(self._found_inf.item())

    def check_gradients(self) -> None:
        if any(optimizer_names.version(g) != v for g, v in zip(self.gradients, self._versions, strict=True)):
            raise ServiceError(
                "this step cannot be taken back: its gradients were changed in place after it "
                "(use zero_grad(set_to_none=True))"
            )

    def clusters(self, *, sane: bool) -> Iterator[Cluster]:
        """(after the optimizer's step) Yields one cluster per age of parameters."""
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
        """Returns the live tensors: the parameters, and their state by kind."""
        parameters = [self.parameters[i] for i in members]
        names = self.names if state else ()
        kinds = [[self.optimizer.state[p][name].detach() for p in parameters] for name in names]
        return [[p.detach() for p in parameters], *kinds]

    def restore_scalars(self) -> None:
        """Restores step counters and similar state; removes state that did not exist before the step."""
        if self._small:
            optimizer_names.copy_(self._small, self._before)
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
        if not bucket.skipped:
            finite = [self._take_back(cluster) for cluster in bucket.clusters(sane=True)]
            if not all(finite):
                raise ServiceError(
                    "this step cannot be taken back arithmetically: it made parameters NaN or infinite; "
                    "undo='exact' can"
                )
        bucket.restore_scalars()

    def _take_back(self, cluster: Cluster) -> bool:
        """Inverts one cluster. Returns whether the parameters are finite afterwards."""
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
