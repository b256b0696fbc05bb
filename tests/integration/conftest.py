"""Fixtures of the integration tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.coordinator_world import Job
from tests.integration.drill_world import Twins
from tests.integration.forked import Forks
from tests.integration.launch_world import Launch, ScriptedCoordinator, Start


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Twins:
    """In one directory for all processes that run the tests."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "twins"
    place.mkdir(exist_ok=True)
    return Twins(place, forks)


@pytest.fixture
def coordinator() -> Iterator[ScriptedCoordinator]:
    """It knows no job, and says what the test has it say."""
    scripted = ScriptedCoordinator()
    yield scripted
    scripted.close()


@pytest.fixture
def start(tmp_path: Path, coordinator: ScriptedCoordinator) -> Iterator[Start]:
    """Starts launchers, and ends what a failed test has left of them."""
    launches = []

    def start(*flags: str, directory: Path = tmp_path, **options: object) -> Launch:
        directory.mkdir(exist_ok=True)
        launches.append(Launch(directory, coordinator.address, *flags, **options))  # type: ignore[arg-type]
        return launches[-1]

    yield start
    for launch in launches:
        launch.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()
