"""Waiting for what another thread or process does."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


def eventually(
    look: Callable[[], Found | None], what: str | Callable[[], object] = "it", timeout_s: float = 20.0
) -> Found:
    """What `look` finds. `what` is said if it finds nothing in that time."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what() if callable(what) else what}")
        time.sleep(0.005)
    return found


def served_at(process: "subprocess.Popen[Any]", file: Path, said: Callable[[], object] = str) -> str:
    """The address that a service writes into this file once it serves."""

    def there() -> bool:
        assert process.poll() is None, said()
        return file.exists()

    eventually(there, said, 60.0)
    return file.read_text().strip()
