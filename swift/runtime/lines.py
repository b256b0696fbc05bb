"""A line for each step, exactly once, through failures: what a trainer reports of its steps.

A file of JSON lines for each rank, in the order of the steps. What is given before the update is in the file before
this rank votes for it: nobody goes on to the next step while it is not. So a rank that dies leaves either no line, and
does the step again, or the line. A step that is done again finds its line and leaves it as it is; if it is another one
(the job is not exact), what was written from there on is void, and is written anew.

    (trainer) ``add`` … (vote) ``write`` → (the step is done) ``end``; (it is dropped) ``forget``
"""

import json
import math
import os
import sys
from array import array
from bisect import bisect_left
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from swift.errors import UsageError

Value = float | int | str | bool | None


class Lines:
    """One rank's file. It is made with the first line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._are_there = path.exists()
        # Of each line: a job has many steps, and one that is done again finds its line at once.
        self._steps, self._places = array("q"), array("q")
        self._end = 0
        self._values: dict[str, Value] = {}
        self._said = False

    @property
    def in_use(self) -> bool:
        """Steps of this job have lines, as far as this rank knows."""
        return bool(self._values) or self._file is not None or self._are_there

    def add(self, values: dict[str, object]) -> None:
        """Raises UsageError for what is no number, string or None."""
        self._values |= {name: _plain(name, value) for name, value in values.items()}

    def forget(self) -> None:
        self._values = {}

    def write(self, step: int) -> None:
        """What was given in this step. If the file cannot be written that is said, once: the job is worth more."""
        if not self._values:
            return
        try:
            self._put(self._opened(), step)
        except OSError as error:
            if not self._said:
                self._said = True
                with suppress(OSError, ValueError):
                    print(
                        f"swift: {self._path} cannot be written ({error.strerror}): it lacks lines from step {step} on",
                        file=sys.stderr,
                    )

    def end(self, step: int, *, lasts: bool) -> None:
        """The step is done. `lasts`: the lines so far outlive the machine."""
        self.write(step)
        self.forget()
        if lasts and self._file is not None:
            os.fdatasync(self._file.fileno())

    def cut(self, step: int) -> None:
        """The run has ended before this step: one that was begun has left no line."""
        if self._file is not None or self._path.exists():
            with suppress(OSError):
                self._drop_from(self._opened(), bisect_left(self._steps, step))

    def close(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file.fileno())
            self._file.close()
            self._file = None

    def _put(self, file: BinaryIO, step: int) -> None:
        number = bisect_left(self._steps, step)
        if number < len(self._steps):
            if self._steps[number] == step and self._values.items() <= self._line(file, number).items():
                return  # and perhaps what will be given behind the update
            self._drop_from(file, number)
        line = json.dumps({"step": step, **self._values}).encode() + b"\n"
        os.pwrite(file.fileno(), line, self._end)
        self._note(step, len(line))

    def _drop_from(self, file: BinaryIO, number: int) -> None:
        if number < len(self._steps):
            self._end = self._places[number]
            del self._steps[number:], self._places[number:]
            file.truncate(self._end)

    def _line(self, file: BinaryIO, number: int) -> dict[str, Value]:
        at = self._places[number]
        end = self._places[number + 1] if number + 1 < len(self._places) else self._end
        values: dict[str, Value] = json.loads(os.pread(file.fileno(), end - at, at))
        return values

    def _note(self, step: int, size: int) -> None:
        self._steps.append(step)
        self._places.append(self._end)
        self._end += size

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "rb+", buffering=0)
            for line in self._file.read().splitlines(keepends=True):
                if line.endswith(b"\n"):  # else its writer died in it
                    self._note(json.loads(line)["step"], len(line))
            self._file.truncate(self._end)
        return self._file


def _plain(name: str, value: object) -> Value:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:  # a tensor or an array of one number
        value = item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # JSON has no word for it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"session.log({name}=...) was given a {type(value).__name__}; give a number or a string")
