"""Reinit: after a loss the training function is called again in the same processes (strategy "reinit").

    (worker, or a trainer by `swift_ft.reinit`) ``call_again_after_losses(train)``
    (a session)  is created inside: registers to be closed, and later hands on its line to the coordinator
    (its engine) a rank was lost: raises `Reinitialize`, which unwinds the training function
    (here)       closes what the function has left, restores the generators, and calls it again; its next session
                 continues with the same line, holds no state, and begins with a checkpoint

A spare that is warmed up (`swift_ft.warm_up`) leaves its training function in the same way, and then waits.

After Reinit (Laguna et al., "Evaluating and Extending User-Level Fault Tolerance in MPI Applications", 2016), which the
study of MPI for deep learning (EuroMPI 2017) compares with ULFM. Modules stay imported and the device context is kept,
which saves time against a restart.
"""

import gc
import os
import random
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

from swift_ft import events
from swift_ft.errors import ServiceError, UsageError
from swift_ft.text import one_line, tell

P = ParamSpec("P")
T = TypeVar("T")


_COLLECTIONS_MAX = 4
_SETTINGS = "swift_ft.state.torch_settings"


class Reinitialize(BaseException):
    """Unwinds the training function, which is then called again. Not an `Exception`, like KeyboardInterrupt: a trainer
    that handles its own errors lets it through."""


class Closable(Protocol):
    def close(self) -> None: ...


class _Process:
    """State of this process: whether its training function is called again, and what one call hands on to the next."""

    def __init__(self) -> None:
        self.depth = 0
        self.line: Any = None
        """Connection to the coordinator (`swift_ft.train.coordinator_session.Member`), from the previous call."""
        self.session: Closable | None = None
        self.asked = False
        """True from raising Reinitialize until it is handled here."""
        self.leaves = False
        """True during a warm-up: the function is left for good (`over`)."""


_process = _Process()


def is_called_again() -> bool:
    """Returns whether a caller up the stack calls the training function again after losses."""
    return _process.depth > 0


def begin_session(session: Closable) -> None:
    """Registers a session to be closed before the function is called again, if the function does not close it
    itself."""
    _process.session = session


def is_open(session: Closable) -> bool:
    """Returns whether the session was created in this call of the function."""
    return _process.session is session


def begin_warm_up() -> None:
    """(before the script) Starts a warm-up: the function is called only once, also by `call_again_after_losses`."""
    _process.leaves = True


def over() -> Reinitialize:
    """(a session in a warm-up) Returns the exception to raise once the training function has come far enough."""
    _process.asked = True
    return Reinitialize("this spare is warm: the training function is left, until there is a rank for it")


def asked() -> bool:
    return _process.asked


def hand_on(line: object) -> Reinitialize:
    """Returns the exception to raise. The next call's session gets `line` by `handed_on`."""
    _process.line, _process.asked = line, True
    return Reinitialize("a rank was lost: the training function is called again")


def handed_on() -> Any:
    """Returns and clears the line handed on by the previous call; None in the first call."""
    line, _process.line = _process.line, None
    return line


def has(line: object) -> bool:
    """Returns whether this line was handed on, and waits for the next call's session."""
    return _process.line is line


def call_again_after_losses(train: Callable[[], T]) -> T:
    """Calls `train`, again after each loss. Returns what the last call returns, and raises what it raises. Raises
    UsageError if `train` swallows `Reinitialize`, ServiceError if it cannot begin a second time in one process."""
    if _process.leaves:
        return train()
    first = state()
    _process.depth += 1
    try:
        while True:
            try:
                result = train()
                if not _process.asked:
                    return result
            except Reinitialize:
                pass
            except Exception as error:
                if _process.line is not None and not _process.asked and not isinstance(error, UsageError):
                    raise ServiceError(
                        "the training function was called again after a loss, and cannot begin a second time in one "
                        f"process: {type(error).__name__}: {one_line(str(error))}"
                    ) from error
                if not _came_over(error):
                    raise
                tell(f"while the training function was left: {type(error).__name__}: {one_line(str(error))}")
            else:
                raise UsageError(
                    "a rank was lost, and the training function has caught what tells it to begin again: let "
                    "swift_ft.Reinitialize through (`except Exception` does)"
                )
            began = time.monotonic()
            leave()
            restore(first)
            rank = int(os.environ.get("RANK", "0"))
            events.emit("reinit", rank=rank, seconds=time.monotonic() - began)
    finally:
        _process.depth -= 1
        _process.asked = False
        _process.session = None


def _came_over(error: BaseException) -> bool:
    """Returns whether the error was raised while Reinitialize unwound: by a trainer's `finally` that needs lost
    ranks."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Reinitialize):
        seen = seen.__context__
    return _process.asked and seen is not None


def leave() -> None:
    """Closes the session and frees what the function has left, because memory may not suffice for two of it."""
    _process.asked = _process.leaves = False
    session, _process.session = _process.session, None
    if session is not None:
        session.close()
    del session
    for _ in range(_COLLECTIONS_MAX):  # torch's C++ objects become collectable once their graph is freed
        if not gc.collect():
            break


def state() -> dict[str, Any]:
    """Returns the states of the default generators, and torch's settings, as the function begins with them. So every
    call draws the same before its first step, as does a process that replaces a lost one."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
        states["seed"] = sys.modules["torch"].initial_seed()
    if _SETTINGS in sys.modules:  # loaded with torch, wherever a session can be created
        states["settings"] = sys.modules[_SETTINGS].read()
    return states


def restore(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
        from swift_ft.device import accelerator_in_use  # loads torch

        if (accelerator := accelerator_in_use()) is not None:
            for generator in accelerator.generators():
                generator.manual_seed(states["seed"])
    if "settings" in states:
        sys.modules[_SETTINGS].put(states["settings"])


def reinit(train: Callable[P, T]) -> Callable[P, T]:
    """Decorates a training function that is called again after a loss, with the same arguments, in the same processes
    (`SessionConfig.strategy` "reinit"). It must create its session, its model and its optimizer itself.

    Without the decorator, `swift-ft run` calls the whole script again. State that a module holds outside of the
    function is kept.
    """

    @wraps(train)
    def called_again(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_again_after_losses(lambda: train(*args, **kwargs))

    return called_again
