"""Warm-up: before it is needed, a spare runs the training script up to one forward and backward of a rank's stage.

    (worker)    ``warm_up(script)`` with a rank's environment, except for the variables that name its peers
    (a session) is created inside: joins no job, and has no peers (`swift_ft.train.rehearsal`)
    (it)        loads the newest checkpoint, computes one step from logged tensors, and raises `Reinitialize`
    (here)      the same once more. If the script can begin a second time, computes the same gradients, and leaves
                no thread, process or model behind, the spare is warm
    (worker)    waits for its rank, and runs the script from the beginning

It keeps kernels, allocators, autotuning results, and imported modules. A spare whose state has changed otherwise is
not used.
"""

import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from swift_ft import reinitialization
from swift_ft.text import one_line


@dataclass(slots=True)
class OneRun:
    """One run of the script, and its result. Its session sets `version`, if it is None, and the attributes from `steps`
    on."""

    version: int | None
    """Version of the checkpoint to begin from; None: the newest."""
    rehearses: bool = False
    gives_up: Callable[[str], None] = lambda _why: None
    """Reports the reason and ends the process; called from any of its threads."""
    why_not: str = ""
    """Why the script has not come far enough, in one line; empty: it has."""
    passing: bool = False
    """True if the job was the reason (a recovery, a checkpoint that was replaced meanwhile): a retry may succeed."""
    steps: int = 0
    """(a rehearsal) Number of steps that were compared."""
    difference: str = ""
    """(a rehearsal) The first difference; empty: none."""
    gradients: bytes = b""
    """Digest of the gradients."""
    models: list[weakref.ref[Any]] = field(default_factory=list)
    moved: Callable[[Exception], bool] = lambda _error: False
    """Returns whether the job has moved on since the session was created, which explains the error."""


class _Process:
    def __init__(self) -> None:
        self.under_way: OneRun | None = None
        self.said: tuple[int, int] | None = None
        """(a rank) The pipe to the launcher: descriptor and inode."""


_process = _Process()


def is_warming_up() -> bool:
    """Returns whether this process runs the script without being a rank: as a spare that warms up (``swift-ft run
    --warm-up``), or as a rehearsal. It leaves the script in `session.run`. Use it for actions that a script should not
    repeat, or not do while the rank does them: a line to a tracker, a file.
    """
    return _process.under_way is not None


def this_run() -> OneRun:
    assert _process.under_way is not None
    return _process.under_way


def begin_script(said_fd: int) -> None:
    """(worker) Called just before the script's first line. `said_fd`: the rank's pipe to the launcher."""
    _process.said = said_fd, os.fstat(said_fd).st_ino


def begin_session() -> None:
    """(a session or communicator, as it begins) Tells the launcher that this script recovers. Without that word all its
    ranks are restarted after a loss."""
    said, _process.said = _process.said, None
    # A script may have closed the descriptor, and opened another file under its number.
    with suppress(OSError):
        if said is not None and os.fstat(said[0]).st_ino == said[1]:
            os.write(said[0], b"s")


def warm_up(script: Callable[[], object]) -> OneRun:
    """Runs the script twice, each time until its session has come far enough. Returns the first run, with the result of
    both: without a reason in `why_not` the spare is warm."""
    with suppress(ImportError):  # the script imports torch anyway: its settings must be restored
        importlib.import_module("swift_ft.state.torch_settings")
    first = OneRun(None)
    _run(script, first)
    if first.why_not:
        return first
    again = OneRun(first.version)
    _run(script, again)
    if again.why_not:
        first.why_not, first.passing = f"the second time: {again.why_not}", again.passing
    elif again.gradients != first.gradients:
        first.why_not = (
            "the script computes other gradients the second time: modules keep something that it changes"
        )
    return first


def rehearse(script: Callable[[], object], version: int, end: Callable[[OneRun], NoReturn]) -> NoReturn:
    """Runs the script once, as far as its session takes it. Then `end` ends the process, which cannot be used any
    more."""

    def give_up(why: str) -> NoReturn:
        run.why_not = why
        end(run)

    run = _process.under_way = OneRun(version, rehearses=True, gives_up=give_up)
    reinitialization.begin_warm_up()
    _leave(script, run)
    end(run)


def _run(script: Callable[[], object], run: OneRun) -> None:
    before, left_before = reinitialization.state(), _Left()
    _process.under_way = run
    reinitialization.begin_warm_up()
    try:
        _leave(script, run)
        run.moved = lambda _error: False  # the old function refers to the model
        sys.modules["__main__"] = ModuleType("__main__")  # its variables refer to the model
        left_before.restore()
        reinitialization.leave()
        reinitialization.restore(before)
        _free_device()
    finally:
        _process.under_way = None
    run.why_not = run.why_not or left_before.left(run.models)


def _leave(script: Callable[[], object], run: OneRun) -> None:
    """Runs the script. Sets why it has not come far enough, and whether a retry may succeed."""
    process = os.getpid()
    why, passing = "the script has ended", False
    try:
        script()
    except reinitialization.Reinitialize:
        return
    except SystemExit as end:
        if os.getpid() != process:  # a child forked by the script must not continue here
            os._exit(end.code if isinstance(end.code, int) else bool(end.code))
        why = f"the script has ended with exit code {end.code}"
    except Exception as error:  # noqa: BLE001  (a stranger's script)
        why = f"{type(error).__name__}: {one_line(str(error))}"
        passing = run.moved(error)
    if os.getpid() != process:
        os._exit(1)
    if not reinitialization.asked():
        run.why_not, run.passing = why, passing


class _Left:
    """State that a script may leave in its process, in addition to that restored by `reinitialization`."""

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
        """Returns what the script has left that would disturb the rank; empty if there is none."""
        threads = [t for t in threading.enumerate() if t not in self._threads and not t.daemon]
        if threads:
            return f"the script has left a thread running ({threads[0].name})"
        if "multiprocessing" in sys.modules and sys.modules["multiprocessing"].active_children():
            return "the script has left processes running (workers of a data loader, say)"
        if any(model() is not None for model in models):
            return "the script's model stays in memory when the script is left"
        return ""


def _free_device() -> None:
    """Frees cached device memory, which the rank on the same device needs."""
    if "torch" not in sys.modules:
        return
    from swift_ft.device import accelerator_in_use  # loads torch

    if (accelerator := accelerator_in_use()) is not None:
        accelerator.free_cache()
