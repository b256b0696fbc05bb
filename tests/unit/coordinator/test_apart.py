"""An error of the coordinator with one job, and messages that were once enough for it: others are served."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.record import STEP_MAX
from swift_ft_services.coordinator import job as core
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import ERRORS_MAX, WITHIN_S, Driver, JobApart
from swift_ft_services.coordinator.endings import RUNS_KEPT
from swift_ft_services.coordinator.job_record import State
from swift_ft_services.coordinator.log_calls import Unavailable
from swift_ft_services.coordinator.restarts import note_run
from swift_ft_services.coordinator.service import Servicer, problem_of
from swift_ft_services.coordinator.views import FENCED_SHOWN, view_of
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import (
    DEATH,
    Aborted,
    Caller,
    FakeClock,
    FakeLogs,
    driver_of,
    join,
    run_to_running,
    running,
    sender,
    until,
    view_with,
)
from tests.unit.coordinator.rows import encode
from tests.unit.coordinator.test_parts import row


def broken(*_args: object, **_named: object) -> Any:
    raise KeyError("a bug")


def once(driver: Driver, name: str = "j") -> None:
    """The next transition of that job's core fails half-way."""
    driver._jobs[name].become_planning = broken  # type: ignore[method-assign]


async def state_of(driver: Driver, name: str = "j") -> str:
    return pb.State.Name((await driver.status(name)).view.state)


async def test_after_an_error_a_job_goes_on_from_what_is_durable(driver: Driver, store: MemoryStore) -> None:
    await driver.join("other", join())
    before = driver._jobs["other"]
    driver._jobs["j"].become_fencing = broken  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="job j goes back to what is durable of it"):
        await driver.apply("j", DEATH)
    assert await state_of(driver) == "RUNNING"
    assert (
        encode(driver._jobs["j"].row).items()
        == {k: v for k, v in store.rows.items() if "/j/" in k and not k.startswith("history/")}.items()
    )
    assert driver._jobs["other"] is before
    await driver.apply("j", DEATH)  # said again
    await view_with(driver, lambda view: view.state == pb.PLANNING)
    assert not driver.failed.done()


async def test_what_was_said_in_the_turn_of_an_error_is_taken_back(driver: Driver) -> None:
    await driver.join("other", join())
    driver._jobs["j"].become_fencing = broken  # type: ignore[method-assign]
    done = await asyncio.gather(
        driver.apply("j", pb.CheckpointRequest(**sender(), version=5, generation=0)),
        driver.apply("other", pb.CheckpointRequest(**sender(), version=0, generation=0)),
        driver.apply("j", DEATH),
        return_exceptions=True,
    )
    assert [type(answer) for answer in done] == [Unavailable, core.Job, Unavailable]
    assert list((await driver.status("other")).view.checkpoints) == [0]
    assert list((await driver.status("j")).view.checkpoints) == [0]
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=5, generation=0))
    assert list((await driver.status("j")).view.checkpoints) == [0, 5]


