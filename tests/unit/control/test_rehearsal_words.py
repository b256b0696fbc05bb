"""What people are told of rehearsals."""

from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import end_words, rehearsal_words


def rehearsal(rank: int, **known: Any) -> pb.Rehearsal:
    return pb.Rehearsal(rank=rank, **known)


EQUAL: dict[str, Any] = {"done": 2, "version": 5, "steps": 4}
DIFFERENT: dict[str, Any] = {"done": 1, "version": 5, "steps": 1, "difference": "optimizer 0.step differs"}


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ([], ["not rehearsed"]),
        ([rehearsal(0, recorded=0), rehearsal(1, recorded=0)], ["not rehearsed: ranks 0, 1"]),
        ([rehearsal(3, **EQUAL)], ["rehearsed: rank 3 at version 5, 4 steps, equal"]),
        (
            [rehearsal(0, **EQUAL), rehearsal(1, recorded=9), rehearsal(2, **EQUAL)],
            ["rehearsed: ranks 0, 2 at version 5, 4 steps, equal", "not rehearsed: rank 1"],
        ),
        (
            [rehearsal(0, **DIFFERENT)],
            ["rehearsed: rank 0 at version 5, 1 step, different: optimizer 0.step differs"],
        ),
        (
            [rehearsal(0, **EQUAL, why_not="the script has ended")],
            [
                "rehearsed: rank 0 at version 5, 4 steps, equal (the last attempt could not be done: the script has "
                "ended)"
            ],
        ),
        (
            [rehearsal(0, why_not="no memory")],
            ["not rehearsed: rank 0 (the last attempt could not be done: no memory)"],
        ),
        ([rehearsal(0, under_way=0)], ["not rehearsed: rank 0 (one is under way, from version 0)"]),
        (
            [rehearsal(rank, **EQUAL) for rank in range(10)],
            ["rehearsed: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more at version 5, 4 steps, equal"],
        ),
    ],
)
def test_a_line_for_what_ranks_have_in_common(known: list[pb.Rehearsal], wanted: list[str]) -> None:
    assert rehearsal_words(pb.View(rehearsals=known)) == wanted


def test_braces_of_a_difference_are_its_own() -> None:
    view = pb.View(rehearsals=[rehearsal(0, done=1, version=5, steps=1, difference="register({x}=...)")])
    assert rehearsal_words(view) == ["rehearsed: rank 0 at version 5, 1 step, different: register({x}=...)"]


def test_a_difference_that_the_job_is_not_exact_for_is_told_once() -> None:
    reason = "rank 0, rehearsed from version 5: optimizer 0.step differs"
    view = pb.View(
        state=pb.FINISHED,
        inexact_since=5,
        inexact_reason=reason,
        rehearsals=[rehearsal(0, **DIFFERENT)],
    )
    assert end_words(view) == [
        f"not exact since version 5: {reason}",
        "rehearsed: rank 0 at version 5, 1 step, different",
    ]


def test_the_end_of_a_run_that_was_not_to_be_rehearsed_is_quiet() -> None:
    assert end_words(pb.View(state=pb.FINISHED)) == []
    rehearsed = pb.View(state=pb.FINISHED, rehearsals=[rehearsal(0, **EQUAL)])
    assert end_words(rehearsed) == ["rehearsed: rank 0 at version 5, 4 steps, equal"]
