"""Members come and go, in any order: ids are never used again, and a slot has one member, or none."""

import hypothesis.strategies as st
from hypothesis import event, given, settings

from swift_ft_services.coordinator.job_record import State
from tests.unit.coordinator.transcript import World

RANKS = 3
MOVES = st.lists(
    st.tuples(st.sampled_from(["exited", "join", "wait"]), st.integers(0, RANKS - 1)), max_size=25
)


@settings(max_examples=150, deadline=None)
@given(MOVES, st.booleans())
def test_ids_are_never_used_again(moves: list[tuple[str, int]], leaves_vacant: bool) -> None:
    world = World()
    config = {"replicas": str(RANKS), "strategy": "shrink" if leaves_vacant else "auto"}
    for rank in range(RANKS):
        world.do_join(str(rank), world=str(RANKS), **config)
    world.run("fenced generation=1")
    for rank in range(RANKS):
        world.run(f"durable rank={rank} version=0")
        world.run(f"ready rank={rank} generation=1 version=0 stages=0 of=1")
    assert world.job is not None
    row = world.job.row
    assert row.state is State.RUNNING
    seen = {holder.incarnation: holder.member for holder in row.holders.values()}
    for number, (move, rank) in enumerate(moves):
        if move == "exited":
            world.run(f"exited rank={rank} code=-9")
        elif move == "join":
            fields = " ".join(f"{name}={value}" for name, value in config.items())
            world.run(f"join rank={rank} inc=b{number} world={RANKS} {fields}")
        else:
            world.run(f"fenced generation={row.generation}")
        seen |= {holder.incarnation: holder.member for holder in row.holders.values()}
        assert len(set(seen.values())) == len(seen), "an id was used again"
        assert not set(row.vacant) & set(row.holders), "a vacant slot is held"
        assert len(row.vacant) < RANKS, "somebody is left, or another process comes"
        assert row.wanted == len(list(row.slots())) == RANKS - len(row.vacant)
        assert leaves_vacant or not row.vacant
    event(f"{len(row.vacant)} vacant, {len(seen)} members")
