"""Optimizers and parameters that the tests of swift_ft.state are run over."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from swift_ft.optimizers import Lamb, Lion
from swift_ft.state.journal import Journal

Tensors = list[torch.Tensor]
Make = Callable[[list[Any]], torch.optim.Optimizer]

SHAPES = [(3, 5), (7,), (1,), (), (64, 33), (0, 4), (129,), (2, 3, 4)]

HYPER: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "sgd-nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "sgd-maximize": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "adamw-maximize": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0, "weight_decay": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3, "weight_decay": 0.01}),
    "radam": (torch.optim.RAdam, {"lr": 1e-3, "weight_decay": 0.01}),
    "lamb": (Lamb, {"lr": 1e-2, "weight_decay": 0.01}),
    "lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
}
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
OURS = (Lamb, Lion)
COPIED = ("amsgrad", "adagrad", "rmsprop", "adadelta", "nadam", "radam", "adamax", "asgd", "rprop")
"""Those whose steps have no inverse."""
IMPLEMENTATIONS = ("default", "for-loop", "foreach", "fused")


def cases() -> Iterator[tuple[str, str]]:
    """(name in HYPER, implementation) of all that torch has on a CPU."""
    for name, (cls, _) in HYPER.items():
        for implementation in IMPLEMENTATIONS:
            if (
                implementation == "default"
                or (implementation == "fused" and cls in FUSED)
                or (implementation in ("for-loop", "foreach") and cls not in OURS)
            ):
                yield name, implementation


def repeats(name: str, implementation: str, dtype: torch.dtype) -> bool:
    """False for what torch 2.13 itself does not do twice alike: its fused SGD on a CPU takes 16-bit momentum for
    32-bit and writes trash (pytorch issue 191763)."""
    return not (name.startswith("sgd") and implementation == "fused" and dtype.itemsize == 2)


def make(name: str, implementation: str, parameters: list[Any]) -> torch.optim.Optimizer:
    cls, hyper = HYPER[name]
    flags = {
        "default": {},
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    return cls(parameters, **hyper, **flags[implementation])


def parameters(dtype: torch.dtype, device: str = "cpu") -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def give_gradients(parameters: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    """Gradients of one step: the same for the same step; the third parameter has none in odd steps."""
    generator = torch.Generator().manual_seed(1000 + step)
    for index, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = None if index == 2 and step % 2 else gradient.to(parameter)


def step_on(journal: Journal, parameters: list[torch.nn.Parameter], step: int, scale: float = 1.0) -> None:
    """With `give_gradients` of that step."""
    give_gradients(parameters, step, scale)
    journal.begin(step)
    journal.apply_rest()


def grouped(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Three groups of unlike hyperparameters; one rate is a tensor where torch takes that."""
    return [
        {"params": parameters[:3], "lr": 0.03},
        {"params": parameters[3:5], "weight_decay": 0.0},
        {"params": parameters[5:], "lr": 0.007, "weight_decay": 0.2},
    ]


def bits(value: Any) -> Any:
    """Something that is equal if and only if all bits are, NaNs included."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [bits(item) for item in value]
    return value


def image(optimizer: torch.optim.Optimizer) -> Any:
    """Parameters and state, by position."""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    return [(bits(p), bits(optimizer.state[p]) if p in optimizer.state else None) for p in everything]
