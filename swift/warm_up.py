"""Warm-up: a spare runs the training script before it is needed, as far as one forward and backward of a rank's stage.

    (worker)    ``warm_up(script)`` with the environment of a rank, but for what names its peers
    (a session) is made inside: joins nothing, and has nobody beside it (`swift.runtime.warming`)
    (it)        loads the newest checkpoint, computes one step from logged tensors, and raises `Reinitialize`
    (worker)    the process is as it was before, but for what libraries keep: kernels, allocators, what autotuning has
                found, modules that are imported; it waits for its rank, and runs the script from the beginning

The second run is in a process that is not new. What that can mean for a script is said in docs/operation.md. If the
script cannot begin a second time, it is begun in a new interpreter (`swift.launch.worker`).
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from swift import reinitializing
from swift.errors import SwiftError, UsageError
from swift.words import one_line


@dataclass(kw_only=True, slots=True)
class Warmed:
    """What a warm-up has done."""

    why_not: str = ""
    """One line; empty: the spare is warm."""
    passing: bool = False
    """The job was in the way (a recovery, a checkpoint that was replaced meanwhile): another time it may go well."""
    version: int = -1
    """The checkpoint that the step was computed from."""
    script_seconds: float = 0.0
    """From the script's first line to `session.run`."""
    step_seconds: float = 0.0
    """One forward and backward, with what was read for it."""


class _Process:
    """This process's."""

    def __init__(self) -> None:
        self.under_way: Warmed | None = None
        self.began = 0.0
        self.waited = 0.0
        self.warmed: Warmed | None = None
        self.session_made = False


_process = _Process()


def is_warming_up() -> bool:
    """Whether this process is a spare that runs the script to be warm: it is no rank, and leaves the script in
    `session.run` (``swift-ft run --warm-up``). For what a script should not do twice, or not beside the rank that does
    it: a line to a tracker, a file.
    """
    return _process.under_way is not None


def was_warmed_up() -> bool:
    """This process has run the script before, as a spare."""
    return _process.warmed is not None


def came_to_run() -> Warmed:
    """(session, in a warm-up) The script has made all that it needs. What is to be filled in."""
    warmed = _process.under_way
    assert warmed is not None
    warmed.script_seconds = script_seconds()
    return warmed


def begin_script() -> None:
    """(worker) Its first line comes next."""
    _process.began, _process.waited = time.monotonic(), 0.0


def script_seconds() -> float:
    """What the script has taken so far, without `waiting`."""
    return time.monotonic() - _process.began - _process.waited


@contextmanager
def waiting() -> Iterator[None]:
    """For other ranks."""
    began = time.monotonic()
    try:
        yield
    finally:
        _process.waited += time.monotonic() - began


def begin_session() -> None:
    """(session, of a rank) The script has begun; from here on an error is its own."""
    _process.session_made = True


def cannot_begin_again() -> bool:
    """The script has run here before, and has made no session this time."""
    return was_warmed_up() and not _process.session_made


def warm_up(script: Callable[[], object]) -> Warmed:
    """Runs it until its session says that it has come far enough. Whatever it raises is the reason why not."""
    first = reinitializing.state()
    warmed = _process.under_way = Warmed()
    begin_script()
    try:
        _run(script, warmed)
        reinitializing.leave()
        sys.modules["__main__"] = ModuleType("__main__")  # its variables hold the model
        reinitializing.put_back(first)
        _free_device()
    finally:
        _process.under_way = None
        _process.warmed = warmed
    return warmed


def _run(script: Callable[[], object], warmed: Warmed) -> None:
    try:
        script()
    except reinitializing.Reinitialize:
        return
    except SystemExit as end:
        why = f"the script has ended with exit code {end.code}"
    except Exception as error:  # noqa: BLE001  (a stranger's script)
        why = f"{type(error).__name__}: {one_line(str(error))}"
        warmed.passing = isinstance(error, SwiftError) and not isinstance(error, UsageError)
    else:
        why = "the script has ended"
    if not reinitializing.asked():
        warmed.why_not = why


def _free_device() -> None:
    """The rank that trains on the same device needs the memory."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
