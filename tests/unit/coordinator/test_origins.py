"""Jobs that begin with another one's checkpoint: which, what is refused, and what is remembered."""

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import Driver
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import (
    DEATH,
    PATIENCE_S,
    FakeLogs,
    driver_of,
    join,
    run_to_running,
    sender,
)


def from_job(job: str, version: int | None = None, **fields: Any) -> pb.JoinRequest:
    return join(**{"run": "r1", "from_job": job, "from_version": version, **fields})


async def begin(driver: Driver, name: str, said: pb.JoinRequest) -> tuple[str, int]:
    await driver.join(name, said)
    view = (await driver.status(name)).view
    return view.from_job, view.from_version


async def refused(driver: Driver, name: str, said: pb.JoinRequest) -> str:
    with pytest.raises(Refusal) as refusal:
        await driver.join(name, said)
    return str(refusal.value)


async def j_at(driver: Driver, *versions: int) -> None:
    """Job j gets these checkpoints."""
    for version in versions:
        await driver.apply("j", pb.CheckpointRequest(**sender(), version=version, generation=1))


async def make_running(driver: Driver, name: str, version: int) -> None:
    view = (await driver.status(name)).view
    who, generation = {"rank": 0, "incarnation": view.members[0].incarnation}, view.generation
    await driver.apply(name, pb.CheckpointRequest(**who, version=version, generation=generation))
    await driver.apply(
        name, pb.ReadyRequest(**who, generation=generation, version=version, stages=(0,), num_stages=1)
    )
    async with asyncio.timeout(PATIENCE_S), aclosing(driver.views(name)) as views:
        async for view in views:
            if view.state == pb.RUNNING:
                return


async def test_it_begins_with_the_newest_or_with_the_one_that_is_named(driver: Driver) -> None:
    await j_at(driver, 5, 10)
    assert await begin(driver, "k", from_job("j")) == ("j", 10)
    assert await begin(driver, "l", from_job("j", 5)) == ("j", 5)
    await make_running(driver, "k", 10)
    assert (await driver.status("k")).view.checkpoints == [10]
    assert (await driver.status("j")).view.checkpoints == [5, 10]


@pytest.mark.parametrize("end", ["fail", "finish", "nothing"])
async def test_it_may_begin_with_one_of_a_job_that_runs_or_is_over(end: str, driver: Driver) -> None:
    await j_at(driver, 5, 10)
    said = {"fail": pb.FailRequest(reason="boom"), "finish": pb.FinishRequest(**sender(), version=10)}
    await driver.apply("j", said.get(end, m.Tick()))
    assert await begin(driver, "k", from_job("j")) == ("j", 10)


async def test_what_cannot_be_is_refused_in_a_line(logs: FakeLogs, store: MemoryStore) -> None:
    driver = await driver_of(logs, store)
    unknown = "--from-job j: this coordinator has no such job (swift-ft jobs lists them)"
    assert await refused(driver, "k", from_job("j")) == unknown
    await driver.join("forming", join())
    assert (
        await refused(driver, "k", from_job("forming"))
        == "--from-job forming: no checkpoint of it is complete"
    )
    await run_to_running(driver)
    await j_at(driver, 5, 10)
    with pytest.raises(Refusal, match="no such job"):  # to whom the job is nobody's business
        await driver.join("k", from_job("j"), lambda job: job != "j")
    assert await refused(driver, "k", from_job("j", 7)) == (
        "--from-version 7: the complete checkpoints of job j are of version 5 and 10"
    )
    assert await refused(driver, "k", from_job("j", world_size=2)) == (
        "--from-job j: its checkpoints are of world size 1, job k has 2: make them equal"
    )
    assert await refused(driver, "k", from_job("j", config={"replicas": "2"})) == (
        "--from-job j: its checkpoints are of replicas 1, job k has 2: make them equal"
    )
    assert await refused(driver, "m", from_job("m")) == (
        "job m goes on from its own checkpoints: leave --from-job out"
    )
    assert {summary.job for summary in (await driver.jobs(lambda _: True)).jobs} == {"forming", "j"}


async def test_all_ranks_must_say_the_same_or_nothing(driver: Driver) -> None:
    await j_at(driver, 5, 10)
    await driver.join("k", from_job("j"))
    for said in (from_job("j"), from_job("j", 10), join()):
        assert await begin(driver, "k", said) == ("j", 10)
    assert await refused(driver, "k", from_job("j", 5)) == (
        "rank 0 says --from-job j --from-version 5, and job k began with version 10 of job j: say the same, leave it "
        "out, or give the job another name"
    )
    await driver.join("plain", join())
    assert "job plain began at step 0" in await refused(driver, "plain", from_job("j"))


