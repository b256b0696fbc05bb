"""Machines without numbers: who gets which place, when, and what a lost one leaves behind."""

from typing import Any, cast

import grpc
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import driver as meeting_module
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import Meetings, TooMany
from swift_ft_services.coordinator.service import Context, Servicer, _wrong_meeting
from swift_ft_services.coordinator.timeouts import Timing
from tests.memory_store import MemoryStore
from tests.unit.coordinator.driver_world import (
    Aborted,
    Caller,
    FakeClock,
    FakeLogs,
    driver_of,
    run_to_running,
)

LEASE_S = 15.0
TIMING = Timing()
BEGAN = 100.0


class World:
    """Launchers and their coordinator, on a clock that a test moves."""

    def __init__(self, machines: str = "2:2") -> None:
        self.least, self.most = map(int, machines.split(":"))
        self.now = BEGAN
        self.over: bool | None = None
        self.bereft: list[str] = []
        self.held: dict[str, pb.MeetReply] = {}
        self.restart()

    def restart(self) -> None:
        self.meetings = Meetings(self.now)

    def request(self, run: str, ranks: int = 4, **fields: Any) -> pb.MeetRequest:
        machine = pb.Machine(address=run, port=1, ranks=ranks)
        wanted: dict[str, Any] = {
            "machines_min": self.least,
            "machines_max": self.most,
            "lease_s": LEASE_S,
            "last_call_s": 3,
            "job": "j",
            "held": self.held.get(run),
        }
        return pb.MeetRequest(run=run, machine=machine, **(wanted | fields))

    def say(self, run: str, **fields: Any) -> tuple[int, list[str]] | str | int:
        """Its place and all machines; or why it has none; or how many are here."""
        request = self.request(run, **fields)
        assert _wrong_meeting(request) == ""
        reply = self.meetings.say(request, self.now, over=self.over)
        if not reply.machines:
            return reply.over or reply.here
        self.held[run] = reply
        return reply.place, [machine.address for machine in reply.machines]

    def wait(self, seconds: float, *alive: str) -> None:
        """`alive` speak meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now += 1.0
            for run in alive:
                self.say(run)
            self.meetings.expire(self.now, TIMING, lambda _job: self.bereft)


@pytest.fixture
def world() -> World:
    """Two machines in their places, and a job that runs."""
    world = World()
    assert world.say("a") == 1
    assert world.say("b") == (1, ["a", "b"])
    assert world.say("a") == (0, ["a", "b"])
    world.over = False
    return world


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_comes_gets_the_place_of_a_lost_one_and_nobody_else_notices(
    lost: int, world: World
) -> None:
    living = "ab"[1 - lost]
    before = world.say(living)
    world.wait(LEASE_S - 1.0, living)
    assert world.say("c") == 3  # the other one may come back yet
    world.wait(3.0, living, "c")
    assert world.say("c") == (lost, ["c", "b"] if lost == 0 else ["a", "c"])
    assert before == (1 - lost, ["a", "b"])
    assert world.say(living)[0] == 1 - lost  # type: ignore[index]


def test_a_machine_that_was_silent_keeps_its_place_until_another_one_has_it(world: World) -> None:
    world.wait(2 * LEASE_S, "b")
    assert world.say("a") == (0, ["a", "b"])
    world.wait(2 * LEASE_S, "b")
    assert world.say("c") == (0, ["c", "b"])
    assert world.say("a") == "this machine was silent for more than 15 s, and another one has its place"


def test_a_launcher_that_ends_leaves_its_place_at_once(world: World) -> None:
    world.say("a", leaves=True)
    assert world.say("c") == (0, ["c", "b"])


def test_one_that_is_too_many_waits_for_a_place_and_ends_with_the_job(world: World) -> None:
    assert world.say("c") == 3
    world.wait(LEASE_S + 2.0, "b", "c")
    assert world.say("c") == (0, ["c", "b"])
    assert world.say("d") == 3
    world.over = True
    world.say("b", leaves=True)
    assert world.say("d") == 2  # a rank of the other one may have files of its own to save
    world.say("c", leaves=True)
    assert world.say("d") == "the job is over"


def test_a_spare_is_known_to_a_coordinator_that_has_just_come_back(world: World) -> None:
    """The job ends before that coordinator gives out places."""
    world.say("c")
    world.restart()
    assert world.say("c") == 1
    world.say("a")
    world.say("b")
    world.wait(1.0, "a", "b", "c")
    world.over = True
    world.say("a", leaves=True)
    world.say("b", leaves=True)
    assert world.say("c") == "the job is over"


def test_a_spare_of_the_start_before_has_no_place_in_the_next_one(world: World) -> None:
    assert world.say("c") == 3
    world.over = True
    assert world.say("d") == 4
    assert world.say("e") == 5
    for run in "ab":
        world.say(run, leaves=True)
    assert world.say("d") == (0, ["d", "e"])
    assert world.say("c") == "the job is over"


def test_who_waits_is_not_late_while_one_of_many_still_saves() -> None:
    world = World("3:3")
    for run in "abc":
        world.say(run)
    world.over = False
    assert world.say("d") == 4
    world.over = True
    for run in "ab":
        world.say(run, leaves=True)
    assert world.say("d") == 3


def test_a_job_that_is_over_is_started_again_once_its_old_machines_have_left(world: World) -> None:
    world.over = True
    assert world.say("c") == 3
    assert world.say("d") == 4
    world.say("a", leaves=True)
    assert world.say("c") == 3  # not beside one of before
    world.say("b", leaves=True)
    assert world.say("c") == (0, ["c", "d"])
    assert world.say("d") == (1, ["c", "d"])


def test_all_are_lost_and_all_come_again(world: World) -> None:
    world.wait(LEASE_S + 2.0)
    assert world.say("c") == 1
    assert world.say("d") == (1, ["c", "d"])


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_coordinator_that_begins_anew_knows_everybodys_place_again(first: str, world: World) -> None:
    world.restart()
    assert world.say("c") == 1  # a spare, or one that comes for a lost one: those who hold a place come first
    assert world.say("d") == 2
    second = "ab".replace(first, "")
    for run in (first, second):
        assert world.say(run)[0] == "ab".index(run)  # type: ignore[index]
    world.wait(2 * LEASE_S, "a", "c")
    assert world.say("c") == (1, ["a", "c"])


def test_a_machine_that_is_silent_and_has_lost_its_ranks_makes_room_after_half_their_lease(
    world: World,
) -> None:
    world.say("c")
    world.bereft = ["b"]
    world.wait(TIMING.lease_s, "a", "b", "c")
    assert world.say("c") == 3, "it speaks: its ranks are started again"
    world.wait(TIMING.lease_s / 2 + 1, "a", "c")
    assert world.say("c") == (1, ["a", "c"])


def test_a_coordinator_that_was_away_itself_takes_nobodys_place(world: World) -> None:
    world.now += 10 * LEASE_S
    world.meetings.expire(world.now, TIMING, lambda _job: ())
    assert world.say("c") == 3
    assert world.say("a") == (0, ["a", "b"])


def test_enough_machines_begin_after_the_last_call_and_more_wait_for_a_place() -> None:
    world = World("2:3")
    assert world.say("a") == 1
    world.wait(5.0, "a")
    assert world.say("b") == 2
    world.wait(2.0, "a", "b")
    assert world.held == {}
    world.wait(2.0, "a", "b")
    assert world.say("b") == (1, ["a", "b"])
    assert world.say("c") == 3
    world.wait(LEASE_S + 2.0, "b", "c")
    assert world.say("c") == (0, ["c", "b"])


def test_the_most_machines_begin_at_once() -> None:
    world = World("1:2")
    assert world.say("a") == 1
    assert world.say("b") == (1, ["a", "b"])


def test_a_place_that_there_is_no_more_is_lost() -> None:
    world = World("1:3")
    world.say("a")
    world.wait(4.0, "a")
    machines = [pb.Machine(address=name, port=1, ranks=4) for name in "abc"]
    world.held["d"] = pb.MeetReply(place=2, machines=machines)
    assert "another one has its place" in str(world.say("d"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"machines_max": 3}, "--nnodes is 2:3 here and 2 on another machine"),
        ({"ranks": 8}, "--nproc-per-node is 8 here, and was 4 on the machine that was lost"),
    ],
)
def test_a_machine_that_wants_something_else_is_refused(
    fields: dict[str, Any], words: str, world: World
) -> None:
    world.say("a", leaves=True)
    with pytest.raises(Refusal, match=words):
        world.say("c", **fields)
    assert world.say("d") == (0, ["d", "b"])


@pytest.mark.parametrize(
    "fields",
    [
        {"run": ""},
        {"machine": pb.Machine(address="a", port=1, ranks=0)},
        {"machine": pb.Machine(address="a", port=1 << 16, ranks=1)},
        {"machines_min": 0},
        {"machines_min": 3},
        {"machines_max": 1 << 20},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"last_call_s": float("inf")},
        {"held": pb.MeetReply(place=1, machines=[pb.Machine(ranks=1)])},
        {"held": pb.MeetReply(place=0, machines=[pb.Machine(ranks=1)] * 3)},
        {"held": pb.MeetReply(place=0, machines=[pb.Machine()])},
    ],
)
def test_what_nobody_can_mean(fields: dict[str, Any]) -> None:
    request = World().request("a")
    for name, value in fields.items():
        if isinstance(value, str | int | float):
            setattr(request, name, value)
        else:
            getattr(request, name).CopyFrom(value)
    assert _wrong_meeting(request)


def test_a_meeting_is_forgotten_when_nobody_is_there(world: World) -> None:
    assert len(world.meetings) == 1
    world.wait(LEASE_S + 2.0)
    assert len(world.meetings) == 0


def test_the_first_machine_of_a_new_start_is_no_spare(world: World) -> None:
    world.over = True
    for run in "ab":
        world.say(run, leaves=True)
    for _ in range(2):
        assert world.say("c") == 1
    assert world.say("d") == (1, ["c", "d"])


def test_a_spare_with_other_ranks_gets_no_place(world: World) -> None:
    assert world.say("c", ranks=8) == 3
    world.say("a", leaves=True)
    assert world.say("c", ranks=8) == 2
    assert world.say("d") == (0, ["d", "b"])


def test_what_is_kept_of_a_machine_is_short(world: World) -> None:
    request = world.request("a")
    assert request.held.machines
    world.meetings.say(request, world.now, over=False)
    assert not request.HasField("held")


def test_machines_of_a_job_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "MACHINES_MAX", 2)
    world = World("1:5")
    for run in "ab":
        world.say(run)
    with pytest.raises(Refusal, match="2 machines are here: no more"):
        world.say("c")


# -- through the service ------------------------------------------------------------------------------------


async def test_launchers_meet_through_the_service(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await driver_of(logs, store, (), clock=clock, jobs_max=1)
    world = World()

    async def meet(run: str, **fields: Any) -> pb.MeetReply:
        return await Servicer(driver).Meet(world.request(run, **fields), cast("Context", Caller()))

    assert (await meet("a")).here == 1
    assert (await meet("b")).place == 1
    with pytest.raises(Aborted, match="another machine") as refused:
        await meet("c", machines_max=3)
    assert refused.value.args[0] is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(Aborted, match="a launcher needs a name"):
        await meet("")
    with pytest.raises(TooMany):
        driver.meet("other", world.request("c"))
    clock.now += 2 * LEASE_S
    await driver.tick()  # it was away itself
    await driver.tick()
    assert (await meet("c")).here == 3
    for _ in range(8):
        clock.now += Timing().stall_s / 2
        await driver.tick()
    assert driver.meet("other", world.request("c", job="other")).here == 1


async def test_of_a_job_under_way_a_new_coordinator_waits_for_those_who_hold_a_place(
    logs: FakeLogs, store: MemoryStore, clock: FakeClock
) -> None:
    driver = await driver_of(logs, store, (), clock=clock)
    world = World("1:1")
    assert driver.meet("j", world.request("a")).machines
    await run_to_running(driver)
    driver.stop()
    again = await driver_of(logs, store, (), clock=clock)
    assert not again.meet("j", world.request("b")).machines
    clock.now += LEASE_S
    assert again.meet("j", world.request("b")).machines