async def test_a_job_with_one_error_after_the_other_is_set_apart(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await running(logs, store, clock=clock)
    await driver.join("other", join())
    watched: list[pb.View] = []

    async def watch() -> None:
        async with aclosing(driver.views("j")) as views:
            async for view in views:
                watched.append(view)

    watching = asyncio.create_task(watch())
    with pytest.MonkeyPatch.context() as bug:
        bug.setattr(core.Job, "become_fencing", broken)
        for number in range(ERRORS_MAX + 1):
            clock.now += WITHIN_S / ERRORS_MAX if number else 2 * WITHIN_S
            with pytest.raises(JobApart if number == ERRORS_MAX else Unavailable) as told:
                await driver.apply("j", DEATH)
    assert "set apart, others are served: the coordinator makes an error with it (KeyError" in str(told.value)
    async with asyncio.timeout(5):
        await watching
    assert watched[-1].state == pb.RUNNING
    assert {job.job: pb.State.Name(job.state) for job in (await driver.jobs(lambda _: True)).jobs} == {
        "other": "FORMING",
        "j": "FAILED",
    }
    await driver.tick()
    assert await state_of(driver, "other") == "FORMING"
    assert not driver.failed.done()
    driver.stop()
    again = await driver_of(logs, store)  # its state is kept
    assert await state_of(again) == "RUNNING"


async def test_errors_that_are_far_from_each_other_set_nothing_apart(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await running(logs, store, clock=clock)
    with pytest.MonkeyPatch.context() as bug:
        bug.setattr(core.Job, "become_fencing", broken)
        for _ in range(2 * ERRORS_MAX):
            clock.now += WITHIN_S
            with pytest.raises(Unavailable):
                await driver.apply("j", DEATH)
    assert await state_of(driver) == "RUNNING"


async def test_a_tick_that_fails_for_one_job_is_one_for_the_others(driver: Driver) -> None:
    await driver.join("a", join())
    await driver.join("z", join())
    driver._jobs["j"].leases.overdue = broken  # type: ignore[method-assign]
    ticked = []
    for name in ("a", "z"):
        driver._jobs[name].leases.overdue = lambda *_, n=name: ticked.append(n) or {}  # type: ignore
    with pytest.raises(Unavailable):
        await driver.tick()
    await driver.tick()
    assert ticked == ["a", "z", "a", "z"]
    assert not driver.failed.done()


async def test_an_error_while_log_servers_are_asked_is_the_jobs_own(
    logs: FakeLogs, store: MemoryStore
) -> None:
    driver = await driver_of(logs, store)
    logs.inventory = broken  # type: ignore[method-assign]
    await run_to_running(driver)
    await driver.join("other", join())
    await driver.apply("j", DEATH)
    await driver.join("j", join(incarnation="b"))
    await view_with(driver, lambda view: view.state == pb.PLANNING)
    report = pb.ReportRequest(**sender("b"), generation=2)
    await driver.apply("j", report)
    await until(lambda: "j" in driver.apart)
    assert await state_of(driver, "other") == "FORMING"
    assert not driver.failed.done()


async def test_whoever_speaks_in_the_turn_behind_an_error_of_a_question_is_to_say_it_again(
    driver: Driver,
) -> None:
    driver._spoil("j", "an error of a question")
    with pytest.raises(Unavailable, match="job j goes back to what is durable of it"):
        await driver.apply("j", pb.HeartbeatRequest(**sender(), version=0))
    assert await state_of(driver) == "RUNNING"


async def test_while_a_job_is_read_again_it_is_neither_unknown_nor_without_a_generation(
    driver: Driver, store: MemoryStore
) -> None:
    driver._jobs["j"].become_fencing = broken  # type: ignore[method-assign]
    read, reading, go_on = store.read, asyncio.Event(), asyncio.Event()

    async def slowly(prefix: str) -> Any:
        reading.set()
        await go_on.wait()
        return await read(prefix)

    store.read = slowly  # type: ignore[method-assign]
    told = asyncio.create_task(driver.apply("j", DEATH))
    await reading.wait()
    with pytest.raises(Unavailable, match="job j goes back"):
        driver.sharing("j", pb.ShareRequest(**sender(), generation=1))
    assert driver.generation_of("j") == 1
    go_on.set()
    with pytest.raises(Unavailable):
        await told
    assert driver.sharing("j", pb.ShareRequest(**sender(), generation=1)) is not None


async def test_a_job_that_cannot_be_shown_is_set_apart_at_the_start(
    logs: FakeLogs, store: MemoryStore
) -> None:
    job = replace(row(), job="j", checkpoint_at=1 << 64)
    await store.commit(encode(job))
    driver = await driver_of(logs, store, ("l:1",))
    await driver.join("other", join())
    with pytest.raises(JobApart, match="the coordinator makes an error with it"):
        await driver.status("j")


# --- what a stranger says ---


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("Heartbeat", pb.HeartbeatRequest(version=STEP_MAX + 1)),
        ("Heartbeat", pb.HeartbeatRequest(unsaved=pb.UnsavedCheckpoint(version=STEP_MAX + 1))),
        ("Report", pb.ReportRequest(snapshots=[pb.HeldSnapshot(version=STEP_MAX + 1)])),
        ("AskCheckpoint", pb.AskCheckpointRequest(generation=1, after_version=(1 << 64) - 1)),
        ("CheckpointDurable", pb.CheckpointRequest(version=(1 << 64) - 1)),
        ("Finish", pb.FinishRequest(version=1, num_steps=(1 << 64) - 1)),
    ],
)
async def test_a_number_from_which_nobody_can_count_on_is_refused(
    call: str, request_: Any, driver: Driver
) -> None:
    request_.job, request_.rank, request_.incarnation = "j", 0, "a"
    said: Any = Caller()
    with pytest.raises(Aborted, match=rf"numbers go up to {STEP_MAX}"):
        await getattr(Servicer(driver), call)(request_, said)


