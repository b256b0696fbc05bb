"""Tests that are coroutines run here, each on a loop of its own; and what their drivers have beside them."""

import asyncio
import inspect
from collections.abc import Awaitable

import pytest

from swift_ft_services.coordinator.driver import Driver
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import FakeClock, FakeLogs, running, stopping_drivers


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A fixture that is to be awaited is awaited on the test's loop. All drivers are stopped after it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        for name, value in given.items():
            if inspect.isawaitable(value):
                given[name] = await value
        await pyfuncitem.obj(**given)

    asyncio.run(stopping_drivers(run()))
    return True


@pytest.fixture
def logs() -> FakeLogs:
    return FakeLogs()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def driver(logs: FakeLogs, store: MemoryStore) -> Awaitable[Driver]:
    """Its job "j" runs."""
    return running(logs, store)
