"""Assignments: cases one by one, then random histories of members that leave and come, held to the invariants."""

import random
import re
from collections import Counter
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings

from swift_ft.planner import Assignment, Plan, PlanConfig, Report, Slot, Strategy, plan

AT_10 = (10,)


def dropped_origins(assignment: Assignment) -> tuple[int, ...]:
    """Those whose batches nobody computes, at one stage at least."""
    computed = [set(assignment.origins(stage)) for stage in range(assignment.num_stages)]
    return tuple(o for o in range(assignment.dp_size) if not all(o in origins for origins in computed))


class TestSlots:
    def test_a_grid_is_numbered_as_a_device_mesh_is(self) -> None:
        grid = Assignment.grid(6, replicas=3)
        assert grid.slots == (Slot(0, 0), Slot(0, 1), Slot(0, 2), Slot(1, 0), Slot(1, 1), Slot(1, 2))
        assert [grid.at(slot.stage_group, slot.dp_rank) for slot in grid.slots] == list(range(6))
        assert grid.occupied == tuple(range(6))
        assert [grid.rank(slot) for slot in range(6)] == list(range(6))
        assert (grid.stage_groups, grid.dp_size, grid.replicas, grid.shards, grid.num_stages) == (
            2,
            3,
            3,
            1,
            2,
        )

    def test_the_process_groups_of_a_full_world(self) -> None:
        sharded = Assignment.grid(8, replicas=2, shards=2)
        assert sharded.process_groups(6) == {
            "world": tuple(range(8)),
            "pipeline": (2, 6),
            "data": (4, 5, 6, 7),
            "replicate": (4, 6),
            "shard": (6, 7),
        }
        assert set(Assignment.grid(4, replicas=2).process_groups(1)) == {"world", "pipeline", "data"}

    @pytest.mark.parametrize(
        ("size", "replicas", "shards", "why"),
        [
            (5, 2, 1, "5 ranks cannot be 2 replicas; start a multiple of 2"),
            (6, 2, 2, "6 ranks cannot be 2 replicas of 2 shards; start a multiple of 4"),
            (0, 1, 1, "0 ranks cannot be 1 replicas; start a multiple of 1"),
        ],
    )
    def test_a_world_that_does_not_divide(self, size: int, replicas: int, shards: int, why: str) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
            Assignment.grid(size, replicas=replicas, shards=shards)

    def test_what_ranks_have_told_is_put_in_order(self) -> None:
        told = Assignment.from_reports(
            num_stages=4,
            stages={slot: (0, 3) if slot in (1, 4, 5) else (1, 2) for slot in range(6)},
            shards={4: 1, 5: 1},
        )
        assert told.groups() == ((1, 4, 5), (0, 2, 3))
        assert told.holders(3) == (1, 4, 5)
        assert [told.slots[slot].dp_rank for slot in range(6)] == [0, 0, 1, 2, 1, 2]
        assert [told.peers(slot) for slot in range(6)] == [(2, 3), (), (0, 3), (0, 2), (5,), (4,)]
        assert [told.slot_at(2, origin) for origin in range(3)] == [0, 2, 3]

    @pytest.mark.parametrize(
        ("num_stages", "stages", "why"),
        [
            (2, {0: (0,), 1: (0,)}, "no rank runs stage 1 of 2"),
            (1, {0: (0,), 1: ()}, "rank 1 runs none of the 1 stages"),
            (
                3,
                {0: (0, 2), 1: (1,), 2: (0,), 3: (1, 2)},
                "ranks 0 and 2 both run stage 0, but rank 0 runs stages 0, 2 and rank 2 0: "
                "replicas run the same stages",
            ),
            (
                2,
                {0: (0,), 1: (0,), 2: (1,)},
                "stage 0 runs on 2 ranks and stage 1 on 1: every stage needs as many replicas",
            ),
            (1, {0: (0,), 2: (0,)}, "ranks 0, 2 have named their stages, and not those between"),
        ],
    )
    def test_what_cannot_be_is_said_in_one_line(
        self, num_stages: int, stages: dict[int, tuple[int, ...]], why: str
    ) -> None:
        with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
            Assignment.from_reports(num_stages=num_stages, stages=stages)

    def test_ranks_that_name_no_stage_are_no_replicas(self) -> None:
        told = Assignment.from_reports(num_stages=0, stages={0: (), 1: ()})
        assert told.groups() == ((0,), (1,))
        assert told.peers(0) == ()


