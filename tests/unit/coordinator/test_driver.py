"""The driver: effects carried out against log servers that fail, and a store that does."""

import asyncio
import threading

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb.log_pb2 import JobStatus
from swift_ft.errors import JobSetApart, LogUnavailable, ServiceError, StaleGeneration, UsageError
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import driver as driver_module
from swift_ft_services.coordinator import driver as published_module
from swift_ft_services.coordinator import log_calls
from swift_ft_services.coordinator.driver import Driver, JobApart, NoSuchJob
from swift_ft_services.coordinator.job_record import row_key
from swift_ft_services.coordinator.log_calls import Unavailable
from swift_ft_services.coordinator.log_placement import EMPTIED_WHEN_NEW
from swift_ft_services.coordinator.store import StoreConflict, StoreFailed
from swift_ft_services.coordinator.timeouts import Timing
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import (
    DEATH,
    PATIENCE_S,
    FakeClock,
    FakeLogs,
    driver_of,
    join,
    lose_rank_0,
    run_to_running,
    running,
    sender,
    until,
    view_with,
)


async def test_every_log_server_is_fenced_before_planning(driver: Driver, logs: FakeLogs) -> None:
    logs.troubles["l1"] = LogUnavailable("connection refused")
    await driver.apply("j", DEATH)
    view = await view_with(driver, lambda view: "connection refused" in view.waiting_for)
    assert view.state == pb.FENCING
    assert "log server l1: connection refused" in view.waiting_for
    assert ("fence", "l0", "j", 2) in logs.calls
    await asyncio.sleep(0.2)
    assert (await view_with(driver, lambda _: True)).state == pb.FENCING
    logs.troubles.clear()
    view = await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert view.generation == 2
    assert "connection refused" not in view.waiting_for


async def test_a_newer_generation_does_not_wait_for_the_older_fence(driver: Driver, logs: FakeLogs) -> None:
    logs.gate.clear()  # calls hang
    await lose_rank_0(driver)

    def fences() -> list[object]:
        return [call[3] for call in logs.calls if call[0] == "fence"]

    await until(lambda: len(fences()) == 4)
    await driver.apply("j", pb.ExitRequest(rank=0, incarnation="b", pid=1, exit_code=-9))
    await until(lambda: len(fences()) == 6)
    assert fences() == [1, 1, 2, 2, 3, 3]
    logs.gate.set()
    view = await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert view.generation == 3


async def asks_no_more(driver: Driver) -> None:
    await until(lambda: not driver._questions._tasks)


async def test_a_job_that_is_over_asks_its_log_servers_for_nothing(
    logs: FakeLogs, store: MemoryStore
) -> None:
    """They may never come back, and each such question would take a thread of those that other jobs need."""
    logs.troubles["l1"] = LogUnavailable("connection refused")
    driver = await driver_of(logs, store)
    await driver.join("j", join())
    await view_with(driver, lambda view: "connection refused" in view.waiting_for)
    await driver.apply("j", pb.FailRequest(reason="given up"))
    await asks_no_more(driver)
    assert (await driver.status("j")).view.reason == "given up"


async def test_a_log_server_that_is_given_up_is_asked_for_nothing(driver: Driver, logs: FakeLogs) -> None:
    await lose_rank_0(driver)
    await view_with(driver, lambda view: view.state == pb.PLANNING)
    logs.troubles["l1"] = LogUnavailable("connection refused")
    await driver.apply("j", pb.ReportRequest(**sender("b"), generation=2))
    await view_with(driver, lambda view: "connection refused" in view.waiting_for)
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l1"))
    await view_with(driver, lambda view: view.state == pb.PLANNING and view.generation == 3)
    await asks_no_more(driver)


async def test_a_log_server_that_is_ahead_fails_the_job(logs: FakeLogs, store: MemoryStore) -> None:
    logs.troubles["l1"] = StaleGeneration("l1 holds generation 9")
    driver = await driver_of(logs, store)
    await driver.join("j", join())
    view = await view_with(driver, lambda view: view.state == pb.FAILED)
    assert view.reason == (
        "log server l1 is ahead of this coordinator for job j (l1 holds generation 9): start the job under another "
        "name, or with an empty log"
    )
    assert not driver.failed.done()


