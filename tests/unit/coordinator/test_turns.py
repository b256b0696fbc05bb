"""Turns of the driver: what comes together is written together, and answered once it is durable."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import driver as published_module
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import SOON_S, Driver
from swift_ft_services.coordinator.job_record import ROOT, JobRow, State
from swift_ft_services.coordinator.views import view_of
from tests.memory_store import MemoryStore
from tests.unit.coordinator import driver_world
from tests.unit.coordinator.driver_world import FakeClock, FakeLogs, driver_of, view_with

RANKS = 40


class SlowStore(MemoryStore):
    """It writes while `gate` is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.commits: list[Mapping[str, str]] = []

    async def commit(self, puts: Mapping[str, str], deletes: Collection[str] = ()) -> None:
        self.commits.append(puts)
        await self.gate.wait()
        await super().commit(puts, deletes)


def sender(rank: int) -> dict[str, Any]:
    return {"rank": rank, "incarnation": f"i{rank}"}


def join(rank: int) -> pb.JoinRequest:
    return driver_world.join(rank, f"i{rank}", pid=rank, world_size=RANKS)


def ready(rank: int) -> pb.ReadyRequest:
    return pb.ReadyRequest(**sender(rank), generation=1, version=0, stages=(rank,), num_stages=RANKS)


async def formed(driver: Driver) -> None:
    await asyncio.gather(*(driver.join("j", join(rank)) for rank in range(RANKS)))


async def test_what_comes_together_is_one_transaction(logs: FakeLogs) -> None:
    store = SlowStore()
    driver = await driver_of(logs, store, ())
    await formed(driver)
    assert (
        len(store.commits) <= 4
    )  # the first Join is a transition, and so a turn; the logs that there are not
    store.commits.clear()
    await asyncio.gather(*(driver.apply("j", ready(rank)) for rank in range(RANKS)))
    assert len(store.commits) == 1
    (commit,) = store.commits
    changed = {"ready", "stages", "stage_shards", "num_stages", "state"}
    assert {key.split("/")[2] for key in commit if key.startswith(ROOT)} == {"row", *changed}
    assert [key for key in commit if not key.startswith(ROOT)] == ["history/j/000000000001/RUNNING"]
    assert driver._jobs["j"].row.state is State.RUNNING


async def test_nothing_is_answered_or_shown_before_it_is_durable(logs: FakeLogs) -> None:
    store = SlowStore()
    driver = await driver_of(logs, store, ())
    await formed(driver)
    shown, _ = driver._published._views["j"], store.gate.clear()
    asked = [
        asyncio.create_task(driver.apply("j", ready(0))),
        asyncio.create_task(driver.apply("j", pb.HeartbeatRequest(rank=1, incarnation="x", version=0))),
    ]
    await asyncio.sleep(0.02)
    seen = driver.status("j"), driver.jobs(lambda _: True), driver.read_jobs(len)
    asks = [asyncio.create_task(one) for one in seen]
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in (*asked, *asks))
    assert driver._published._views["j"] is shown
    store.gate.set()
    await asked[0]
    with pytest.raises(Refusal):  # a refusal is one of that moment as well
        await asked[1]
    assert (await asks[0]).view.revision > shown.revision
    await asyncio.gather(*asks)


async def test_heartbeats_and_ticks_write_nothing(logs: FakeLogs) -> None:
    store = SlowStore()
    driver = await driver_of(logs, store, ())
    await formed(driver)
    await asyncio.gather(*(driver.apply("j", ready(rank)) for rank in range(RANKS)))
    store.commits.clear()
    for version in range(3):
        beats = [pb.HeartbeatRequest(**sender(rank), version=version) for rank in range(RANKS)]
        await asyncio.gather(*(driver.apply("j", beat) for beat in beats), driver.tick())
    assert store.commits == []


async def test_a_turn_ends_with_a_transition(logs: FakeLogs) -> None:
    """So each state is durable, and told of, by itself."""
    store = SlowStore()
    entered: list[State] = []

    def after_durable(_row: object, persist: m.Persist) -> None:
        if persist.entered is not None:
            entered.append(persist.entered)

    driver = await driver_of(logs, store, (), after_durable=after_durable)
    await formed(driver)
    store.commits.clear()
    gone = [pb.ExitRequest(rank=rank, incarnation=f"i{rank}", pid=rank, exit_code=-9) for rank in (3, 5)]
    await asyncio.gather(
        *(driver.apply("j", ready(rank)) for rank in range(RANKS)), *(driver.apply("j", one) for one in gone)
    )
    assert entered[:2] == [State.FORMING, State.RUNNING]
    assert entered[2] is State.FENCING
    assert driver._jobs["j"].row.generation == 3
    assert len(store.commits) >= len(entered) - 1


async def test_a_heartbeat_that_has_come_counts_before_its_lease_is_looked_at(
    logs: FakeLogs, clock: FakeClock
) -> None:
    store = SlowStore()
    driver = await driver_of(logs, store, (), clock=clock)
    await formed(driver)
    for _ in range(4):  # nobody is heard, and the process is not stalled
        clock.now += 0.2 * driver.timing.lease_s
        await driver.tick()
    store.gate.clear()
    writes = asyncio.create_task(driver.apply("j", ready(0)))
    await asyncio.sleep(0.02)
    beats = [
        asyncio.create_task(driver.apply("j", pb.HeartbeatRequest(**sender(rank), version=0)))
        for rank in range(RANKS)
    ]
    await asyncio.sleep(0)
    clock.now += 0.3 * driver.timing.lease_s
    looks = asyncio.create_task(driver.tick())
    store.gate.set()
    await asyncio.gather(writes, looks, *beats)
    assert driver._jobs["j"].row.generation == 1


@pytest.mark.parametrize("caught_up", [True, False])
async def test_a_lease_runs_while_what_has_come_is_read(
    caught_up: bool, logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await driver_of(logs, store, (), clock=clock, caught_up=lambda: caught_up)
    await formed(driver)
    for _ in range(2 * int(driver.timing.lease_s / driver.timing.tick_s)):
        clock.now += driver.timing.tick_s
        await driver.tick()
    assert driver._jobs["j"].row.generation == (2 if caught_up else 1)


async def test_joins_one_after_the_other_are_one_view(
    logs: FakeLogs, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(row: JobRow) -> pb.View:
        made.append(row.job)
        return view_of(row)

    monkeypatch.setattr(published_module, "view_of", counted)
    monkeypatch.setattr(published_module, "SOON_S", 0.5)  # so many commits take long on a busy machine
    driver = await driver_of(logs, store, ())
    for rank in range(RANKS):
        assert await driver.join("j", join(rank)) == 1
    assert len(made) <= 2
    await view_with(driver, lambda view: len(view.members) == RANKS)
    assert len(made) <= 3


async def test_what_is_shown_late_is_durable(logs: FakeLogs) -> None:
    """The moment at which it is shown is while the store writes something else."""
    store = SlowStore()
    driver = await driver_of(logs, store, ())
    await driver.join("j", join(0))
    await driver.join("j", join(1))
    store.gate.clear()
    late = asyncio.create_task(driver.join("j", join(2)))
    await asyncio.sleep(3 * SOON_S)
    assert len(driver._published._views["j"].members) < 3
    store.gate.set()
    await late
    await view_with(driver, lambda view: len(view.members) == 3)