def test_all_bits_may_be_voted_with() -> None:
    vote = pb.VoteRequest(**sender(), generation=1, number=0, kind=pb.AGREE, value=(1 << 63) - 1)
    assert problem_of(vote) == ""
    vote.number = STEP_MAX + 1
    assert problem_of(vote) == f"number {STEP_MAX + 1}: numbers go up to {STEP_MAX}"


async def test_a_new_start_forgets_who_was_given_up(driver: Driver) -> None:
    job = driver._jobs["j"].row
    await driver.apply("j", pb.FailRequest(reason="boom"))
    job.given_up, job.unlogged_below = [0], 7
    await driver.join("j", join(incarnation="b", run="r2"))
    assert (job.given_up, job.unlogged_below) == ([], None)


async def test_a_checkpoint_is_asked_for_behind_the_last_number(driver: Driver) -> None:
    caller: Any = Caller()
    ask = pb.AskCheckpointRequest(job="j", incarnation="a", generation=1, after_version=STEP_MAX, reason="r")
    await Servicer(driver).AskCheckpoint(ask, caller)
    assert (await driver.status("j")).view.checkpoint_at == STEP_MAX + 1


BAD = [
    ({"strategy": "auto", "lost_shard": "reroute", "replicas": "many"}, "replicas 'many' is no number"),
    ({"replicas": "0"}, "replicas 0: a world of 4 ranks cannot be divided so"),
    ({"replicas": "3"}, "replicas 3: a world of 4 ranks cannot be divided so"),
    ({"tensor_parallel": "0"}, "tensor_parallel 0: a world of 4 ranks cannot be divided so"),
    ({"replicas": "2", "shards": "4"}, "replicas times shards times tensor_parallel 8: a world"),
    ({"replicas": "٣"}, "is no number"),
    ({"replicas": "9" * 5000}, "is no number"),
    ({"shards": "-1"}, "shards '-1' is no number"),
    ({"helpers": "x"}, "helpers 'x' is no number"),
    ({"strategy": "hope"}, "strategy 'hope' is not known"),
    ({"groups": "1-0"}, "groups '1-0'"),
]


@pytest.mark.parametrize(("config", "words"), BAD)
async def test_a_configuration_that_cannot_be_is_refused_at_the_first_join_and_at_a_new_start(
    config: dict[str, str], words: str, logs: FakeLogs, store: MemoryStore
) -> None:
    driver = await driver_of(logs, store)
    bad = join(world_size=4, config=config)
    with pytest.raises(Refusal, match=words):
        await driver.join("j", bad)
    good = {key: "1" for key in config if key in ("replicas", "shards")}
    await driver.join("j", join(world_size=4, config=good, run="r1"))
    await driver.apply("j", pb.FailRequest(reason="boom"))
    before = encode(driver._jobs["j"].row)
    with pytest.raises(Refusal):
        await driver.join("j", join(incarnation="b", world_size=4, config=config, run="r2"))
    assert encode(driver._jobs["j"].row) == before