class TestVacancy:
    def test_rank_numbers_close_up_and_slots_keep_theirs(self) -> None:
        full = Assignment.grid(4, replicas=2)
        smaller = full.held_by({0: 7, 2: 8, 3: 9})
        assert (smaller.occupied, smaller.vacant) == ((0, 2, 3), (1,))
        assert [smaller.rank(slot) for slot in smaller.occupied] == [0, 1, 2]
        with pytest.raises(KeyError):
            smaller.rank(1)
        assert smaller.process_groups(3) == {"world": (0, 2, 3), "pipeline": (3,), "data": (2, 3)}
        assert smaller.slots == full.slots

    def test_what_nobody_computes_does_not_count_in_a_mean(self) -> None:
        smaller = Assignment.grid(3, replicas=3).held_by({0: 0, 2: 2})
        assert [smaller.owner(0, origin, 0) for origin in range(3)] == [0, None, 2]
        assert smaller.origins(0) == (0, 2)
        assert smaller.contributions(0) == 2
        assert dropped_origins(smaller) == (1,)

    def test_what_is_adopted_counts_again_and_has_one_owner_each(self) -> None:
        adopted = Assignment.grid(3, replicas=3).held_by({0: 0, 2: 2}).adopting({(0, 1): (0, 2, 0)})
        assert [adopted.owner(0, 1, microbatch) for microbatch in range(3)] == [0, 2, 0]
        assert adopted.contributions(0) == 3
        assert dropped_origins(adopted) == ()

    def test_a_stage_without_members(self) -> None:
        lost = Assignment.grid(4, replicas=2).held_by({0: 0, 1: 1})
        assert lost.lost_stages() == (1,)
        assert lost.groups() == ((0, 1),)

    @pytest.mark.parametrize(
        ("members", "adopted", "why"),
        [
            ({0: 1, 1: 1}, {}, "a member holds two slots"),
            ({0: 1, 4: 2}, {}, "slot 4 is not one of 0 to 3"),
            ({0: 1, 1: 2, 2: 3}, {(0, 1): (0,)}, "stage 0 of origin 1 is not vacant"),
            ({0: 1, 2: 3}, {(0, 1): (0, 2)}, "not all of them run"),
            ({0: 1, 2: 3}, {(0, 1): (1,)}, "not all of them run"),
            ({0: 1, 2: 3}, {(0, 1): ()}, "not all of them run"),
        ],
    )
    def test_what_breaks_an_invariant_is_refused(
        self, members: dict[int, int], adopted: dict[tuple[int, int], tuple[int, ...]], why: str
    ) -> None:
        grid = Assignment.grid(4, replicas=2)
        with pytest.raises(ValueError, match=why):
            grid.held_by(members).adopting(adopted)


# --- histories ---

MICROBATCHES = 3


