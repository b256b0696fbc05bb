"""A step that could be finished is done again where a rank that died may lack its line of it."""

import pytest

from swift_ft.planner import Report, finishable


def forward(reports: list[Report]) -> list[int | None]:
    return [report.forward_to for report in finishable(reports)]


def in_vote(rank: int, **more: object) -> Report:
    given = {"version": 5, "forward_to": 6, "forward_by_all": True, **more}
    return Report(rank=rank, **given)  # type: ignore[arg-type]


def test_nobody_is_through_the_vote() -> None:
    assert forward([in_vote(0), in_vote(1), Report(rank=2, version=None)]) == [None, None, None]


def test_somebody_is_through_it_so_all_had_voted() -> None:
    assert forward([in_vote(0), Report(rank=1, version=6)]) == [6, None]


@pytest.mark.parametrize("undo_to", [5, 6])
def test_somebody_has_begun_the_next_step_so_all_had_voted(undo_to: int) -> None:
    """With staggered steps one stage may have done it, while another one waits in the reduction of its gradients."""
    ahead = Report(rank=1, version=None, undo_to=undo_to, undo_exact=True)
    behind = in_vote(0, version=None, undo_to=5, undo_exact=True)
    assert forward([behind, ahead]) == [6 if undo_to == 6 else None, None]


@pytest.mark.parametrize(
    ("more", "finishes"),
    [
        ({"version": None, "undo_to": 5, "undo_exact": True}, False),
        ({"version": None, "undo_to": 5, "undo_exact": False}, True),
        ({"version": None}, True),
        ({"forward_by_all": False}, True),
    ],
)
def test_who_cannot_take_it_back_bit_for_bit_finishes_it(more: dict[str, object], finishes: bool) -> None:
    assert forward([in_vote(0, **more), Report(rank=1, version=None)]) == [6 if finishes else None, None]
