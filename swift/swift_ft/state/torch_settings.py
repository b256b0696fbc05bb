"""Settings of torch that a trainer may change in a step, and that affect the bits of later computations.

They are a part of a rank's state. A new process begins with its script's settings, a survivor that goes back restores
the earlier ones, and a dropped step leaves none changed.

    (state) ``remember`` → ``begin_step`` → the step → ``end_step``, or ``begin_step`` again
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch

from swift_ft.errors import ServiceError


class _Setting(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], object]


def _dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _flushes_denormals() -> bool:
    return not torch.full((1,), 1e-39, dtype=torch.float32).mul(1.0).item()


def _of_backend(name: str) -> _Setting:
    backend = getattr(torch.backends.mkldnn, name)
    return _Setting(lambda: backend.fp32_precision, partial(setattr, backend, "fp32_precision"))


_SETTINGS = {
    "default_dtype": _Setting(_dtype, lambda name: torch.set_default_dtype(getattr(torch, name))),
    "grad_enabled": _Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic": _Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "num_threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "flush_denormal": _Setting(_flushes_denormals, torch.set_flush_denormal),
    # The old name and the new ones; where both were used, torch raises an error for the old one.
    "float32_matmul_precision": _Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    **{f"mkldnn_{name}": _of_backend(name) for name in ("matmul", "conv", "rnn")},
    "flash_attention": _Setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "efficient_attention": _Setting(
        torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp
    ),
    "plain_attention": _Setting(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
}


class Settings:
    def __init__(self) -> None:
        self._first: dict[str, Any] = {}
        self._now: dict[str, Any] = {}

    def remember(self) -> None:
        self._first = self._now = read()

    def begin_step(self) -> None:
        """Applies the settings that the last step has left, or those of a loaded state."""
        put(self._now)

    def end_step(self) -> None:
        self._now = read()

    def state(self) -> dict[str, Any]:
        """Returns the settings that differ from those of a new process."""
        return {name: value for name, value in self._now.items() if self._first.get(name) != value}

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads settings for the next step. Raises ServiceError for settings of another version."""
        if unknown := sorted(set(state) - set(_SETTINGS)):
            raise ServiceError(
                f"the state has settings of torch that this version does not know: {', '.join(unknown)}"
            )
        self._now = {**self._first, **state}


def read() -> dict[str, Any]:
    settings = {}
    for name, setting in _SETTINGS.items():
        with suppress(RuntimeError):
            settings[name] = setting.get()
    return settings


def put(settings: Mapping[str, Any]) -> None:
    """Applies the settings whose values differ from the current ones."""
    for name, value in read().items():
        if name in settings and settings[name] != value:
            _SETTINGS[name].put(settings[name])
