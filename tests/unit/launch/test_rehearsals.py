"""When a launcher starts a rehearsal, and what it tells the coordinator of it. The nursery and its children are made
up."""

import json
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch import spares
from swift_ft.launch.spares import FAILURES_MAX, SCRIPT_S_MAX, Rehearsals
from swift_ft.launch.worker import Program
from tests.unit.launch.test_spares import FakeNursery

RANKS = [4, 5]
"""Of this machine, by place."""


class FakeLink:
    def __init__(self) -> None:
        self.told: list[tuple[int, int, dict[str, Any]]] = []

    def notify(self, request: pb.RehearsedRequest) -> None:
        fields = {field.name: value for field, value in request.ListFields()}
        self.told.append((fields.pop("rank"), fields.pop("version", 0), fields))


def made(place: int, incarnation: str, version: int) -> Program:
    env = {"PLACE": str(place), "SWIFT_INCARNATION": incarnation}
    return Program(env=env, script="", module=False, args=[], cwd="", rehearse=version)


def view_of(*recorded: tuple[int, int], done: dict[int, int] | None = None, **fields: Any) -> pb.View:
    """`recorded`: (rank, from version)."""
    there = {"state": pb.RUNNING, "generation": 3, "checkpoints": [10, 20]}
    known = [pb.Rehearsal(rank=r, recorded=v, done=(done or {}).get(r, 0)) for r, v in recorded]
    return pb.View(**{**there, **fields}, rehearsals=known)


BOTH = view_of((4, 20), (5, 20))


class World:
    def __init__(self) -> None:
        self.nursery: Any = FakeNursery()
        self.link: Any = FakeLink()
        self.rehearsals = Rehearsals(self.nursery, self.link, made)

    def turn(self, view: pb.View | None = BOTH, *, quiet: bool = True) -> None:
        self.rehearsals.on_view(view)
        if quiet:
            self.rehearsals.tend(view, RANKS)

    def begun(self) -> list[tuple[str, int | None]]:
        """(place, version) of each that was started."""
        return [(child.assigned.env["PLACE"], child.assigned.rehearse) for child in self.nursery.children]

    def says(self, *, passing: bool = False, steps: int = 4, difference: str = "", why_not: str = "") -> None:
        child = self.nursery.children[-1]
        found = {"steps": steps, "difference": difference, "why_not": why_not, "passing": passing}
        child.said += json.dumps(found).encode() + b"\n"
        self.rehearsals.handle_output(child)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(spares.events, "now", lambda: now[0])
    return now


def test_one_begins_at_a_time_and_the_coordinator_is_told() -> None:
    world = World()
    for _ in range(3):
        world.turn()
    assert world.begun() == [("0", 20)]
    assert world.nursery.children[0].assigned.env["SWIFT_INCARNATION"] == "i0"
    assert world.link.told == [(4, 20, {"under_way": True})]


def test_what_came_of_it_is_told_and_the_next_rank_is_rehearsed() -> None:
    world = World()
    world.turn()
    world.says(difference="output 0 of module norm differs")
    assert world.link.told[-1] == (4, 20, {"steps": 4, "difference": "output 0 of module norm differs"})
    world.turn()  # the View is still the old one
    world.turn()
    assert world.begun() == [("0", 20), ("1", 20)]
    world.says()
    world.turn()
    assert len(world.begun()) == 2, "each version once"
    assert not any(child.unwanted for child in world.nursery.children), "they end by themselves"


def test_what_it_says_may_come_in_parts() -> None:
    world = World()
    world.turn()
    child = world.nursery.children[0]
    child.said = b'{"steps": 4'
    world.rehearsals.handle_output(child)
    assert len(world.link.told) == 1
    child.said += b', "difference": "", "why_not": "", "passing": false}\n'
    world.rehearsals.handle_output(child)
    assert world.link.told[-1] == (4, 20, {"steps": 4})


def test_who_was_rehearsed_least_comes_first() -> None:
    world = World()
    world.turn(view_of((4, 20), (5, 20), done={4: 2, 5: 1}))
    assert world.begun() == [("1", 20)]


@pytest.mark.parametrize(
    "view",
    [
        None,
        view_of((6, 20)),  # another machine's
        view_of((4, 10)),  # the log is trimmed below 20
        view_of(),
        pb.View(state=pb.RUNNING, checkpoints=[20], rehearsals=[pb.Rehearsal(rank=4)]),
        view_of((4, 20), state=pb.PLANNING),
        view_of((4, 0), checkpoints=[]),
    ],
)
def test_nothing_begins_where_there_is_nothing_to_rehearse(view: pb.View | None) -> None:
    world = World()
    world.turn(view)
    assert world.begun() == []
    assert world.link.told == []