@st.composite
def worlds(draw: st.DrawFn) -> Assignment:
    """Up to three stage groups of up to four slots, of which each runs one stage or two."""
    groups, dp_size, looped = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.booleans())
    stages = {
        slot: (slot // dp_size, slot // dp_size + groups) if looped else (slot // dp_size,)
        for slot in range(groups * dp_size)
    }
    shards = {slot: slot % 2 for slot in stages} if dp_size % 2 == 0 and draw(st.booleans()) else {}
    return Assignment.from_reports(num_stages=groups * (1 + looped), stages=stages, shards=shards)


@st.composite
def histories(draw: st.DrawFn) -> list[Assignment]:
    """Generations of one job: a cell is left, or other members come to one that is vacant; some microbatches of what is
    vacant are adopted, by anybody who runs the stage."""
    world = draw(worlds())
    members, next_member = dict(world.members), len(world.slots)
    found = [world]
    for _ in range(draw(st.integers(1, 6))):
        cell = world.cell(draw(st.sampled_from(range(len(world.slots)))))
        if cell[0] in members:
            for slot in cell:
                del members[slot]
        else:
            members |= {slot: next_member + place for place, slot in enumerate(cell)}
            next_member += len(cell)
        now = world.held_by(members)
        adopted = {
            (stage, now.slots[vacant].dp_rank): tuple(
                draw(
                    st.lists(
                        st.sampled_from(now.holders(stage)), min_size=MICROBATCHES, max_size=MICROBATCHES
                    )
                )
            )
            for vacant in now.vacant
            for stage in now.stages[vacant]
            if now.holders(stage) and draw(st.booleans())
        }
        found.append(now.adopting(adopted))
    return found


@settings(max_examples=300, deadline=None)
@given(histories())
def test_the_invariants_hold_in_every_generation(history: list[Assignment]) -> None:
    first = history[0]
    for now in history:
        assert now.slots == first.slots, "slots are for good"
        assert sorted(now.rank(slot) for slot in now.occupied) == list(range(len(now.occupied)))
        assert sorted((*now.occupied, *now.vacant)) == list(range(len(now.slots)))
        for stage in range(now.num_stages):
            check_owners(now, stage)
        for slot in now.occupied:
            check_groups(now, slot)
        lost = [s for s in range(now.num_stages) if not any(s in now.stages[slot] for slot in now.occupied)]
        assert list(now.lost_stages()) == lost
        dropped = {o for s in range(now.num_stages) for o in set(range(now.dp_size)) - set(now.origins(s))}
        assert set(dropped_origins(now)) == dropped
        event(f"{len(now.vacant)} vacant, {len(dropped)} dropped, {len(lost)} lost")


@settings(max_examples=300, deadline=None)
@given(histories())
def test_who_adopts_is_in_a_whole_pipeline_and_nobody_waits_in_a_circle(history: list[Assignment]) -> None:
    for world in history:
        now = world.adopting({})
        whole = [o for o in range(now.dp_size) if all(now.slots[v].dp_rank != o for v in now.vacant)]
        assert list(now.whole_origins()) == whole
        if not whole and now.vacant:
            with pytest.raises(ValueError, match="no pipeline is whole"):
                now.redistributed()
            continue
        now = now.redistributed()
        assert dropped_origins(now) == ()
        for stage in range(now.num_stages):
            check_owners(now, stage)
        order = {slot: [*now.adopted_by(slot), now.slots[slot].dp_rank] for slot in now.occupied}
        for origin in range(now.dp_size):
            route = now.pipeline(origin)
            assert [now.slots[slot].stage_group for slot in route] == list(range(now.stage_groups))
            assert all(origin in order[slot] for slot in route)
        for slot, origins in order.items():
            assert {now.slots[now.at(0, o)].shard for o in origins} == {now.slots[slot].shard}
            assert origins == [*sorted(set(origins) - set(whole)), *(set(origins) & set(whole))]
            assert len(origins) == 1 or now.slots[slot].dp_rank in whole
        loads = [len(now.adopted_by(now.at(0, o))) for o in whole if now.stage_groups == 1]
        assert not loads or max(loads) - min(loads) <= 1, "they are shared out evenly"


@settings(max_examples=300, deadline=None)
@given(histories())
def test_peers_share_what_is_rerouted(history: list[Assignment]) -> None:
    for world in history:
        now = world.adopting({})
        if now.lost_stages():
            with pytest.raises(ValueError, match="nobody is left of stage group"):
                now.rerouted()
            continue
        now = now.rerouted()
        assert dropped_origins(now) == ()
        for stage in range(now.num_stages):
            check_owners(now, stage)
            for origin in range(now.dp_size):
                if (lost := now.slot_at(stage, origin)) not in now.members:
                    left = now.peers(lost)
                    owners = [now.owner(stage, origin, microbatch) for microbatch in range(2 * len(left))]
                    assert sorted(owners) == sorted([*left, *left]), "all of them, as often"
        cells, parts = now.in_cells(), now.shards
        for stage in range(now.num_stages):
            for origin in range(now.dp_size):
                for mb in range(MICROBATCHES):
                    owner, cell = now.owner(stage, origin, mb), cells.owner(stage, origin // parts, mb)
                    assert owner is not None
                    assert (owner // parts, now.slots[owner].shard) == (cell, origin % parts)
        for shard in range(parts):
            first = now.representatives(shard)
            assert [now.slots[slot].stage_group for slot in first] == list(range(now.stage_groups))
            assert all(slot in now.members and now.slots[slot].shard == shard for slot in first)


def check_owners(now: Assignment, stage: int) -> None:
    """Every microbatch has one owner, who is there and runs the stage; or the origin is named as nobody's."""
    for origin in range(now.dp_size):
        owners = [now.owner(stage, origin, microbatch) for microbatch in range(MICROBATCHES)]
        own = now.slot_at(stage, origin)
        if own in now.members:
            assert owners == [own] * MICROBATCHES
        elif (stage, origin) not in now.adopted:
            assert owners == [None] * MICROBATCHES
        for owner in owners:
            assert (owner is None) == (origin not in now.origins(stage))
            assert owner is None or (owner in now.members and stage in now.stages[owner])
    groups = [g for g, stages in enumerate(now.group_stages) if stages[0] == stage]
    assert [now.contributions(g) for g in groups] == [len(now.origins(stage))] * len(groups)


def check_groups(now: Assignment, slot: int) -> None:
    """All that are in a process group see the same one, and every one of them is in it."""
    groups = now.process_groups(slot)
    for name, slots in groups.items():
        assert slot in slots
        assert list(slots) == sorted(set(slots) & set(now.members))
        assert all(now.process_groups(peer)[name] == slots for peer in slots)
    assert groups["world"] == now.occupied
    assert set(groups["data"]) & set(groups["pipeline"]) == {slot}
    assert set(now.peers(slot)) <= set(groups["data"])


@settings(max_examples=300, deadline=None)
@given(histories(), st.data())
def test_a_plan_for_any_history_brings_every_stage_to_one_version(
    history: list[Assignment], data: st.DataObject
) -> None:
    """Whoever is there after the history, and holds whatever: nobody is planned for that is not there, and no stage is
    left without a state."""
    now = history[-1]
    said = data.draw(reports(now))
    found, reason = plan(said, now, {}, AT_10, PlanConfig())
    assert reason
    if now.lost_stages() or not now.occupied:
        event("a stage without members")
        assert found is None
        return
    assert found is not None, "there is a checkpoint"
    assert [r.rank for r in found.ranks] == list(now.occupied)
    event(", ".join(sorted({r.strategy for r in found.ranks})))
    for group in now.groups():
        mine = [found.of(slot) for slot in group]
        assert len({r.from_version for r in mine}) == 1
        for r in mine:
            assert set(r.sources) <= set(now.peers(r.rank))
            if r.from_version < found.target_version or r.strategy is Strategy.REPLAY:
                assert not now.vacant, "a replay would do without what the first time had"


@settings(max_examples=300, deadline=None)
@given(histories(), st.data())
def test_relabelled_replicas_get_the_same_plan(history: list[Assignment], data: st.DataObject) -> None:
    now = history[-1]
    if now.lost_stages():
        return
    said = data.draw(reports(now))
    relabelled, number = relabel(now, data.draw(st.randoms(use_true_random=False)))
    again = [replace(report, rank=number[report.rank]) for report in said]
    mine, theirs = (
        plan(said, now, {}, AT_10, PlanConfig())[0],
        plan(again, relabelled, {}, AT_10, PlanConfig())[0],
    )
    assert outline(mine, now) == outline(theirs, relabelled)


@st.composite
def reports(draw: st.DrawFn, now: Assignment) -> list[Report]:
    found = []
    for slot in now.occupied:
        kind = draw(st.sampled_from(["whole", "whole", "lost", "voting", "half"]))
        found.append(
            Report(
                rank=slot,
                version=12 if kind in ("whole", "voting") else None,
                undo_to=12 if kind == "half" else None,
                undo_exact=True,
                forward_to=13 if kind == "voting" else None,
            )
        )
    return found


def relabel(now: Assignment, random: random.Random) -> tuple[Assignment, dict[int, int]]:
    """The same generation with its origins in another order; and where each slot has gone."""
    order = list(range(now.dp_size))
    if now.shards == 1:  # else neighbours belong together
        random.shuffle(order)
    number = {
        slot: now.at(now.slots[slot].stage_group, order[now.slots[slot].dp_rank])
        for slot in range(len(now.slots))
    }
    return now.held_by({number[slot]: member for slot, member in now.members.items()}), number


def outline(found: Plan | None, now: Assignment) -> object:
    """A plan, but for who is who among replicas."""
    if found is None:
        return None
    by_group = Counter(
        (now.slots[r.rank].stage_group, r.strategy, r.from_version, len(r.sources)) for r in found.ranks
    )
    return found.target_version, found.exact, by_group
