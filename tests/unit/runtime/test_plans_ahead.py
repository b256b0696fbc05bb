"""Plans that ranks make for each other's loss (`swift_ft.train.rerouting`)."""

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.comm.message_collectives import Messages
from swift_ft.planner import Assignment
from swift_ft.planner.schedule import Action
from swift_ft.train import rerouting
from swift_ft.train.rerouted_call import Call, Orders, Seconds, equal_seconds, planned
from swift_ft.train.rerouting import KEPT, PlansAhead, alike, next_lost, packed, unpacked
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.test_gradient_chain import in_parallel

STAGES, REPLICAS, MICROBATCHES = 2, 3, 4
SLOTS = STAGES * REPLICAS


def calls_of(assignment: Assignment) -> list[Call]:
    owners = []
    for stage in range(STAGES):
        for origin in range(REPLICAS):
            told = [assignment.owner(stage, origin, mb) for mb in range(MICROBATCHES)]
            owners.append(((stage, origin), tuple(owner for owner in told if owner is not None)))
    cap = tuple((slot, 2 * STAGES) for slot in assignment.occupied)
    return [Call(tuple(owners), STAGES, MICROBATCHES, True, cap, False)]


def full() -> Assignment:
    return Assignment.grid(SLOTS, replicas=REPLICAS)


def without(*lost: int) -> Assignment:
    held = {slot: member for slot, member in full().members.items() if slot not in lost}
    return full().held_by(held).rerouted()


actions = st.builds(
    Action, st.sampled_from("FBIW"), st.integers(0, 4095), st.integers(0, 1023), st.integers(0, 65535)
)


@given(st.dictionaries(st.integers(0, 1 << 20), st.lists(actions, max_size=5).map(tuple), max_size=4))
def test_orders_come_back_as_they_were(orders: Orders) -> None:
    assert unpacked(packed(orders)) == orders


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_loss_that_leaves_a_peer_is_planned_by_one_rank(
    stages: int, replicas: int, data: st.DataObject
) -> None:
    world = Assignment.grid(stages * replicas, replicas=replicas)
    there = data.draw(st.sets(st.integers(0, stages * replicas - 1), min_size=1))
    world = world.held_by({slot: slot for slot in there})
    planned_for = [next_lost(world, slot) for slot in world.occupied]
    with_peers = {slot for slot in world.occupied if len(world.group(slot)) > 1}
    assert set(planned_for) - {None} == with_peers or (len(with_peers) == 1)
    assert all(lost != slot for slot, lost in zip(world.occupied, planned_for, strict=True))


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (((1.0, 1.0, 1.0), (1.0, 1.15, 1.0)), True),
        (((1.0, 1.0, 1.0), (1.0, 1.25, 1.0)), False),
    ],
)
def test_a_plan_is_made_again_once_parts_take_another_time(other: Seconds, is_alike: bool) -> None:
    assert alike(((1.0, 1.0, 1.0), (1.0, 1.0, 1.0)), other) is is_alike


class World:
    """The group of all ranks, seen from one of them, in one generation."""

    def __init__(self, network: Network, slots: tuple[int, ...], slot: int) -> None:
        self.present = slots
        wire = LocalWire(network, slots.index(slot))
        self._messages = Messages(wire, slots.index(slot), len(slots))

    def gathered(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own) for _ in self.present]
        self._messages.all_gather(parts, own)
        return parts

    def run(self, run: Any) -> None:
        run(self._messages)


class Ranks:
    """Of one job, in one generation after the other."""

    def __init__(self) -> None:
        self.plans = {slot: PlansAhead(slot, Any) for slot in range(SLOTS)}  # type: ignore[arg-type]

    def prepare(self, assignment: Assignment, seconds: Seconds) -> None:
        for slot in assignment.occupied:
            self.plans[slot].prepare(assignment, calls_of, seconds)
        for slot in assignment.occupied:
            thread = self.plans[slot]._thread
            assert thread is not None
            thread.join(60)

    def agree(self, assignment: Assignment) -> list[bool]:
        network, slots = Network(), assignment.occupied

        def run(index: int) -> bool:
            plans = self.plans[slots[index]]
            plans._world = World(network, slots, slots[index])  # type: ignore[assignment]
            plans.begin()
            return plans.agree(calls_of(assignment))

        agreed = in_parallel(len(slots), run)
        assert network.left() == 0
        return agreed

    def orders(self, assignment: Assignment, seconds: Seconds) -> list[Orders]:
        (call,) = calls_of(assignment)
        return [dict(self.plans[slot].routes(call, seconds).orders) for slot in assignment.occupied]


MEASURED = ((1.0, 0.8, 1.4), (1.0, 1.1, 0.7))
LATER = ((1.0, 1.8, 0.4), (1.0, 0.1, 1.7))


@pytest.mark.parametrize("lost", range(SLOTS))
def test_each_loss_has_been_planned_for_by_a_survivor(lost: int) -> None:
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    left = without(lost)
    assert ranks.agree(left) == [True] * (SLOTS - 1)
    (call,) = calls_of(left)
    assert ranks.orders(left, LATER) == [planned(call, MEASURED).orders] * (SLOTS - 1), "as it was made ahead"


