"""Reinit: after a loss the training function is called again, in the same processes (strategy "reinit").

    (worker, or a trainer by `swift_ft.reinit`) ``call_again_after_losses(train)``
    (a session)  is made inside: it says what is to be closed, and hands the line to the coordinator on
    (its engine) a rank was lost: raises `Reinitialize`, which unwinds the training function
    (here)       closes what the function has left, draws as at the first call, and calls it again; its next session
                 goes on with the same line, holds no state, and begins with a checkpoint

A spare that is warmed up (`swift_ft.warm_up`) leaves its training function in the same way, and then waits.

After Reinit (Laguna et al., "Evaluating and Extending User-Level Fault Tolerance in MPI Applications", 2016), which the
study of MPI for deep learning (EuroMPI 2017) sets beside ULFM. Modules stay imported, and the device's context is kept:
that is what the processes save against a restart.
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
    """The training function is to be left: it is called again. No `Exception`, as KeyboardInterrupt is none: a trainer
    that handles its own errors lets it through."""


class Closable(Protocol):
    def close(self) -> None: ...


class _Process:
    """This process: whether somebody calls its training function again, and what one call hands on to the next."""

    def __init__(self) -> None:
        self.depth = 0
        self.line: Any = None
        """To the coordinator (`swift_ft.train.coordinator_session.Member`), of the call before."""
        self.session: Closable | None = None
        self.asked = False
        """Reinitialize was raised, and has not come here yet."""
        self.leaves = False
        """It is left for good: a warm-up (`over`)."""


_process = _Process()


def is_called_again() -> bool:
    """Whether somebody around the caller does that."""
    return _process.depth > 0


def begin_session(session: Closable) -> None:
    """It is closed before the function is called again, if that does not do so itself."""
    _process.session = session


def is_open(session: Closable) -> bool:
    """It was made in this call of the function."""
    return _process.session is session


def begin_warm_up() -> None:
    """(before the script) The function is called once: whoever calls it again after losses lets that be."""
    _process.leaves = True


def over() -> Reinitialize:
    """(a session in a warm-up) What to raise: the training function has come as far as it is to."""
    _process.asked = True
    return Reinitialize("this spare is warm: the training function is left, until there is a rank for it")


def asked() -> bool:
    """Its session has raised Reinitialize, whatever has become of that."""
    return _process.asked


def hand_on(line: object) -> Reinitialize:
    """What to raise. The next call's session gets that line by `handed_on`."""
    _process.line, _process.asked = line, True
    return Reinitialize("a rank was lost: the training function is called again")


def handed_on() -> Any:
    """The line that the call before has left; None: this is the first one."""
    line, _process.line = _process.line, None
    return line


def has(line: object) -> bool:
    """It was handed on, and waits for the next call's session."""
    return _process.line is line


def call_again_after_losses(train: Callable[[], T]) -> T:
    """Returns what the last call returns. Raises what it raises; UsageError if it keeps `Reinitialize` to itself.
    Raises ServiceError if the function cannot begin a second time in one process."""
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
    """It was raised while Reinitialize was on its way: by a trainer's `finally`, which asks for ranks that are gone."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Reinitialize):
        seen = seen.__context__
    return _process.asked and seen is not None


def leave() -> None:
    """Whatever the function has left is gone before it is called again: there may be no room for two of it."""
    _process.asked = _process.leaves = False
    session, _process.session = _process.session, None
    if session is not None:
        session.close()
    del session
    for _ in range(_COLLECTIONS_MAX):  # what torch holds in C++ is seen to be free once its graph is
        if not gc.collect():
            break


def state() -> dict[str, Any]:
    """The states of the default generators, and torch's settings: what the function begins with. What it draws before
    its first step it draws alike in every call, as a process that takes a lost one's place draws it."""
    states: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    if "torch" in sys.modules:
        states["torch"] = sys.modules["torch"].get_rng_state()
        states["seed"] = sys.modules["torch"].initial_seed()
    if _SETTINGS in sys.modules:  # with torch, where a session can be made
        states["settings"] = sys.modules[_SETTINGS].read()
    return states


def restore(states: dict[str, Any]) -> None:
    """What `state` has given."""
    random.setstate(states["random"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "torch" in states:
        sys.modules["torch"].set_rng_state(states["torch"])
        if sys.modules["torch"].cuda.is_initialized():
            sys.modules["torch"].cuda.manual_seed_all(states["seed"])
    if "settings" in states:
        sys.modules[_SETTINGS].put(states["settings"])


def reinit(train: Callable[P, T]) -> Callable[P, T]:
    """Decorates a training function that is called again after a loss, with the same arguments, in the same processes
    (`SessionConfig.strategy` "reinit"). It must make its session, its model and its optimizer itself.

    Without it, `swift-ft run` calls the whole script again. What a module holds outside of the function stays as it
    is.
    """

    @wraps(train)
    def called_again(*args: P.args, **kwargs: P.kwargs) -> T:
        return call_again_after_losses(lambda: train(*args, **kwargs))

    return called_again