async def test_a_job_that_has_not_run_begins_there_again_and_one_that_has_does_not(
    driver: Driver, logs: FakeLogs, store: MemoryStore
) -> None:
    await j_at(driver, 5)
    await driver.join("k", from_job("j"))
    # A rank is lost while it forms: the origin stays, also through a restart of the coordinator.
    await driver.apply("k", DEATH)
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=10, generation=1))
    driver.stop()
    driver = await driver_of(logs, store)
    assert await begin(driver, "k", from_job("j", incarnation="b")) == ("j", 5)
    # It fails before it has run: started again, it takes what is the newest by then.
    await driver.apply("k", pb.FailRequest(reason="boom"))
    assert await begin(driver, "k", from_job("j", incarnation="c", run="r2")) == ("j", 10)
    await driver.apply("k", pb.FailRequest(reason="boom"))
    assert await begin(driver, "k", join(incarnation="d", run="r3")) == ("j", 10)
    # It has saved its first one, and fails before its stages are known to fit: it begins anew all the same.
    here = {"rank": 0, "incarnation": "d"}
    view = (await driver.status("k")).view
    await driver.apply("k", pb.CheckpointRequest(**here, version=10, generation=view.generation))
    await driver.apply("k", pb.FailRequest(reason="boom"))
    assert await begin(driver, "k", join(incarnation="dd", run="r33")) == ("j", 10)
    assert (await driver.status("k")).view.state == pb.FORMING
    # Once it runs it has its own: the other one's is not looked at any more.
    await make_running(driver, "k", 10)
    await driver.apply("j", pb.CheckpointRequest(**sender(), version=15, generation=1))
    await driver.apply("k", pb.FailRequest(reason="boom"))
    assert "job k began with version 10 of job j" in await refused(
        driver, "k", from_job("j", 15, incarnation="e", run="r4")
    )
    assert await begin(driver, "k", from_job("j", incarnation="e", run="r4")) == ("j", 10)
    assert (await driver.status("k")).view.state == pb.FENCING  # to restore what it has


async def test_what_is_not_exact_stays_so(driver: Driver) -> None:
    await j_at(driver, 5, 10)
    await driver.apply("j", pb.DiffersRequest(**sender(), version=7, reason="another sum"))
    await driver.join("before", from_job("j", 5))
    assert not (await driver.status("before")).view.HasField("inexact_since")
    await driver.join("k", from_job("j"))
    view = (await driver.status("k")).view
    assert view.inexact_since == 10
    assert view.inexact_reason.startswith("job j, with whose checkpoint it began: ")
    assert "another sum" in view.inexact_reason


def found(*versions: int, run: str = "r1", incarnation: str = "a", adopts: bool = True, **said: Any) -> Any:
    """A Join with complete checkpoints of the job's own."""
    there = pb.Found(versions=versions, **{"generation": 7, "world_size": 1, "place": "/c/k", **said})
    return join(incarnation=incarnation, run=run, adopts=adopts, found=there)


async def test_a_lost_job_is_adopted_above_all_its_generations(logs: FakeLogs, store: MemoryStore) -> None:
    driver = await driver_of(logs, store)
    assert await refused(driver, "k", found(5, 10, adopts=False)) == (
        "this coordinator does not know job k, and /c/k has its checkpoint of step 10: to go on there say "
        "--from-checkpoints /c/k, to begin at step 0 give the job another name"
    )
    assert await refused(driver, "k", found(5, 10, world_size=4)) == (
        "--from-checkpoints: the checkpoints in /c/k are of world size 4, job k has 1: make them equal"
    )
    assert await refused(driver, "k", found(problem="v10 is damaged")) == (
        "--from-checkpoints: there is no checkpoint of job k to go on from: v10 is damaged"
    )
    assert not (await driver.jobs(lambda _: True)).jobs
    said = found(5, 10, inexact_since=3, inexact_reason="an undo")
    assert await begin(driver, "k", said) == ("k", 10)
    view = (await driver.status("k")).view
    assert (view.generation, view.inexact_since, view.inexact_reason) == (1001, 10, "an undo")
    assert view.reason == (
        "adopted from /c/k: job k goes on at step 10, with its checkpoint there, and its log begins anew"
    )
    # It cannot be loaded: the one before it is taken, and there is none before that.
    who = {"rank": 0, "incarnation": view.members[0].incarnation}
    await driver.apply("k", pb.RefuseRequest(**who, generation=1001, reason="it is corrupt"))
    view = (await driver.status("k")).view
    assert (view.state, view.generation, view.from_version, view.inexact_since) == (pb.FORMING, 1002, 5, 5)
    await driver.apply("k", pb.RefuseRequest(**who, generation=1002, reason="it is corrupt"))
    assert (await driver.status("k")).view.state == pb.FAILED
    # Started again, without the flag, in the same directory.
    again = found(5, 10, adopts=False, run="r2", incarnation="i2")
    assert await begin(driver, "k", again) == ("k", 10)
    assert (await driver.status("k")).view.generation > 1002
    await make_running(driver, "k", 10)
    assert (await driver.status("k")).view.checkpoints == [10]
    assert store.rows


async def test_a_known_job_does_not_care_what_is_found(driver: Driver) -> None:
    await j_at(driver, 5, 10)
    await driver.apply("j", pb.FailRequest(reason="boom"))
    await driver.join("j", found(20, incarnation="i2"))
    view = (await driver.status("j")).view
    assert (view.from_job, list(view.checkpoints), view.generation) == ("", [5, 10], 2)
