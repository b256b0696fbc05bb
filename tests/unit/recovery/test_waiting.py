"""For how long a job waits for a process, against the best that could have been done
(`swift_ft.planner.replay_cost`)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import quickest, worth_waiting_s
from swift_ft.planner.replay_cost import GENERATION_S, slower

SECONDS = st.floats(0.001, 1000.0)


def of(step_s: float, **given: float | int) -> pb.RankMeasured:
    return pb.RankMeasured(step=9, steps=5, microbatches=4, step_s=step_s, **given)  # type: ignore[arg-type]


def lost_s(waits_s: float, comes_s: float, once_s: float, slow: float) -> float:
    """Of a job that waits so long for a process that comes then, and goes on without it from there."""
    if comes_s <= waits_s:
        return comes_s
    return waits_s + once_s + (comes_s - waits_s) * (1 - 1 / slow)


@given(step_s=SECONDS, comes_s=st.floats(0.0, 1e6), replicas=st.integers(2, 64), reroutes=st.booleans())
def test_never_more_than_twice_the_least_possible_time_is_lost(
    step_s: float, comes_s: float, replicas: int, reroutes: bool
) -> None:
    waits_s = worth_waiting_s([of(step_s)], replicas=replicas, reroutes=reroutes)
    assert waits_s is not None
    slow, once_s = slower(replicas, reroutes=reroutes), 2 * (GENERATION_S + step_s)
    best_s = min(comes_s, lost_s(0.0, comes_s, once_s, slow))
    assert lost_s(waits_s, comes_s, once_s, slow) <= 2 * best_s * (1 + 1e-9)


def test_nobody_has_measured_anything() -> None:
    assert worth_waiting_s([], replicas=2, reroutes=True) is None


@pytest.mark.parametrize("more", [{"state_bytes": 10**10}, {"checkpoint_stall_s": 3.0}])
def test_a_dear_return_is_waited_for_longer(more: dict[str, float]) -> None:
    cheap = worth_waiting_s([of(1.0), of(0.5)], replicas=4, reroutes=True)
    dear = worth_waiting_s([of(1.0), of(0.5, **more)], replicas=4, reroutes=True)
    assert cheap is not None
    assert dear is not None
    assert dear > cheap


def test_the_slowest_rank_counts_and_what_the_others_lose_while_it_is_missing() -> None:
    assert worth_waiting_s([of(1.0), of(3.0)], replicas=2, reroutes=False) == pytest.approx(2 * 3.5 * 2)
    assert worth_waiting_s([of(3.0)], replicas=4, reroutes=True) == pytest.approx(2 * 3.5 * 4 / 3)


@pytest.mark.parametrize(
    ("pipeline_ranks", "replicas", "lost_shard"),
    [
        (1, 2, "redistribute"),
        (1, 8, "redistribute"),
        (2, 2, "reroute"),
        (4, 8, "reroute"),
        (4, 1, "redistribute"),
    ],
)
def test_steps_are_shortest_where_peers_share(pipeline_ranks: int, replicas: int, lost_shard: str) -> None:
    assert quickest(pipeline_ranks, replicas) == lost_shard
