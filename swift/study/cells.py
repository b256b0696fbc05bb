"""A directory of a study: its settings, and one file for each cell that is done.

settings.json         of the study that the directory belongs to
lock                  held by the study that runs
cells/NAME.json       what became of that cell
run-*/                of the cell under way; removed behind it
study.json study.html the result
"""

import contextlib
import fcntl
import json
import platform
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from swift.bench.output import cpu_model, write_text
from swift.errors import ServiceError, UsageError
from swift.study.settings import Cell, Settings
from swift.words import tell

FORMAT = 2
SPACE_MIB = 64
"""Free before a run: it writes checkpoints and a log."""
Result = dict[str, Any]


class Store:
    """The directory of one study."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def opened(self, settings: Settings) -> Iterator["Store"]:
        """Held for this process alone. UsageError: it cannot be written, is in use, or is of another study."""
        try:
            (self.directory / "cells").mkdir(parents=True, exist_ok=True)
            lock = (self.directory / "lock").open("a")
        except OSError as error:
            raise UsageError(
                f"study: --out {self.directory}: {error.strerror}: name a directory that can be written"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"study: --out {self.directory}: another study runs there") from None
            self._agree(settings)
            yield self

    def _agree(self, settings: Settings) -> None:
        path = self.directory / "settings.json"
        here = environment()
        if not path.exists():
            whole = {"format": FORMAT, **settings.as_json(), "environment": here}
            write_text(path, json.dumps(whole, indent=2) + "\n")
            return
        try:
            stored = json.loads(path.read_text())
            before: dict[str, str] = dict(stored["environment"])
            if stored["format"] != FORMAT:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"study: {path} is damaged, or of another version: name another --out") from None
        if difference := settings.difference(stored):
            raise UsageError(f"study: --out {self.directory} is of another study: {difference}")
        for name, found in here.items():
            if before.get(name) != found:
                was = f"{name} {before.get(name)}"
                raise UsageError(
                    f"study: --out {self.directory} was begun with {was}, here is {found}: begin anew"
                )

    def path(self, cell: Cell) -> Path:
        return self.directory / "cells" / f"{cell.name}.json"

    def read(self, cell: Cell) -> Result | None:
        """None: it is still to be done. So is a cell whose file is damaged, which is told."""
        try:
            text = self.path(cell).read_text()
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            text = ""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(text)
            if found["cell"] == asdict(cell) and found["check"] == check(found["result"]):
                result: Result = found["result"]
                return result
        tell(f"study: {self.path(cell)} is damaged: this cell is done again")
        return None

    def write(self, cell: Cell, result: Result) -> None:
        """ServiceError: no space, for example."""
        whole = {"cell": asdict(cell), "check": check(result), "result": result}
        write_text(self.path(cell), json.dumps(whole, indent=1) + "\n")

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Where the cell under way works. ServiceError: it cannot be made, or there is no space for a run."""
        for left in self.directory.glob("run-*"):
            shutil.rmtree(left, ignore_errors=True)
        # A name of its own: ranks of a study that was killed may still write where they did.
        path = (self.directory / f"run-{secrets.token_hex(4)}").absolute()
        try:
            free = shutil.disk_usage(self.directory).free >> 20
            if free < SPACE_MIB:
                raise ServiceError(
                    f"study: {self.directory}: {free} MiB of space, a run needs {SPACE_MIB} MiB: make space, and start "
                    "the study again: it goes on where it was"
                )
            path.mkdir()
        except OSError as error:
            raise ServiceError(f"study: {path}: {error.strerror}") from None
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def environment() -> dict[str, str]:
    """What bits and times depend on beside the settings. The text of the byte task is that of this Python."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "swift-ft": metadata.version("swift-ft"),
        "processor": cpu_model(),
    }


def check(result: Result) -> int:
    """Of the values, however they are written."""
    return zlib.crc32(json.dumps(result, sort_keys=True).encode())