@pytest.mark.parametrize("strategy", ["auto", "shrink", "adaptive", "rollback"])
async def test_a_job_that_does_not_say_how_many_replicas_it_has_has_one(
    strategy: str, logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await driver_of(logs, store, clock=clock)
    config = {"strategy": strategy, "lost_shard": "reroute"}
    await driver.join("j", join(config=config))
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=0, generation=0))
    ready = pb.ReadyRequest(**sender(), generation=1, version=0, stages=(0,), num_stages=1)
    await driver.apply("j", ready)
    await view_with(driver, lambda view: view.state == pb.RUNNING)
    await driver.apply("j", DEATH)
    for _ in range(5):
        clock.now += 30.0
        await driver.tick()
    assert not driver.failed.done()
    assert "j" not in driver.apart


async def test_a_process_of_before_cannot_start_the_job_again(driver: Driver) -> None:
    await driver.apply("j", pb.FailRequest(reason="boom"))
    before = encode(driver._jobs["j"].row)
    with pytest.raises(Refusal, match="this process was rank 0 before job j was over"):
        await driver.join("j", join(run="another"))
    assert encode(driver._jobs["j"].row) == before


async def test_a_job_whose_stages_do_not_fit_begins_anew(logs: FakeLogs, store: MemoryStore) -> None:
    """All have saved their first checkpoint by the time that it shows: a mended script has other stages."""
    driver = await driver_of(logs, store)

    async def begin(start: str, stages: dict[int, tuple[int, ...]]) -> None:
        ranks = {rank: {"rank": rank, "incarnation": f"{start}{rank}"} for rank in stages}
        for rank, who in ranks.items():
            await driver.join("j", join(rank, who["incarnation"], world_size=2, run=start))
        generation = driver.generation_of("j")
        for who in ranks.values():
            await driver.apply("j", pb.CheckpointRequest(**who, version=0, generation=generation))
        for rank, who in ranks.items():
            ready = pb.ReadyRequest(
                **who, generation=generation, version=0, stages=stages[rank], num_stages=2
            )
            await driver.apply("j", ready)

    await begin("r1", {0: (0,), 1: (0,)})
    view = await view_with(driver, lambda view: view.state == pb.FAILED)
    assert "no rank runs stage 1 of 2" in view.reason
    await begin("r2", {0: (0,), 1: (1,)})
    await view_with(driver, lambda view: view.state == pb.RUNNING)
    assert "j" not in driver.apart


async def test_a_communicators_groups_are_built_once(logs: FakeLogs, store: MemoryStore) -> None:
    driver = await driver_of(logs, store)
    await driver.join("j", join(config={"communicator": "1"}))

    def built(number: int) -> pb.VoteRequest:
        return pb.VoteRequest(**sender(), generation=1, number=number, kind=pb.BUILT, value=1)

    await driver.apply("j", built(0))
    with pytest.raises(Refusal, match="the groups of generation 1 are built already"):
        await driver.apply("j", built(1))
    assert await state_of(driver) == "RUNNING"


# --- what must not grow, and what must not be forgotten ---


def test_a_launcher_that_is_there_is_never_forgotten() -> None:
    job = replace(row(), world_size=2 * RUNS_KEPT, runs=[], run_of={})
    for rank in range(2 * RUNS_KEPT):  # one each
        note_run(job, f"r{rank}", rank)
    assert set(job.runs) == {f"r{rank}" for rank in range(2 * RUNS_KEPT)}
    for number in range(10 * RUNS_KEPT):  # machines are replaced, one after the other
        note_run(job, f"n{number}", number % 100)
    assert set(job.run_of.values()) <= set(job.runs)
    assert len(job.runs) <= 2 * RUNS_KEPT


def test_a_view_names_the_last_ones_that_were_fenced() -> None:
    job = replace(row(), state=State.RUNNING, world_size=4)
    holder = next(iter(row().holders.values()))
    shown: list[int] = []
    for number in range(5 * FENCED_SHOWN):
        job.fence(replace(holder, incarnation=f"i{number}"))
        if number % 97 == 0 or number > 5 * FENCED_SHOWN - 10:
            view = view_of(job)
            shown.append(len(view.fenced))
            assert view.fenced[-1].incarnation == f"i{number}"
            assert len(view.fenced) >= min(number, FENCED_SHOWN)
    assert max(shown) < 2 * FENCED_SHOWN
