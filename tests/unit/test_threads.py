"""Threads for calls: they are there before the call is taken, and a call for which there is none is not taken."""

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from swift_ft_services.authorization import LIMITS, Lanes
from swift_ft_services.coordinator.__main__ import until_stopped
from swift_ft_services.threads import Threads
from tests.integration.logserver_world import REPOSITORY
from tests.patience import eventually

CANNOT = "can't start new thread"


def of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


@pytest.fixture
def none_left(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No thread can be started from when it is called."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError(CANNOT)

    return lambda: monkeypatch.setattr(threading.Thread, "start", start)


def test_a_thread_is_there_before_the_work_and_is_used_again() -> None:
    threads = Threads(2, "some", ahead=1)
    for _ in range(3):
        assert threads.ready()
        assert threads.submit(threading.current_thread).result().name == "some"
        eventually(threads.ready)
    assert len(of("some")) == 1


def test_work_for_which_no_thread_can_be_started_is_not_wanted(none_left: Callable[[], None]) -> None:
    threads = Threads(2, "short", ahead=1)
    none_left()
    go_on = threading.Event()
    first = threads.submit(go_on.wait)
    assert not threads.ready()
    go_on.set()
    assert first.result()
    eventually(threads.ready)


def test_once_all_are_there_work_waits_for_the_next_one(none_left: Callable[[], None]) -> None:
    threads = Threads(2, "full", ahead=2)
    none_left()
    go_on = threading.Event()
    held = [threads.submit(go_on.wait) for _ in range(2)]
    assert threads.ready()
    waits = threads.submit(lambda: 7)
    assert not waits.done()
    go_on.set()
    assert waits.result() == 7
    assert all(one.result() for one in held)


def test_errors_and_cancelled_work() -> None:
    threads = Threads(1, "failing")
    go_on = threading.Event()
    held = threads.submit(go_on.wait)
    cancelled = threads.submit(lambda: 7)
    assert cancelled.cancel()
    go_on.set()
    assert held.result()
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result()
    assert threads.submit(lambda: 7).result() == 7


def test_they_end_with_their_pool_or_when_it_is_shut_down() -> None:
    threads, others = Threads(3, "dropped", ahead=3), Threads(3, "ended", ahead=3)
    last = others.submit(lambda: 7)
    others.shutdown()
    assert last.result() == 7
    del threads
    gc.collect()
    eventually(lambda: not of("dropped") and not of("ended"))


def test_each_lane_has_threads_before_the_first_call_and_takes_none_without_one(
    none_left: Callable[[], None],
) -> None:
    lanes = Lanes()
    none_left()
    for name in LIMITS:
        threads = lanes.lanes[name].threads
        go_on = threading.Event()
        held = []
        while threads.ready():
            held.append(threads.submit(go_on.wait))
        assert len(held) == 4
        go_on.set()
        assert all(one.result() for one in held)


ALONE = """
import gc, threading
from swift_ft_services.authorization import LIMITS
from tests.patience import eventually
from tests.unit.log.service import InProcess

before = threading.active_count()
with InProcess() as server:
    assert threading.active_count() > before + 4 * len(LIMITS)
del server
gc.collect()
eventually(lambda: threading.active_count() == before)
"""
"""In a process of its own: what other tests have left starts threads and ends them."""


def test_all_threads_of_a_log_server_end_with_it() -> None:
    subprocess.run([sys.executable, "-c", ALONE], cwd=REPOSITORY, timeout=60, check=True)


@pytest.mark.parametrize("what", ["ticks", "server"])
def test_a_coordinator_ends_with_what_ends_its_ticks_or_its_server(what: str) -> None:
    class Part:
        """A driver and a server, one of which fails."""

        def __init__(self) -> None:
            self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def run_ticks(self) -> None:
            await self.fail_if("ticks")

        async def wait_for_termination(self) -> None:
            await self.fail_if("server")

        async def fail_if(self, mine: str) -> None:
            if mine == what:
                raise MemoryError
            await asyncio.Event().wait()

    async def run() -> None:
        part = Part()
        await until_stopped(part, part, asyncio.Event())  # type: ignore[arg-type]

    with pytest.raises(MemoryError):
        asyncio.run(run())
