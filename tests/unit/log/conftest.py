"""A server for each test that asks for one; and the end of what was opened on a disk."""

from collections.abc import Iterator

import pytest

from tests.unit.log.service import InProcess
from tests.unit.log.storages import crash_all


@pytest.fixture
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    crash_all()
