"""Log servers that come, go and come back: what is emptied, what is never taken for whole, whose place each takes."""

import asyncio
import threading
from dataclasses import replace

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb.log_pb2 import JobStatus
from swift_ft.errors import LogUnavailable, UsageError
from swift_ft.log import record
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import views
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.job_record import RankLogs
from swift_ft_services.coordinator.log_placement import EMPTIED_WHEN_NEW, GIVEN_UP, unreplaced
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import (
    FakeLogs,
    driver_of,
    join,
    lose_rank_0,
    running,
    sender,
    until,
    view_with,
)


async def planning(driver: Driver, generation: int) -> pb.View:
    return await view_with(driver, lambda view: view.state == pb.PLANNING and view.generation == generation)


async def die(driver: Driver, generation: int) -> pb.View:
    """The rank's process; another one takes its place in `generation`."""
    old = driver._jobs["j"].row.holders[0].incarnation
    await driver.apply("j", pb.ExitRequest(rank=0, incarnation=old, pid=1, exit_code=-9))
    await driver.join("j", join(incarnation=f"of {generation}"))
    return await planning(driver, generation)


async def recover(driver: Driver, generation: int, version: int | None) -> pb.View:
    incarnation = driver._jobs["j"].row.holders[0].incarnation
    said = sender(incarnation)
    await driver.apply(
        "j", pb.ReportRequest(**said, generation=generation, has_state=version is not None, version=version)
    )
    view = await view_with(driver, lambda view: view.state == pb.RECOVERING)
    target = view.plan.target_version
    await driver.apply(
        "j", pb.ReadyRequest(**said, generation=generation, version=target, stages=(0,), num_stages=1)
    )
    return await view_with(driver, lambda view: view.state == pb.RUNNING)


def logs_of_rank(driver: Driver) -> RankLogs:
    return driver._jobs["j"].row.placement[0]


def servers(driver: Driver) -> list[tuple[str, bool]]:
    """(address, lost) of each, by its number."""
    return [(server.address, bool(server.lost)) for server in driver._jobs["j"].row.log_servers]


def asked(logs: FakeLogs, kind: str, generation: int) -> list[str]:
    return sorted(str(call[1]) for call in logs.calls if call[0] == kind and call[3] == generation)


async def test_a_server_that_was_lost_before_it_was_emptied_is_emptied_once(
    driver: Driver, logs: FakeLogs
) -> None:
    """It is added again later. What is acknowledged there from then on must outlive every death."""
    logs.troubles["l2"] = LogUnavailable("connection refused")
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l1", add="l2"))
    await view_with(driver, lambda view: "connection refused" in view.waiting_for)
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l2"))
    await planning(driver, 3)
    logs.troubles.clear()
    await driver.apply("j", pb.ChangeLogServersRequest(add="l2"))
    await planning(driver, 4)
    assert servers(driver) == [("l0", False), ("l1", True), ("l2", True), ("l2", False)]
    assert asked(logs, "reset", 4) == ["l2"]
    for generation in (5, 6):
        await recover(driver, generation - 1, version=0)
        await die(driver, generation)
        assert asked(logs, "reset", generation) == []
        assert asked(logs, "fence", generation) == ["l0", "l2"]


async def test_servers_that_come_back_empty_together_are_all_used_anew(
    logs: FakeLogs, store: MemoryStore
) -> None:
    """The first one makes a generation; its fence would make the job known to the second one, and nobody would see."""
    driver = await running(logs, store, copies=2)
    logs.forgotten = {"l0", "l1"}
    await driver._questions.space(driver._jobs["j"], 1)
    await planning(driver, 3)
    lost = [address for address, gone in servers(driver)[:2] if gone]
    assert lost == ["l0", "l1"]
    assert sorted(servers(driver)[2:]) == [("l0", False), ("l1", False)]
    # Not the other one, before it is emptied.
    assert set(asked(logs, "fence", 2)) <= {servers(driver)[2][0]}
    assert asked(logs, "reset", 3) == ["l0", "l1"]
    assert [copy.whole_from for copy in logs_of_rank(driver).copies] == [None, None]


