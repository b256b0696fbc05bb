"""Which modules may be imported before a fork: tried in a process that is thrown away.

::

    (fork server) has imported what every rank needs; forks a child
    (child)       imports one after the other, and looks after each at what it has done; writes its name, or why not.
                  What it has done cannot be undone, so it ends with the first one that does not fit
    (fork server) forks the next child for those behind that one; then imports what fits, by itself

A module does not fit that starts a thread or a process, keeps a file open, has set up CUDA, handles a signal or draws
from a default generator; nor one that has looked at what only a rank has (its number, its arguments).
"""

import contextlib
import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from swift.launch import worker

TRIAL_S_MAX = 60.0
"""A module that takes longer is left to the script; so are those behind it."""
_OF_A_RANK = frozenset(
    f"{group}{what}" for group in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
) | {"MASTER_ADDR", "MASTER_PORT"}
_OF_A_LAUNCHER = ("TORCHELASTIC_", "SWIFT_")
Traces = Callable[[], dict[str, Any]]
"""What the fork server looks at in any process that it forks: by name."""


def fitting(names: list[str], traces: Traces) -> tuple[list[str], dict[str, str]]:
    """Those that may be imported here, and why the others may not."""
    fit: list[str] = []
    unfit: dict[str, str] = {}
    deadline = time.monotonic() + TRIAL_S_MAX
    while names:
        passed, why = _try(names, traces, deadline)
        fit += names[:passed]
        if passed < len(names):
            unfit[names[passed]] = why
        names = names[passed + 1 :]
    return fit, unfit


def _try(names: list[str], traces: Traces, deadline: float) -> tuple[int, str]:
    """How many of the first ones fit, and why the next one does not."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            worker.die_with(os.getppid())
            os.close(told)
            _import_all(names, traces, tell)
        finally:
            os._exit(0)
    os.close(tell)
    try:
        lines = _lines(told, deadline)
        passed = 0
        for why in lines:
            if why:
                return passed, why
            passed += 1
        return passed, "it ends its process, or takes too long"
    finally:
        os.close(told)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _lines(told: int, deadline: float) -> Iterator[str]:
    """Until the child ends, or the time does."""
    text = b""
    while (left_s := deadline - time.monotonic()) > 0 and select.select([told], [], [], left_s)[0]:
        if not (more := os.read(told, 1 << 16)):
            return
        text += more
        *whole, text = text.split(b"\n")
        yield from (str(json.loads(line)) for line in whole)


def _import_all(names: list[str], traces: Traces, tell: int) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)  # the script's own import says it again
    os.close(quiet)
    looked: list[str] = []
    _watch(looked)
    before = traces() | _state()
    for name in names:
        try:
            worker.preload(name)
            after = traces() | _state()
            why = (
                looked[0] if looked else next((what for what in after if after[what] != before.get(what)), "")
            )
        except BaseException as error:  # noqa: BLE001  (whatever a module may raise)
            why = f"{type(error).__name__}: {error}"
        os.write(tell, json.dumps(why[:200]).encode() + b"\n")
        if why:
            return


def _state() -> dict[str, Any]:
    """By what it is called if it changes."""
    state: dict[str, Any] = {
        "it handles a signal": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "it draws from Python's random": random.getstate(),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        state["it draws from torch's generator"] = torch.get_rng_state().tolist()
        state["it sets up CUDA"] = torch.cuda.is_initialized()
    return state


def _watch(looked: list[str]) -> None:
    """What only a rank has: who looks at it here sees another process's."""

    class Environment(os._Environ):  # type: ignore[type-arg]
        def __getitem__(self, name: str) -> str:
            if name in _OF_A_RANK or name.startswith(_OF_A_LAUNCHER):
                looked.append(f"it looks at ${name}")
            return str(super().__getitem__(name))

    class Arguments(list[str]):
        def __getitem__(self, place: Any) -> Any:
            looked.append("it looks at the arguments")
            return super().__getitem__(place)

        def __iter__(self) -> Iterator[str]:
            looked.append("it looks at the arguments")
            return super().__iter__()

        def __len__(self) -> int:
            looked.append("it looks at the arguments")
            return super().__len__()

    os.environ.__class__ = Environment
    sys.argv = Arguments(sys.argv)
