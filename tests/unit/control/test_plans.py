"""A plan's way over the wire: what the coordinator has decided is what ranks carry out."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import PublishedPlan, decoded, encoded, of_view
from swift_ft.errors import ServiceError
from swift_ft.planner import Help, Plan, Prediction, RankPlan, Strategy

ranks = st.integers(0, 2**31 - 1)
versions = st.integers(0, 2**64 - 1)
seconds = st.floats(0, 1e9)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
some = st.lists(ranks, max_size=3).map(tuple)

rank_plans = st.builds(
    RankPlan,
    rank=ranks,
    strategy=st.sampled_from(Strategy),
    from_version=versions,
    reason=words,
    sources=some,
)
helps = st.builds(Help, owner=ranks, helpers=some, until=versions)
predictions = st.builds(
    Prediction,
    rank=ranks,
    workers=st.integers(1, 2**32 - 1),
    steps=versions,
    seconds=seconds,
    alone_s=seconds,
)
plans = st.builds(
    Plan,
    target_version=versions,
    ranks=st.lists(rank_plans, max_size=4).map(tuple),
    collective_source=st.integers(-1, 2**31 - 1),
    reason=words,
    exact=st.booleans(),
    help=st.lists(helps, max_size=2).map(tuple),
    predictions=st.lists(predictions, max_size=2).map(tuple),
)
sources = st.dictionaries(words, st.lists(words, max_size=2).map(tuple), max_size=3)


@given(plan=plans, generation=versions, sources=sources)
def test_there_and_back(plan: Plan, generation: int, sources: dict[str, tuple[str, ...]]) -> None:
    sent = encoded(plan, generation, sources).SerializeToString()
    assert decoded(pb.Plan.FromString(sent)) == PublishedPlan(
        generation=generation, plan=plan, sources=sources
    )


def test_every_strategy_has_a_number_and_every_number_is_a_strategy() -> None:
    numbers = {name: number for name, number in pb.Strategy.items() if name != "STRATEGY_UNSPECIFIED"}
    assert set(numbers) == set(Strategy)


@pytest.mark.parametrize("number", [0, 99])
def test_what_a_newer_coordinator_plans_is_not_taken_for_anything_else(number: int) -> None:
    message = pb.Plan(ranks=[pb.RankPlan(rank=0, strategy=number)])  # type: ignore[arg-type]
    with pytest.raises(ServiceError, match=f"number {number}, which is not known here"):
        decoded(message)


def test_a_view_without_a_plan() -> None:
    assert of_view(pb.View(generation=3)) is None