async def test_a_log_server_that_has_set_the_job_apart_is_done_without(
    driver: Driver, logs: FakeLogs
) -> None:
    logs.troubles["l1"] = JobSetApart("job j is set apart: its manifest is damaged")
    await lose_rank_0(driver)
    view = await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert driver._jobs["j"].row.addresses() == ["l0"]
    assert "log server l1 is lost: it cannot be used: log server l1: job j is set apart" in view.reason
    assert ("fence", "l1", "j", view.generation) not in logs.calls


async def test_the_last_log_server_that_has_set_the_job_apart_ends_it(
    logs: FakeLogs, store: MemoryStore
) -> None:
    driver = await running(logs, store, "l0")
    logs.troubles["l0"] = JobSetApart("job j is set apart")
    await lose_rank_0(driver)
    view = await view_with(driver, lambda view: view.state == pb.FAILED)
    assert view.reason == "log server l0: job j is set apart"


async def test_a_log_server_that_answers_with_nothing_but_errors_is_not_asked_for_ever(
    driver: Driver, logs: FakeLogs
) -> None:
    """One that is away is: see the first test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_calls, "ERRORS_MAX", 3)
        await lose_rank_0(driver)
        await view_with(driver, lambda view: view.state == pb.PLANNING)
        logs.troubles["l1"] = ServiceError("log server l1: INTERNAL: a bug")
        await driver.apply("j", pb.ReportRequest(**sender("b"), generation=2))
        view = await view_with(driver, lambda view: view.state == pb.PLANNING and view.generation == 3)
    assert "log server l1: INTERNAL: a bug (3 times in a row)" in view.reason


async def test_a_fall_back_empties_the_logs_first(driver: Driver, logs: FakeLogs) -> None:
    await lose_rank_0(driver)
    await view_with(driver, lambda view: view.state == pb.PLANNING)
    logs.calls.clear()
    await driver.apply("j", pb.ReportRequest(**sender("b"), generation=2))
    view = await view_with(driver, lambda view: view.state == pb.RECOVERING)
    assert view.plan.ranks[0].strategy == pb.CHECKPOINT
    assert sorted(call[:2] for call in logs.calls) == [
        ("fence", "l0"),
        ("fence", "l1"),
        ("inventory", "l0"),
        ("inventory", "l1"),
        ("reset", "l0"),
        ("reset", "l1"),
    ]


async def test_a_trim_ends_before_a_reset(logs: FakeLogs, store: MemoryStore) -> None:
    """All may have gone back to a checkpoint before the one that it was for."""
    answers = threading.Event()

    def trim(address: str, job: str, generation: int, below_step: int, cold: str = "") -> None:
        logs.calls.append(("trim", address, job, below_step, generation))
        answers.wait(10)

    driver = await running(logs, store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "trim", trim)
        await driver.apply("j", pb.CheckpointRequest(**sender(), version=5, generation=0))
        await until(lambda: ("trim", "l0", "j", 5, 1) in logs.calls)  # behind a fence a server refuses it
        await lose_rank_0(driver)
        await view_with(driver, lambda view: view.state == pb.PLANNING)
        assert driver._questions.under_way("j", "trim"), "it is not answered"
        await driver.apply("j", pb.ReportRequest(**sender("b"), generation=2))
        await view_with(driver, lambda view: view.state == pb.RECOVERING)
        assert ("reset", "l0") in [call[:2] for call in logs.calls]
        assert not driver._questions.under_way("j", "trim")
        answers.set()


async def test_a_trim_that_fails_blocks_nothing_and_the_next_one_makes_up_for_it(
    driver: Driver, logs: FakeLogs
) -> None:
    logs.troubles["l0"] = LogUnavailable("connection refused")
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=5, generation=0))
    await until(lambda: {("trim", "l0", "j", 5), ("trim", "l1", "j", 5)} <= set(logs.calls))
    await until(lambda: not driver._questions.under_way("j", "trim"))
    logs.troubles.clear()
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=7, generation=0))
    await until(lambda: ("trim", "l0", "j", 7) in logs.calls)
    assert (await view_with(driver, lambda _: True)).state == pb.RUNNING


@pytest.mark.parametrize("error", [StoreFailed("disk is full"), StoreConflict("taken over")])
async def test_a_store_that_fails_or_is_taken_over_ends_the_coordinator(
    error: Exception, driver: Driver, store: MemoryStore
) -> None:
    async def commit(*_: object) -> None:
        raise error

    shown = await view_with(driver, lambda _: True)
    store.commit = commit  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match=str(error)):
        await driver.apply("j", DEATH)
    assert str(error) in driver.failed.result()
    # Memory is ahead of the disk now, so nothing more is said.
    assert (await view_with(driver, lambda _: True)) == shown
    with pytest.raises(Unavailable):
        await driver.apply("j", pb.HeartbeatRequest(**sender(), version=1))


async def test_a_poll_that_answers_after_the_store_has_failed_is_no_error(
    driver: Driver, logs: FakeLogs, store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def commit(*_: object) -> None:
        raise StoreFailed("disk is full")

    await until(lambda: not driver._questions.under_way("j", "fence"))
    logs.gate.clear()
    await driver.tick()
    await until(lambda: {("space", "l0", "j", 1), ("space", "l1", "j", 1)} <= set(logs.calls))
    store.commit = commit  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await driver.apply("j", DEATH)
    logs.gate.set()
    await until(lambda: not driver._questions.under_way("j", "space"))
    driver.stop()
    assert not caplog.records


async def test_a_restart_goes_on_with_the_same_log_servers_elsewhere(
    logs: FakeLogs, store: MemoryStore
) -> None:
    first = await running(logs, store)
    first.stop()
    with pytest.raises(UsageError, match="names l0, job j is kept on l0,l1"):
        await driver_of(logs, store, ("l0",))
    moved = await driver_of(logs, store, ("l2", "l3"))
    assert list((await view_with(moved, lambda _: True)).log_servers) == ["l2", "l3"]


async def test_a_row_that_cannot_be_read_is_named(logs: FakeLogs, store: MemoryStore) -> None:
    await store.commit({row_key("j"): "{}"})
    driver = await driver_of(logs, store)
    with pytest.raises(JobApart, match="row of it is damaged \\(it cannot be read"):
        await driver.apply("j", m.Tick())


async def test_jobs_do_not_mix(driver: Driver) -> None:
    await driver.join("k", join())
    await driver.apply("k", pb.FailRequest(reason="of k alone"))
    assert (await driver.status("k")).view.state == pb.FAILED
    assert (await driver.status("j")).view.state == pb.RUNNING
    with pytest.raises(NoSuchJob):
        await driver.apply("l", m.Tick())


async def test_a_log_that_runs_full_makes_an_early_checkpoint(logs: FakeLogs, store: MemoryStore) -> None:
    timing = Timing(heartbeat_s=0.05, lease_s=30.0, step_bound_s=60.0)
    driver = await running(logs, store, timing=timing)
    ticks = asyncio.create_task(driver.run_ticks())
    logs.troubles["l0"] = LogUnavailable("connection refused")  # nothing waits for it
    logs.spaces["l1"] = JobStatus(wants_checkpoint="job j keeps 9 bytes of the 10 that it may")
    view = await view_with(driver, lambda view: view.HasField("checkpoint_at"))
    assert view.checkpoint_at == 1
    assert view.checkpoint_reason == "log server l1: job j keeps 9 bytes of the 10 that it may"
    assert ("space", "l1", "j", 1) in logs.calls
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=1, generation=1))
    view = await view_with(driver, lambda view: not view.HasField("checkpoint_at"))
    assert list(view.checkpoints) == [0, 1]
    # Until the server has trimmed it is asked to do that again, and for no checkpoint.
    logs.troubles.clear()
    logs.calls.clear()
    await until(lambda: ("trim", "l1", "j", 1) in logs.calls)
    assert not (await view_with(driver, lambda _: True)).HasField("checkpoint_at")
    ticks.cancel()


async def test_a_log_server_that_has_forgotten_the_job_begins_anew(
    logs: FakeLogs, store: MemoryStore
) -> None:
    driver = await driver_of(logs, store, copies=2)
    logs.spaces["l1"] = None
    logs.gate.clear()
    await driver.join("j", join())
    asked = asyncio.create_task(driver._questions.space(driver._jobs["j"], 1))
    # Asked before anybody has fenced it: it cannot know the job.
    await until(lambda: any(call[:2] == ("space", "l1") for call in logs.calls))
    logs.gate.set()
    await asked
    await run_to_running(driver)
    await driver._questions.space(driver._jobs["j"], 1)
    view = await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert view.generation == 2
    assert view.reason == "log server l1 is lost: it has come back without this job's records"
    assert [(place.address, bool(place.lost)) for place in view.log_places] == [
        ("l0", False),
        ("l1", True),
        ("l1", False),
    ]
    assert sorted(view.log_copies[0].servers) == ["l0", "l1"]
    assert ("reset", "l1", "j", 2, EMPTIED_WHEN_NEW) in logs.calls
    await driver.apply("j", m.LogLost(generation=1, address="l1"))  # late
    assert driver.generation_of("j") == 2


async def test_questions_about_space_that_hang_hold_up_no_fence(logs: FakeLogs, store: MemoryStore) -> None:
    driver = await running(logs, store, *(f"l{number}" for number in range(40)))
    hanging = threading.Event()

    def space(address: str, job: str, generation: int) -> JobStatus:
        if generation == 1:  # not what the fence of the next one asks
            hanging.wait(30)
        return JobStatus()

    logs.space = space  # type: ignore[method-assign]
    driver._look_at_logs(driver._jobs["j"])
    await asyncio.sleep(0.05)
    await driver.apply("j", DEATH)
    try:
        assert (await view_with(driver, lambda view: view.state == pb.PLANNING)).generation == 2
    finally:
        hanging.set()
        driver.stop()


async def test_a_coordinator_that_stops_takes_no_command(driver: Driver) -> None:
    revision = driver._jobs["j"].row.revision
    driver.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        await driver.apply("j", DEATH)
    with pytest.raises(Unavailable, match="shutting down"):
        await driver.join("k", join())
    for seen in driver.status("j"), driver.jobs(lambda _: True), driver.read_jobs(len):
        with pytest.raises(Unavailable, match="shutting down"):
            await seen
    await asyncio.sleep(0.05)
    assert not driver.failed.done()
    assert (driver._jobs["j"].row.revision, set(driver._jobs)) == (revision, {"j"})


async def test_a_silent_log_server_is_lost_and_the_others_are_not_asked_about_it(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await running(logs, store, clock=clock, copies=2)
    logs.troubles["l1"] = LogUnavailable("connection refused")
    async with asyncio.timeout(PATIENCE_S):
        while (await view_with(driver, lambda _: True)).generation == 1:
            clock.now += 1.0
            await driver.apply("j", pb.HeartbeatRequest(**sender(), version=3))
            await driver.tick()
            await asyncio.sleep(0.01)
    view = await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert [(place.address, bool(place.lost)) for place in view.log_places] == [("l0", False), ("l1", True)]
    assert list(view.log_servers) == ["l0"]
    assert [list(logs.servers) for logs in view.log_copies] == [["l0"]]
    assert ("fence", "l0", "j", 2) in logs.calls
    assert ("fence", "l1", "j", 2) not in logs.calls
    logs.calls.clear()
    await driver.apply("j", pb.ReportRequest(**sender(), generation=2, has_state=True, version=3))
    await view_with(driver, lambda view: view.state == pb.RECOVERING)
    assert {call[1] for call in logs.calls} == {"l0"}


async def test_none_is_lost_while_none_answers(logs: FakeLogs, store: MemoryStore, clock: FakeClock) -> None:
    driver = await running(logs, store, clock=clock)
    for address in ("l0", "l1"):
        logs.troubles[address] = LogUnavailable("connection refused")
    for _ in range(100):
        clock.now += 1.0
        await driver.apply("j", pb.HeartbeatRequest(**sender(), version=3))
        await driver.tick()
        await asyncio.sleep(0.002)
    view = await view_with(driver, lambda _: True)
    assert (view.state, view.generation) == (pb.RUNNING, 1)


async def test_a_log_server_that_comes_is_emptied_before_it_is_used(driver: Driver, logs: FakeLogs) -> None:
    await driver.apply("j", pb.ChangeLogServersRequest(add="l2", add_host="m2"))
    await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert ("reset", "l2", "j", 2, EMPTIED_WHEN_NEW) in logs.calls
    assert ("fence", "l0", "j", 2) in logs.calls
    # Writers are sending to it by now: the next generation must not empty it again.
    await driver.apply("j", DEATH)
    await view_with(driver, lambda view: view.state == pb.PLANNING and view.generation == 3)
    assert ("fence", "l2", "j", 3) in logs.calls
    assert ("reset", "l2", "j", 3, EMPTIED_WHEN_NEW) not in logs.calls


async def test_a_restart_with_the_flags_of_the_beginning_knows_what_was_lost(
    logs: FakeLogs, store: MemoryStore
) -> None:
    first = await running(logs, store)
    await first.apply("j", pb.ChangeLogServersRequest(lost="l0", add="l2", add_host="m2"))
    first.stop()
    with pytest.raises(UsageError, match="names l0,l1, job j is kept on l1,l2"):
        await driver_of(logs, store)  # who says that l2 is l1 under the address of another one?
    for servers in (("l1", "l2"), ("l0", "l1", "l2"), ("l2", "l1")):
        again = await driver_of(logs, store, servers)
        assert list((await view_with(again, lambda _: True)).log_servers) == ["l1", "l2"]
        again.stop()
    moved = await driver_of(logs, store, ("l1", "l7"))
    assert list((await view_with(moved, lambda _: True)).log_servers) == ["l1", "l7"]


async def test_jobs_are_listed_as_far_as_the_asker_may_see_them(logs: FakeLogs, store: MemoryStore) -> None:
    """Those under way first; an answer has a bound, and says what it leaves out."""
    driver = await driver_of(logs, store, ())
    for name in ("b", "a", "c"):
        await driver.join(name, join())
    await driver.apply("a", pb.FailRequest(reason="x" * 1000))
    listed = await driver.jobs(lambda name: True)
    assert [(one.job, one.state) for one in listed.jobs] == [
        ("b", pb.FORMING),
        ("c", pb.FORMING),
        ("a", pb.FAILED),
    ]
    assert listed.jobs[2].reason == "x" * 200
    assert [one.job for one in (await driver.jobs(lambda name: name == "c")).jobs] == ["c"]
    with pytest.MonkeyPatch.context() as few:
        few.setattr(driver_module, "JOBS_SHOWN_MAX", 2)
        listed = await driver.jobs(lambda name: True)
    assert ([one.job for one in listed.jobs], listed.left_out) == (["b", "c"], 1)


async def test_whom_a_recovery_still_waits_for_is_shown_after_a_while(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await driver_of(logs, store, clock=clock)
    for rank, incarnation in ((0, "a"), (1, "b")):
        await driver.join("j", join(rank, incarnation, world_size=2))
    await view_with(driver, lambda view: view.waiting_for == "ranks 0, 1 to be ready")
    await driver.apply("j", pb.ReadyRequest(**sender(), generation=1, version=0, stages=(0,), num_stages=2))
    await driver.tick()
    assert (await view_with(driver, lambda _: True)).waiting_for == "ranks 0, 1 to be ready"
    before = driver._published._views["j"].revision
    clock.now += published_module.SHOWN_S
    await driver.tick()
    view = await view_with(driver, lambda view: view.waiting_for == "rank 1 to be ready")
    assert view.revision > before, "else nobody takes it for a newer one"
    clock.now += published_module.SHOWN_S
    await driver.tick()
    assert driver._published._views["j"] is view, "nothing new, so nobody is woken"
