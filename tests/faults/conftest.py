"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft.log import reader
from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import Server
from tests.integration.conftest import job
from tests.shared_bodies import SHARED

__all__ = ["job"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Faults of the log are met in both ways: bodies are sent, or read in their writers' memory and in the server's
    files."""
    if metafunc.module.__name__.rpartition(".")[2] in {
        "test_stream",
        "test_bytes",
        "test_disk",
        "test_threads",
    }:
        metafunc.parametrize("bodies", ["sent", "shared"], indirect=True)


@pytest.fixture(autouse=True)
def bodies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    way = getattr(request, "param", "")
    if way == "shared":
        monkeypatch.setenv(*next(iter(SHARED.items())))
    elif way == "sent":
        monkeypatch.setattr(reader, "ask_for_files", lambda *_: None)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def faults(library: Path, tmp_path: Path) -> Faults:
    return Faults(library, tmp_path / "control")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Small segments, so that a test has several; generation 1 is granted."""
    with Server(tmp_path / "log", "--segment-bytes", "200000") as running:
        running.fence(1)
        yield running