def test_a_rank_that_knows_of_other_calls_holds_nobody_up() -> None:
    """Nobody uses a plan that not all have: they would walk by different ones."""
    ranks, network, left = Ranks(), Network(), without(1)
    ranks.prepare(full(), MEASURED)

    def run(index: int) -> bool:
        plans = ranks.plans[left.occupied[index]]
        plans._world = World(network, left.occupied, left.occupied[index])  # type: ignore[assignment]
        return plans.agree([] if index == 2 else calls_of(left))

    in_parallel(SLOTS - 1, run)
    assert network.left() == 0
    (call,) = calls_of(left)
    assert ranks.orders(left, LATER) == [planned(call, LATER).orders] * (SLOTS - 1)


def test_a_second_loss_is_planned_for_while_the_first_one_is_missing() -> None:
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    assert all(ranks.agree(without(1)))
    ranks.prepare(without(1), MEASURED)
    assert ranks.agree(without(1, 5)) == [True] * (SLOTS - 2)
    assert len({str(orders) for orders in ranks.orders(without(1, 5), LATER)}) == 1


def test_what_nobody_has_planned_for_all_plan_alike() -> None:
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    assert ranks.agree(without(0, 4)) == [False] * (SLOTS - 2)
    (call,) = calls_of(without(0, 4))
    assert ranks.orders(without(0, 4), LATER) == [planned(call, LATER).orders] * (SLOTS - 2)


def test_a_plan_that_is_made_too_late_is_not_used() -> None:
    """The thread of one rank ends while all have begun to plan for themselves: its plan is another one."""
    ranks = Ranks()
    assert ranks.agree(without(1)) == [False] * (SLOTS - 1)
    (call,) = calls_of(without(1))
    ranks.plans[0]._plan(1, [call], MEASURED)
    assert planned(call, MEASURED).orders != planned(call, LATER).orders
    assert ranks.orders(without(1), LATER) == [planned(call, LATER).orders] * (SLOTS - 1)


def test_what_one_has_all_have_behind_a_loss() -> None:
    """The rank that had made the plan is lost next, and the first one comes back and is lost again."""
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    assert all(ranks.agree(without(1)))
    ranks.plans[0] = PlansAhead(0, Any)  # type: ignore[arg-type]  # another process
    assert all(ranks.agree(without(1)))


def test_nothing_is_planned_twice_for_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Seconds] = []

    def counted(call: Call, seconds: Seconds) -> Any:
        made.append(seconds)
        return planned(call, seconds)

    monkeypatch.setattr(rerouting, "planned", counted)
    plans = PlansAhead(0, Any)  # type: ignore[arg-type]
    near = ((1.0, 0.85, 1.4), (1.0, 1.1, 0.7))
    for seconds in (MEASURED, near, LATER):
        plans.prepare(full(), calls_of, seconds)
        assert plans._thread is not None
        plans._thread.join(60)
    assert made == [MEASURED, LATER]


def test_a_plan_that_came_from_another_is_made_again_by_what_is_measured_now() -> None:
    """Nobody knows by what it was made."""
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    ranks.agree(without(1))
    kept = ranks.plans[2]
    (call,) = calls_of(without(1))
    assert kept._kept[call][0] is None
    assert ranks.plans[0]._kept[call][0] == MEASURED, "who has made it knows"


def test_what_was_agreed_on_is_forgotten_with_the_generation() -> None:
    """A process that is new has not agreed on it: all plan alike, or they would walk by different orders."""
    ranks = Ranks()
    ranks.prepare(full(), MEASURED)
    ranks.agree(without(1))
    (call,) = calls_of(without(1))
    for plans in ranks.plans.values():
        plans.begin()
    ranks.plans[1] = PlansAhead(1, Any)  # type: ignore[arg-type]
    orders = [ranks.plans[slot].routes(call, LATER).orders for slot in range(SLOTS)]
    assert orders == [planned(call, LATER).orders] * SLOTS


def test_what_is_due_while_another_plan_is_made_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    going, made = threading.Event(), list[Seconds]()

    def slow(call: Call, seconds: Seconds) -> Any:
        going.wait(30)
        made.append(seconds)
        return planned(call, seconds)

    monkeypatch.setattr(rerouting, "planned", slow)
    plans = PlansAhead(0, Any)  # type: ignore[arg-type]
    plans.prepare(full(), calls_of, MEASURED)
    plans.prepare(full(), calls_of, LATER)
    plans.go_on()
    going.set()
    assert plans._thread is not None
    plans._thread.join(60)
    assert made == [MEASURED]
    plans.go_on()
    plans._thread.join(60)
    assert made == [MEASURED, LATER]
    plans.go_on()
    assert not plans._thread.is_alive()


def test_the_oldest_plans_are_forgotten() -> None:
    plans = PlansAhead(0, Any)  # type: ignore[arg-type]
    (call,) = calls_of(full())
    for count in range(KEPT + 3):
        plans._keep(call._replace(microbatches=count), equal_seconds(STAGES), {0: ()})
    assert [kept.microbatches for kept in plans._kept] == list(range(3, KEPT + 3))