async def test_a_server_that_comes_back_empty_with_its_rank_is_no_source(
    logs: FakeLogs, store: MemoryStore
) -> None:
    """The death is told before anybody has asked the server: its fence waits for it, and finds an empty disk."""
    driver = await running(logs, store, "l0")
    await driver.apply("j", pb.HeartbeatRequest(**sender(), version=3))
    logs.troubles["l0"] = LogUnavailable("connection refused")
    await lose_rank_0(driver)
    await view_with(driver, lambda view: "connection refused" in view.waiting_for)
    logs.forgotten = {"l0"}
    logs.troubles.clear()
    view = await planning(driver, 3)
    assert view.reason == "log server l0 is lost: it has come back without this job's records"
    assert servers(driver) == [("l0", True), ("l0", False)]
    assert asked(logs, "reset", 3) == ["l0"]
    assert [copy.whole_from for copy in logs_of_rank(driver).copies] == [None]
    # It goes on from a state that somebody has: the log cannot feed a replay until there is a checkpoint.
    view = await recover(driver, 3, version=3)
    assert view.checkpoint_reason == "log server l0 is lost: it has come back without this job's records"
    assert [copy.whole_from for copy in logs_of_rank(driver).copies] == [3]
    # It is known again: the next death costs it nothing.
    await die(driver, 4)
    assert servers(driver) == [("l0", True), ("l0", False)]
    assert asked(logs, "fence", 4) == ["l0"]


async def test_a_plan_that_gives_the_log_up_drops_what_a_new_server_was_sent_meanwhile(
    logs: FakeLogs, store: MemoryStore
) -> None:
    driver = await running(logs, store, "l0")
    logs.forgotten = {"l0"}
    await lose_rank_0(driver)
    await planning(driver, 3)
    await driver.apply("j", pb.ReportRequest(**sender("b"), generation=3))
    view = await view_with(driver, lambda view: view.state == pb.RECOVERING)
    assert view.plan.ranks[0].strategy == pb.CHECKPOINT
    resets = [call for call in logs.calls if call[0] == "reset"]
    assert resets == [("reset", "l0", "j", 3, EMPTIED_WHEN_NEW), ("reset", "l0", "j", 3, GIVEN_UP)]
    assert EMPTIED_WHEN_NEW < GIVEN_UP  # a server that has done one does no earlier one


async def test_a_server_that_comes_back_empty_while_the_log_is_given_up_is_used_anew(
    logs: FakeLogs, store: MemoryStore
) -> None:
    """Fenced again, it would take its writers on: behind what they know it to have acknowledged, a hole."""
    driver = await running(logs, store, "l0")
    await die(driver, 2)
    logs.forgotten = {"l0"}
    await driver.apply("j", pb.ReportRequest(**sender("of 2"), generation=2))
    await planning(driver, 3)
    assert servers(driver) == [("l0", True), ("l0", False)]
    assert asked(logs, "fence", 2) == ["l0"]  # when it was known there
    await recover(driver, 3, version=None)
    resets = [call[3:] for call in logs.calls if call[0] == "reset"]
    assert resets[-2:] == [(3, EMPTIED_WHEN_NEW), (3, GIVEN_UP)]


async def test_a_job_that_begins_finds_servers_that_do_not_know_it(
    logs: FakeLogs, store: MemoryStore
) -> None:
    logs.forgotten = {"l0", "l1"}
    driver = await running(logs, store)
    assert servers(driver) == [("l0", False), ("l1", False)]
    assert asked(logs, "fence", 1) == ["l0", "l1"]


