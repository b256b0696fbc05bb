"""Fixtures of the integration tests."""

import os

import pytest

from tests.integration.drill_world import Twins
from tests.integration.forked import Forks


@pytest.fixture(scope="session")
def twins(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Twins:
    """In one directory for all processes that run the tests."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "twins"
    place.mkdir(exist_ok=True)
    return Twins(place, forks)
