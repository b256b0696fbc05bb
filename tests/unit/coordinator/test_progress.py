"""How far a replay is: from a heartbeat to the status and the metrics, while it runs, and no longer."""

import math
from collections.abc import Awaitable
from typing import cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import Plan, Prediction
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import State
from swift_ft_services.coordinator.metrics import CoordinatorMetrics
from swift_ft_services.coordinator.planning import plan_fields
from swift_ft_services.coordinator.service import Context, Servicer
from swift_ft_services.coordinator.views import status_of, view_of
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import FakeLogs, running, sender
from tests.unit.coordinator.rows import copy_of

HALF_WAY = pb.ReplayProgress(version=7, target=15, seconds_left=3.5)


def beat(job: Job, replay: pb.ReplayProgress | None) -> None:
    job.step(pb.HeartbeatRequest(**sender(), version=7, replay=replay), 1.0)


async def recovering(logs: FakeLogs, store: MemoryStore) -> Job:
    driver = await running(logs, store)
    job = await driver.apply("j", pb.HeartbeatRequest(**sender(), version=7))
    driver.stop()
    job.row.state = State.RECOVERING
    return job


@pytest.fixture
def job(logs: FakeLogs, store: MemoryStore) -> Awaitable[Job]:
    return recovering(logs, store)


async def test_a_rank_that_has_finished_is_at_the_last_version(job: Job) -> None:
    """The heartbeat that would say so never came: `swift-ft status` showed the one before, for good."""
    job.row.finished[0] = 12
    assert [rank.version for rank in status_of(job, 1.0).ranks] == [12]


async def test_in_the_status_while_it_replays(job: Job) -> None:
    assert not status_of(job, 1.0).ranks[0].HasField("replay")
    beat(job, HALF_WAY)
    (rank,) = status_of(job, 1.0).ranks
    assert (rank.replay.version, rank.replay.target, rank.replay.seconds_left) == (7, 15, 3.5)
    revision = job.row.revision
    beat(job, pb.ReplayProgress(version=8, target=15, seconds_left=None))
    assert not status_of(job, 1.0).ranks[0].replay.HasField("seconds_left")
    assert job.row.revision == revision  # nobody watches for it, and nothing is written
    beat(job, None)
    assert not status_of(job, 1.0).ranks[0].HasField("replay")


async def test_gone_with_the_recovery(job: Job) -> None:
    beat(job, HALF_WAY)
    job.become_fencing({}, "another rank is gone")
    assert not status_of(job, 1.0).ranks[0].HasField("replay")
    beat(job, HALF_WAY)  # said before it had heard of that
    assert not status_of(job, 1.0).ranks[0].HasField("replay")


async def test_in_the_metrics(job: Job) -> None:
    metrics = CoordinatorMetrics()
    try:
        for replay, steps, seconds in (
            (None, 0, {("j",): 0.0}),
            (HALF_WAY, 8, {("j",): 3.5}),
            (pb.ReplayProgress(version=5, target=15, seconds_left=None), 10, {}),
        ):
            beat(job, replay)
            samples = metrics.samples([job])
            assert samples["swift_coordinator_replay_left_steps"] == {("j",): steps}
            assert samples["swift_coordinator_replay_left_seconds"] == seconds
        beat(job, HALF_WAY)
        job.replays[9] = pb.ReplayProgress(version=14, target=15, seconds_left=4.5)
        samples = metrics.samples([job])  # each of the one that has most
        assert samples["swift_coordinator_replay_left_steps"] == {("j",): 8}
        assert samples["swift_coordinator_replay_left_seconds"] == {("j",): 4.5}
    finally:
        metrics.close()


async def test_rehearsals_in_the_metrics(driver: Driver) -> None:
    job = await driver.apply("j", pb.HeartbeatRequest(**sender(), version=7))
    metrics = CoordinatorMetrics()
    metrics.close()

    def shown(name: str) -> dict[tuple[str, ...], object]:
        return dict(metrics.samples([job])[f"swift_coordinator_{name}"])

    assert (shown("exact"), shown("rehearsal_differs")) == ({("j",): True}, {})
    await driver.apply("j", pb.RehearsedRequest(rank=0, version=5, under_way=True))
    assert shown("rehearsal_differs") == {}
    await driver.apply("j", pb.RehearsedRequest(rank=0, version=5, steps=4, difference="rng differs"))
    driver.stop()
    assert (shown("exact"), shown("rehearsal_differs")) == ({("j",): False}, {("j", "0"): True})


@pytest.mark.parametrize(
    ("said", "known"),
    [(2.0, 2.0), (0.0, 0.0), (None, None), (math.nan, None), (math.inf, None), (-1.0, None)],
)
async def test_what_a_rank_says_is_a_time_or_nothing(
    said: float | None, known: float | None, driver: Driver
) -> None:
    job = await driver.apply("j", pb.HeartbeatRequest(**sender()))
    job.row.state = State.RECOVERING
    beat = pb.HeartbeatRequest(job="j", **sender())
    context = cast("Context", None)
    await Servicer(driver).Heartbeat(beat, context)
    assert job.replays == {}
    beat.replay.CopyFrom(pb.ReplayProgress(version=1, target=2, seconds_left=said))
    await Servicer(driver).Heartbeat(beat, context)
    assert job.replays == {0: pb.ReplayProgress(version=1, target=2, seconds_left=known)}


async def test_a_prediction_is_durable_and_shown(job: Job) -> None:
    one = Prediction(rank=0, workers=3, steps=8, seconds=2.5, alone_s=6.0)
    job.row.plan = Plan(target_version=15, ranks=(), collective_source=-1, reason="r", predictions=(one,))
    again = copy_of(job.row)
    assert again.plan == job.row.plan
    (shown,) = view_of(again).plan.predictions
    assert (shown.rank, shown.workers, shown.steps, shown.seconds, shown.alone_s) == (0, 3, 8, 2.5, 6.0)
    assert plan_fields(job.row.plan)["predictions"] == [
        {"rank": 0, "workers": 3, "steps": 8, "seconds": 2.5, "alone_s": 6.0}
    ]