async def test_an_answer_from_before_its_first_fence_gives_no_server_up(
    driver: Driver, logs: FakeLogs
) -> None:
    """One that has come is asked before it knows the job; it says so once it does, and holds the generation."""
    answer, reset = threading.Event(), threading.Event()
    empty = logs.reset

    def space(address: str, job: str, generation: int) -> JobStatus | None:
        if address != "l2":
            return JobStatus()
        answer.wait(10)
        return None

    def until_told(address: str, job: str, generation: int, number: int) -> str:
        reset.wait(10)
        return empty(address, job, generation, number)

    logs.space, logs.reset = space, until_told  # type: ignore[method-assign]
    await driver.apply("j", pb.ChangeLogServersRequest(add="l2"))
    question = asyncio.create_task(driver._questions.space(driver._jobs["j"], 2))
    await asyncio.sleep(0)  # it begins: nobody holds generation 2
    assert driver._jobs["j"].row.granted == 1
    reset.set()
    await planning(driver, 2)
    answer.set()
    await question
    assert driver.generation_of("j") == 2
    assert servers(driver) == [("l0", False), ("l1", False), ("l2", False)]


async def test_servers_elsewhere_are_named_in_the_order_of_the_beginning(
    logs: FakeLogs, store: MemoryStore
) -> None:
    """Of an operator who has heard nothing of a server that came back empty, under its own address."""
    first = await running(logs, store)
    for generation, address in ((2, "l0"), (3, "l0"), (4, "l1")):
        logs.forgotten = {address}
        await first._questions.space(first._jobs["j"], generation - 1)
        await planning(first, generation)
    assert servers(first) == [("l0", True), ("l1", True), ("l0", True), ("l0", False), ("l1", False)]
    logs.forgotten = {"l0"}
    await first._questions.space(first._jobs["j"], 4)
    await planning(first, 5)
    assert servers(first)[-2:] == [("l1", False), ("l0", False)]
    first.stop()
    moved = await driver_of(logs, store, ("new0", "new1"))
    assert servers(moved)[-2:] == [("new1", False), ("new0", False)]


async def test_who_replaces_a_server_that_never_came(
    driver: Driver, logs: FakeLogs, store: MemoryStore
) -> None:
    logs.troubles["l2"] = LogUnavailable("not there")
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l0", add="l2"))
    await view_with(driver, lambda view: view.state == pb.FENCING)
    row = driver._jobs["j"].row
    assert unreplaced(row) == 1
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l2", add="l3"))
    await planning(driver, 3)
    assert servers(driver)[-2:] == [("l2", True), ("l3", False)]
    assert unreplaced(row) == 0
    driver.stop()
    with pytest.raises(UsageError, match="names l7, job j is kept on l1,l3"):
        await driver_of(logs, store, ("l7",))


async def test_a_job_that_begins_does_not_wait_for_a_server_that_another_one_has_given_up(
    driver: Driver, logs: FakeLogs
) -> None:
    logs.troubles["l1"] = LogUnavailable("connection refused")
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l1"))
    await planning(driver, 2)
    await driver.join("k", join())
    words = "does not answer, and another job has given it up"
    await until(lambda: [each.lost for each in driver._jobs["k"].row.log_servers] == ["", words])
    # Once it has answered a job, it is like any other.
    logs.troubles.clear()
    await driver.apply("j", pb.ChangeLogServersRequest(add="l1"))
    await planning(driver, 3)
    logs.troubles["l1"] = LogUnavailable("connection refused")
    await driver.join("n", join())
    await until(lambda: driver._jobs["n"].row.blocked)
    assert [each.lost for each in driver._jobs["n"].row.log_servers] == ["", ""]


async def test_a_server_that_has_answered_since_is_not_taken_for_given_up(
    driver: Driver, logs: FakeLogs
) -> None:
    """Job j has lost it long ago and begins another generation; job k uses it and asks it for its space."""
    await driver.apply("j", pb.ChangeLogServersRequest(lost="l1"))
    await planning(driver, 2)
    await driver.join("k", join())
    await until(lambda: driver._jobs["k"].row.granted)
    await recover(driver, 2, version=None)
    await die(driver, 3)
    logs.troubles["l1"] = LogUnavailable("connection refused")
    await driver.join("n", join())
    await until(lambda: driver._jobs["n"].row.blocked)
    assert [each.lost for each in driver._jobs["n"].row.log_servers] == ["", ""]


