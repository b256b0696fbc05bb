"""Who gives which average to whom: a pure decision, for whatever ranks have."""

import hypothesis.strategies as st
import pytest
from hypothesis import given as any_of

from swift_ft.train.lossy import Given, given


@st.composite
def steps(draw: st.DrawFn) -> list[list[int]]:
    """What each rank that is left has: of each bucket the generation in which it was averaged, or 0."""
    generations = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    ranks = draw(st.integers(1, 5))
    return [[draw(st.sampled_from([0, generation])) for generation in generations] for _ in range(ranks)]


def after(held: list[list[int]], gifts: list[Given]) -> list[list[int]]:
    """What they have once it is given."""
    left = [list(generations) for generations in held]
    for gift in gifts:
        for generations in left:
            generations[gift.bucket] = generations[gift.bucket] or held[gift.source][gift.bucket]
    return left


@any_of(steps())
def test_all_have_what_anybody_has_and_nobody_else_gets_anything(held: list[list[int]]) -> None:
    gifts = given(held)
    wanted = [max(of_bucket) for of_bucket in zip(*held, strict=True)]
    assert after(held, gifts) == [wanted] * len(held)
    for gift in gifts:
        assert held[gift.source][gift.bucket] == gift.generation > 0, "it gives what it has"
        assert any(not of_one[gift.bucket] for of_one in held), "to one that lacks it"
    assert [gift.bucket for gift in gifts] == sorted({gift.bucket for gift in gifts}), "one order for all"


@any_of(steps())
def test_once_given_nothing_is_left_to_give(held: list[list[int]]) -> None:
    assert given(after(held, given(held))) == []


@any_of(steps(), st.data())
def test_what_a_second_loss_leaves_is_given_too(held: list[list[int]], data: st.DataObject) -> None:
    """Some gifts have arrived, some at some of the ranks only, and one rank is lost."""
    left, whole = [list(generations) for generations in held], after(held, given(held))
    for place in range(len(held)):
        for gift in given(held):
            if data.draw(st.booleans()):
                left[place][gift.bucket] = whole[place][gift.bucket]
    if len(left) > 1:
        del left[data.draw(st.integers(0, len(left) - 1))]
    assert after(left, given(left)) == [[max(of_bucket) for of_bucket in zip(*left, strict=True)]] * len(left)


def test_a_bucket_of_two_averages_leads_nowhere() -> None:
    with pytest.raises(ValueError, match=r"bucket 1 was averaged in generations \[1, 2\]"):
        given([[1, 1], [0, 2]])
    with pytest.raises(ValueError, match="other buckets"):
        given([[1, 1], [0]])
