"""A server for each test that asks for one."""

from collections.abc import Iterator

import pytest

from tests.unit.log.service import InProcess


@pytest.fixture
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running
