"""Warm-up: a spare runs the training script before it is needed, as far as one forward and backward of a rank's stage.

    (worker)    ``warm_up(script)`` with the environment of a rank, but for what names its peers
    (a session) is made inside: joins nothing, and has nobody beside it (`swift_ft.train.rehearsal`)
    (it)        loads the newest checkpoint, computes one step from logged tensors, and raises `Reinitialize`
    (here)      the same once more. If the script can begin a second time, computes the same gradients, and leaves
                nothing behind that would be in its way, the spare is warm
    (worker)    waits for its rank, and runs the script from the beginning

What is kept are kernels, allocators, what autotuning has found, and modules that are imported. A spare that is not as
it was is not used.
"""

import importlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

from swift_ft import reinitialization
from swift_ft.text import one_line


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
    """From the script's first line to `session.run`, the first time."""
    step_seconds: float = 0.0
    """One forward and backward, with what was read for it, the first time."""
    again_script_seconds: float = 0.0
    """The same of the second time."""
    again_step_seconds: float = 0.0


@dataclass(kw_only=True, slots=True)
class Rehearsed:
    """What a rehearsal has found."""

    steps: int = 0
    """So many were compared."""
    difference: str = ""
    """The first one; empty: there is none."""
    why_not: str = ""
    """One line; empty: it was done."""
    passing: bool = False
    """The job was in the way: another time it may go well."""


def _goes_on(_why: str) -> None:
    """A warm-up waits as long as its script does."""


class OneRun:
    """One run of the script. Filled in by its session."""

    def __init__(
        self,
        version: int | None,
        *,
        rehearses: bool = False,
        gives_up: Callable[[str], None] = _goes_on,
    ) -> None:
        self.version = version
        """The checkpoint to begin from; None: the newest."""
        self.rehearses = rehearses
        self.gives_up = gives_up
        """Ends the process, from any of its threads, and says why."""
        self.steps, self.difference = 0, ""
        """As in `Rehearsed`."""
        self.script_seconds = 0.0
        self.step_seconds = 0.0
        self.gradients = b""
        """A digest of them."""
        self.models: list[weakref.ref[Any]] = []
        self.moved: Callable[[Exception], bool] = _has_not_moved
        """The job has moved on since the session was made, which explains the error."""


def _has_not_moved(_error: Exception) -> bool:
    return False


class _Process:
    """This process's."""

    def __init__(self) -> None:
        self.under_way: OneRun | None = None
        self.began = 0.0
        self.waited = 0.0


_process = _Process()


def is_warming_up() -> bool:
    """Whether this process runs the script and is no rank: a spare, to be warm (``swift-ft run --warm-up``), or a
    rehearsal. It leaves the script in `session.run`. For what a script should not do twice, or not beside the rank that
    does it: a line to a tracker, a file.
    """
    return _process.under_way is not None


def this_run() -> OneRun:
    """(session, in a warm-up)"""
    assert _process.under_way is not None
    return _process.under_way


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


def warm_up(script: Callable[[], object]) -> Warmed:
    """Runs it twice, each time until its session says that it has come far enough."""
    with suppress(ImportError):  # the script imports torch in any case: its settings are to be put back
        importlib.import_module("swift_ft.state.torch_settings")
    first = OneRun(None)
    warmed = _run(script, first)
    if warmed.why_not:
        return warmed
    again = OneRun(first.version)
    second = _run(script, again)
    if second.why_not:
        warmed.why_not, warmed.passing = f"the second time: {second.why_not}", second.passing
    elif again.gradients != first.gradients:
        warmed.why_not = (
            "the script computes other gradients the second time: modules keep something that it changes"
        )
    else:
        warmed.again_script_seconds = again.script_seconds
        warmed.again_step_seconds = again.step_seconds
    return warmed


def rehearse(script: Callable[[], object], version: int, end: Callable[[Rehearsed], NoReturn]) -> NoReturn:
    """Runs it once, as far as its session takes it; the process is of no use after that, and `end` ends it."""
    run = OneRun(version, rehearses=True, gives_up=lambda why: end(Rehearsed(why_not=why)))
    _process.under_way = run
    reinitialization.begin_warm_up()
    begin_script()
    why_not, passing = _leave(script, run)
    end(Rehearsed(steps=run.steps, difference=run.difference, why_not=why_not, passing=passing))


def _run(script: Callable[[], object], run: OneRun) -> Warmed:
    before, left_before = reinitialization.state(), _Left()
    _process.under_way = run
    reinitialization.begin_warm_up()
    begin_script()
    try:
        why_not, passing = _leave(script, run)
        run.moved = _has_not_moved  # what it was holds the model
        sys.modules["__main__"] = ModuleType("__main__")  # its variables hold the model
        left_before.restore()
        reinitialization.leave()
        reinitialization.restore(before)
        _free_device()
    finally:
        _process.under_way = None
    return Warmed(
        why_not=why_not or left_before.left(run.models),
        passing=passing,
        version=-1 if run.version is None else run.version,
        script_seconds=run.script_seconds,
        step_seconds=run.step_seconds,
    )


def _leave(script: Callable[[], object], run: OneRun) -> tuple[str, bool]:
    """(why it has not come far enough, whether that will pass)."""
    process = os.getpid()
    passing = False
    try:
        script()
    except reinitialization.Reinitialize:
        return "", False
    except SystemExit as end:
        if os.getpid() != process:  # a child of the script's, which has nothing to do here
            os._exit(end.code if isinstance(end.code, int) else bool(end.code))
        why = f"the script has ended with exit code {end.code}"
    except Exception as error:  # noqa: BLE001  (a stranger's script)
        why = f"{type(error).__name__}: {one_line(str(error))}"
        passing = run.moved(error)
    else:
        why = "the script has ended"
    if os.getpid() != process:
        os._exit(1)
    return ("", False) if reinitialization.asked() else (why, passing)


class _Left:
    """What a script may leave in its process, beside what `reinitialization` knows."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._streams = sys.stdout, sys.stderr
        self._hook = sys.excepthook
        self._handlers = list(logging.root.handlers)

    def restore(self) -> None:
        sys.stdout, sys.stderr = self._streams
        sys.excepthook = self._hook
        logging.root.handlers[:] = self._handlers

    def left(self, models: Iterable["weakref.ref[Any]"]) -> str:
        """What would be in the way of the rank; empty: nothing."""
        threads = [t for t in threading.enumerate() if t not in self._threads and not t.daemon]
        if threads:
            return f"the script has left a thread running ({threads[0].name})"
        if "multiprocessing" in sys.modules and sys.modules["multiprocessing"].active_children():
            return "the script has left processes running (workers of a data loader, say)"
        if any(model() is not None for model in models):
            return "the script's model stays in memory when the script is left"
        return ""


def _free_device() -> None:
    """The rank that trains on the same device needs the memory."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        sys.modules["torch"].cuda.empty_cache()