def test_the_first_checkpoint_counts() -> None:
    world = World()
    world.turn(view_of((5, 0), checkpoints=[0]))
    assert world.begun() == [("1", 0)]


def test_nothing_begins_while_a_rank_is_to_be_replaced_or_the_fork_server_is_not_ready() -> None:
    world = World()
    world.turn(quiet=False)
    world.nursery.ready = False
    world.turn()
    assert world.begun() == []


def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    world = World()
    world.nursery.full = True
    world.turn()
    assert world.link.told == []
    world.nursery.full = False
    world.turn()
    assert world.begun() == [("0", 20)]


@pytest.mark.parametrize(
    "view",
    [
        None,
        view_of((4, 20), state=pb.FENCING),
        view_of((4, 20), generation=4),
        view_of(state=pb.FINISHED),
    ],
)
def test_it_gives_way_at_once_where_something_is_to_be_recovered(view: pb.View | None) -> None:
    world = World()
    world.turn()
    world.turn(view, quiet=False)
    assert world.nursery.children[0].unwanted
    assert world.link.told == [(4, 20, {"under_way": True})], "the coordinator knows"
    child = world.nursery.children[0]
    child.exit_code = -9
    world.rehearsals.ended(child)
    world.says()  # late
    assert len(world.link.told) == 1


def test_it_gives_way_to_a_lost_rank_before_any_view_says_so() -> None:
    world = World()
    world.rehearsals.give_way()
    world.turn()
    world.rehearsals.give_way()
    assert world.nursery.children[0].unwanted
    world.rehearsals.give_way()
    world.turn(quiet=False)
    assert world.link.told == [(4, 20, {"under_way": True})]


def test_one_that_gave_way_does_not_begin_again_at_that_version() -> None:
    world = World()
    world.turn()
    world.turn(view_of((4, 20), (5, 20), generation=4), quiet=False)
    world.turn(view_of((4, 20), generation=4))
    assert world.begun() == [("0", 20)]
    world.turn(view_of((4, 30), generation=4, checkpoints=[20, 30]))
    assert world.begun() == [("0", 20), ("0", 30)]


def test_after_three_failures_in_a_row_a_rank_is_not_rehearsed_any_more() -> None:
    world = World()
    for attempt in range(FAILURES_MAX + 2):
        version = 20 + 10 * attempt
        world.turn(view_of((4, version), checkpoints=[version]))
        if len(world.begun()) > attempt:
            world.says(why_not="the script has ended", steps=0)
            assert world.nursery.children[-1].unwanted
    assert len(world.begun()) == FAILURES_MAX
    said = [fields["why_not"] for _, _, fields in world.link.told if "why_not" in fields]
    assert said == [
        "the script has ended",
        "the script has ended",
        f"the script has ended; no more are tried, after {FAILURES_MAX}",
    ]
    world.turn(view_of((5, 70), checkpoints=[70]))
    assert world.begun()[-1] == ("1", 70), "the other one is"


def test_one_that_is_done_forgives_the_failures_before() -> None:
    world = World()
    for attempt in range(2 * FAILURES_MAX):
        version = 20 + 10 * attempt
        world.turn(view_of((4, version), checkpoints=[version]))
        world.says(why_not="" if attempt % FAILURES_MAX == 0 else "the script has ended")
    assert len(world.begun()) == 2 * FAILURES_MAX


def test_what_passes_is_no_failure() -> None:
    world = World()
    for attempt in range(FAILURES_MAX + 1):
        version = 20 + 10 * attempt
        world.turn(view_of((4, version), checkpoints=[version]))
        world.says(why_not="the job has moved on", passing=True)
    assert len(world.begun()) == FAILURES_MAX + 1
    assert world.link.told[-1] == (4, version, {"why_not": "the job has moved on"})


def test_a_process_that_ends_without_a_word_is_a_failure() -> None:
    world = World()
    world.turn()
    child = world.nursery.children[0]
    child.exit_code = -11
    world.rehearsals.ended(child)
    assert world.link.told[-1] == (4, 20, {"why_not": "its process has ended (exit code -11)"})
    world.turn()
    assert world.begun() == [("0", 20), ("1", 20)]


def test_one_that_takes_too_long_is_ended(clock: list[float]) -> None:
    world = World()
    world.turn()
    clock[0] += SCRIPT_S_MAX
    world.turn()
    assert not world.nursery.children[0].unwanted
    clock[0] += 1.0
    world.turn()
    assert world.nursery.children[0].unwanted
    assert world.link.told[-1] == (4, 20, {"why_not": f"it took longer than {SCRIPT_S_MAX:g} s"})
