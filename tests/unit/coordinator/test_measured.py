"""What ranks have measured, in the coordinator: the newest of each rank, from its holder alone, and never durable."""

from typing import Any, cast

import grpc
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import Driver, NoSuchJob
from swift_ft_services.coordinator.service import Context, Servicer
from tests.memory_store import MemoryStore
from tests.unit.control.test_measured import ONE
from tests.unit.coordinator.driver_world import (
    Aborted,
    Caller,
    FakeLogs,
    Taker,
    driver_of,
    lose_rank_0,
    run_to_running,
    sender,
)


def measure(measured: pb.RankMeasured) -> pb.MeasureRequest:
    return pb.MeasureRequest(**sender(), measured=measured)


async def test_the_newest_of_each_rank(logs: FakeLogs, store: MemoryStore) -> None:
    driver = await driver_of(logs, store, ("l0",))
    with pytest.raises(NoSuchJob):
        driver.measurements("j")
    await run_to_running(driver)
    assert list(driver.measurements("j").ranks) == []
    revision = (await driver.status("j")).view.revision
    await driver.apply("j", measure(pb.RankMeasured(steps=1)))
    await driver.apply("j", measure(ONE))
    reply = driver.measurements("j")
    assert [(said.rank, said.measured) for said in reply.ranks] == [(0, ONE)]
    assert reply.world_size == 1
    assert (await driver.status("j")).view.revision == revision  # nobody watches for it
    driver.stop()
    again = await driver_of(logs, store, ("l0",))
    await again.start()
    assert list(again.measurements("j").ranks) == []


async def test_of_a_dead_rank_until_its_successor_has_measured(driver: Driver) -> None:
    """A plan for its stage is made when it is dead; and nobody else may speak for it."""
    await driver.apply("j", measure(ONE))
    await lose_rank_0(driver)
    with pytest.raises(Refusal, match="does not hold rank 0"):
        await driver.apply("j", measure(ONE))
    assert len(driver.measurements("j").ranks) == 1


async def test_what_cannot_be_does_not_come_in() -> None:
    taker, refused = Taker(), list[str]()
    servicer = Servicer(cast("Driver", taker), refused.append)
    context = cast("Context", Caller())
    me: dict[str, Any] = {"job": "j", "rank": 2, "incarnation": "i"}
    request = pb.MeasureRequest(**me, measured=pb.RankMeasured(steps=1, step_s=float("nan")))
    with pytest.raises(Aborted) as aborted:
        await servicer.Measure(request, context)
    assert aborted.value.args == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "a measurement: step_s is nan: must be from 0 to 1e+09",
    )
    assert (taker.commands, refused) == ([], ["invalid"])
    request.measured.CopyFrom(ONE)
    await servicer.Measure(request, context)
    assert taker.commands == [request]
