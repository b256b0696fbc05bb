"""Fixtures of the fault tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import Server


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
