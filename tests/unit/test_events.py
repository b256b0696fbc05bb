"""The event trace when it cannot be written: nobody who emits is troubled, and what is missing is said."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft import events


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(events.ENV_EVENTS_DIR, str(tmp_path / "events"))
    events.configure("test")
    yield tmp_path / "events"
    events.configure("process")


def shown(directory: Path) -> list[tuple[str, object]]:
    return [(event["event"], event.get("count")) for event in events.read(directory)]


def test_a_directory_that_is_gone_costs_events_and_nothing_else(directory: Path) -> None:
    events.emit("a")
    events.emit("b")
    directory.mkdir()
    events.emit("c")
    events.emit("d")
    assert shown(directory) == [("events_lost", 2), ("c", None), ("d", None)]


def test_a_full_disk_tears_no_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    events.emit("a")
    real = os.write

    def takes_a_part(fd: int, data: bytes) -> int:
        return real(fd, data[:10])

    def takes_nothing(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for write in (takes_a_part, takes_nothing):
        with monkeypatch.context() as full:
            full.setattr(os, "write", write)
            events.emit("b")
    assert shown(directory) == [("a", None)]
    events.emit("c")
    assert shown(directory) == [("a", None), ("events_lost", 2), ("c", None)]
