"""Where the runs of a command lie, how a signal ends them, and how a file appears that was asked for."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from swift.errors import UsageError


class Stopped(BaseException):
    """A signal asked the command to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP; `check` acts on them where it is safe to."""

    def __init__(self) -> None:
        self.signum = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signum = number

    def check(self) -> None:
        """Raises Stopped if one has come."""
        if self.signum:
            raise Stopped(self.signum)


@contextlib.contextmanager
def work_directory(given: Path | None, *, keep: bool, name: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(where the runs lie, a call that keeps it). Without a `given` one it is temporary, and removed at the end unless
    it is kept; `name` is what it belongs to."""
    if given is not None:
        yield given.resolve(), lambda: None
        return
    place = Path(tempfile.mkdtemp(prefix=f"swift-{name}-"))
    kept = keep
    try:

        def keep_it() -> None:
            nonlocal kept
            kept = True

        yield place, keep_it
    finally:
        if kept:
            print(f"everything of this {name} is in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)


def check_file(flag: str, path: Path | None) -> None:
    """Raises UsageError if it cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: give a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def check_directory(flag: str, directory: Path | None, *, empty: bool) -> None:
    """Makes it. Raises UsageError if it cannot be used."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if empty and any(directory.iterdir()):
            raise UsageError(f"{flag} {directory}: not empty; give a new one")
    except OSError as error:
        raise UsageError(f"{flag} {directory}: {error.strerror}") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {directory}: no permission to read and write there")


def replace_file(path: Path, text: str) -> None:
    """The file appears whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.replace(path)
