"""A driver, log servers in memory, a clock that a test moves, and a job of one rank."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb.log_pb2 import JobStatus
from swift_ft.errors import UnknownJob
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.job_record import LogServer
from swift_ft_services.coordinator.log_calls import LogServers
from swift_ft_services.coordinator.store import MetadataStore
from swift_ft_services.coordinator.timeouts import Timing

PATIENCE_S = 20.0
SERVERS = ("l0", "l1")
_drivers: list[Driver] = []
DEATH = pb.ExitRequest(rank=0, incarnation="a", pid=1, exit_code=-9)


class FakeLogs(LogServers):
    """Log servers in memory. `troubles[address]` is raised while it is there."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.troubles: dict[str, Exception] = {}
        self.spaces: dict[str, JobStatus | None] = {}
        self.forgotten: set[str] = set()
        """Those that do not know the job; a fence makes it known."""
        self.cold: dict[str, str] = {}
        """Address -> where it moves records."""
        self.moved: dict[str, list[StreamSummary]] = {}
        """What has been moved there."""
        self.held: dict[str, list[StreamSummary]] = {}
        self.gate = threading.Event()
        self.gate.set()

    def _called(self, *call: object) -> None:
        self.calls.append(call)
        self.gate.wait(10)
        trouble = self.troubles.get(str(call[1]))
        if trouble is not None:
            raise trouble

    def fence(self, address: str, job: str, generation: int, held: bool = False) -> str:
        if held and address in self.forgotten:
            self._called("not fenced", address, job, generation)
            raise UnknownJob("no such job")
        self._called("fence", address, job, generation)
        self.forgotten.discard(address)
        return self.cold.get(address, "")

    def trim(self, address: str, job: str, generation: int, below_step: int, cold: str = "") -> None:
        self._called("trim", address, job, below_step, *filter(None, [cold]))

    def reset(self, address: str, job: str, generation: int, number: int) -> str:
        if address in self.forgotten:
            raise UnknownJob("no such job")
        self._called("reset", address, job, generation, number)
        return self.cold.get(address, "")

    def space(self, address: str, job: str, generation: int) -> JobStatus | None:
        self._called("space", address, job, generation)
        if address in self.forgotten:
            return None
        return self.spaces.get(address, JobStatus())

    def inventory(self, address: str, job: str, cold: str = "") -> list[StreamSummary]:
        self._called("inventory", address, job, *filter(None, [cold]))
        return self.moved.get(cold, []) if cold else self.held.get(address, [])


class Aborted(Exception):
    """A call was refused: status code and text."""


class Caller:
    """The context of a call."""

    async def abort(self, code: grpc.StatusCode, words: str, *_trailers: object) -> NoReturn:
        raise Aborted(code, words)


class Taker:
    """A driver that keeps what it is given."""

    def __init__(self) -> None:
        self.commands: list[m.Command] = []

    async def apply(self, _job: str, command: m.Command) -> None:
        self.commands.append(command)


class FakeClock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def driver_of(
    logs: FakeLogs,
    store: MetadataStore,
    servers: tuple[str, ...] = SERVERS,
    copies: int = 1,
    timing: Timing = Timing(),  # noqa: B008  (it is immutable)
    **more: Any,
) -> Driver:
    named = [LogServer(address=address, host=address) for address in servers]
    driver = Driver(store, logs, timing, named, copies=copies, **more)
    _drivers.append(driver)
    await driver.start()
    return driver


def join(
    rank: int = 0, incarnation: str = "a", pid: int = 1, host: str = "h", world_size: int = 1, **said: Any
) -> pb.JoinRequest:
    member = pb.Member(rank=rank, incarnation=incarnation, pid=pid, host=host)
    return pb.JoinRequest(member=member, world_size=world_size, **said)


def sender(incarnation: str = "a") -> dict[str, Any]:
    return {"rank": 0, "incarnation": incarnation}


async def until(condition: Callable[[], object]) -> None:
    """What other threads are to do: log servers are asked in threads."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


async def view_with(driver: Driver, wanted: Callable[[pb.View], bool]) -> pb.View:
    async with asyncio.timeout(PATIENCE_S), aclosing(driver.views("j")) as views:
        async for view in views:
            if wanted(view):
                return view
    raise AssertionError("no such view")


async def run_to_running(driver: Driver) -> None:
    await driver.join("j", join())
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=0, generation=0))
    await driver.apply("j", pb.ReadyRequest(**sender(), generation=1, version=0, stages=(0,), num_stages=1))
    await view_with(driver, lambda view: view.state == pb.RUNNING)


async def lose_rank_0(driver: Driver) -> None:
    """Another process joins in its place."""
    await driver.apply("j", DEATH)
    await driver.join("j", join(incarnation="b"))


async def running(logs: FakeLogs, store: MetadataStore, *servers: str, **options: Any) -> Driver:
    """A driver whose job "j" runs. Options as of `driver_of`."""
    driver = await driver_of(logs, store, servers or SERVERS, **options)
    await run_to_running(driver)
    return driver


async def stopping_drivers(test: Awaitable[None]) -> None:
    """All that the test has made are stopped after it."""
    try:
        await test
    finally:
        while _drivers:
            _drivers.pop().stop()