async def test_what_a_lost_server_has_moved_is_read_by_another_one_until_a_checkpoint_covers_it(
    logs: FakeLogs, store: MemoryStore
) -> None:
    logs.cold = {"l0": "cold0", "l1": "cold1"}
    driver = await running(logs, store)
    job = driver._jobs["j"]
    (first,) = [copy.server for copy in logs_of_rank(driver).copies]
    lost, other = f"l{first}", f"l{1 - first}"
    await driver.apply("j", pb.HeartbeatRequest(**sender(), version=3))
    await driver.apply("j", pb.ChangeLogServersRequest(lost=lost))
    await planning(driver, 2)
    assert [copy.server for copy in logs_of_rank(driver).moved] == [first]
    await recover(driver, 2, version=3)
    assert (job.row.log_servers[first].cold, job.row.log_servers[first].below) == (f"cold{first}", 3)

    # The log of the new server begins at version 3; what was moved leads to it, and nothing of it counts behind.
    stream = record.boundary(0, "F", 0, 1)
    logs.moved = {f"cold{first}": [StreamSummary(stream=stream, records=9, first_step=0, last_step=7)]}
    found: list[dict[str, object]] = []
    combined = job.places.combined

    def note(*taken: object) -> object:
        streams, sources = combined(*taken)  # type: ignore[arg-type]
        found.append({"stream": streams[stream], "sources": sources[stream]})
        return streams, sources

    job.places.combined = note  # type: ignore[method-assign, assignment]
    logs.held = {other: [StreamSummary(stream=stream, records=5, first_step=3, last_step=5)]}
    await die(driver, 3)
    await recover(driver, 3, version=5)
    assert ("inventory", other, "j", f"cold{first}") in logs.calls
    (last,) = found
    assert last["sources"] == [first, 1 - first]
    assert replace(last["stream"], reason="") == StreamSummary(  # type: ignore[type-var]
        stream=stream, records=5, first_step=0, last_step=5
    )
    job.row.sources = {stream: [first, 1 - first]}
    assert list(views._plan_of(job.row).sources[0].servers) == [f"{other}/cold{first}/3", other]  # type: ignore[union-attr]

    # A checkpoint of version 6 covers all of it.
    assert not [call for call in logs.calls if call[0] == "trim" and call[-1] == f"cold{first}"]
    await driver._questions.trim(job, job.row.generation, 2)
    assert not [call for call in logs.calls if call[0] == "trim" and call[-1] == f"cold{first}"]
    await driver._questions.trim(job, job.row.generation, 3)
    assert ("trim", other, "j", 3, f"cold{first}") in logs.calls


@pytest.mark.parametrize(("now", "counts"), [("{}/3.0", False), ("another/3.0", True)])
async def test_what_a_lost_server_has_moved_does_not_count_once_that_server_is_taken_back(
    logs: FakeLogs, store: MemoryStore, now: str, counts: bool
) -> None:
    """It is emptied, which removes its objects. With another disk it knows nothing of them. ``now``: where it moves
    records then."""
    logs.cold = {"l0": "0/0.0", "l1": "1/0.0"}
    driver = await running(logs, store)
    (first,) = [copy.server for copy in logs_of_rank(driver).copies]
    lost, before = f"l{first}", f"{first}/0.0"
    asked = ("inventory", f"l{1 - first}", "j", before)
    await driver.apply("j", pb.HeartbeatRequest(**sender(), version=3))
    await driver.apply("j", pb.ChangeLogServersRequest(lost=lost))
    await planning(driver, 2)
    await recover(driver, 2, version=3)
    assert asked in logs.calls
    logs.calls.clear()
    logs.cold[lost] = now.format(first)
    await driver.apply("j", pb.ChangeLogServersRequest(add=lost))
    await planning(driver, 3)
    await recover(driver, 3, version=3)
    cold = [server.cold for server in driver._jobs["j"].row.log_servers]
    assert (cold[1 - first], cold[2]) == (f"{1 - first}/0.0", logs.cold[lost])
    assert cold[first] == (before if counts else "")
    assert (asked in logs.calls) is counts
