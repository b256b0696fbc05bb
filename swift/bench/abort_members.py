"""Telling members (`abort_ranks`) what to do: one line to each of them."""

import json
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_S = 120.0


class Told:
    """A member. `ask` returns its answer."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._lines = line.makefile("rw")

    def ask(self, do: str, **arguments: Any) -> Any:
        self.tell(do, **arguments)
        return json.loads(self._lines.readline())

    def tell(self, do: str, **arguments: Any) -> None:
        self._lines.write(json.dumps({"do": do, **arguments}) + "\n")
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        self._line.close()


class Listener:
    """Where members come to be told. A context manager."""

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="swift-members-")
        self.path = str(Path(self._place.name, "line"))
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.settimeout(START_S)
        self._listening.bind(self.path)
        self._listening.listen()
        self._told: list[Told] = []

    def start(self, begin: Callable[[str], Any]) -> Told:
        """The member that ``begin(path)`` starts. Raises TimeoutError if it does not come."""
        begin(self.path)
        line, _ = self._listening.accept()
        self._told.append(Told(line))
        return self._told[-1]

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        for told in self._told:
            told.close()
        self._listening.close()
        self._place.cleanup()
