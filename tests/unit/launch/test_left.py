"""Ranks that have ended with 0: what is made of them, and for how long the coordinator is waited for."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.agent import LEFT_S, UNHEARD_S, Left

HOLDS = pb.Member(rank=1, incarnation="b")
ANOTHER = pb.Member(rank=0, incarnation="a")
ENDED_AT = 100.0
RUNNING = pb.View(generation=1, state=pb.RUNNING, members=[ANOTHER, HOLDS])


class World:
    """One rank that has left, and a line to the coordinator."""

    def __init__(self, *, unheard: bool) -> None:
        self.link: Any = SimpleNamespace(unheard=unheard)
        self.child: Any = SimpleNamespace(rank=1, incarnation="b")
        self.left = Left(self.link)
        self.left.add(1, self.child, ENDED_AT)


@pytest.mark.parametrize(
    ("view", "fails"),
    [
        (None, False),  # a script without a session
        (pb.View(generation=1, state=pb.FORMING, members=[ANOTHER]), True),
        (pb.View(generation=2, state=pb.RECOVERING, members=[ANOTHER]), True),
        (
            pb.View(generation=1, state=pb.FORMING, members=[ANOTHER, HOLDS]),
            False,
        ),  # fenced at once, or finished
        (pb.View(generation=1, state=pb.FINISHED, members=[ANOTHER]), False),
    ],
)
def test_a_rank_that_has_ended_with_0_is_missed_where_the_job_waits_for_it(
    view: pb.View | None, fails: bool
) -> None:
    """It may have ended before anybody else had joined: then the View of the job comes later."""
    world = World(unheard=False)
    assert not world.left.missed(None, ENDED_AT + LEFT_S)
    assert not world.left.missed(view, ENDED_AT + LEFT_S - 0.1)
    assert world.left.missed(view, ENDED_AT + LEFT_S) == [world.child] * fails
    assert not world.left.missed(view, ENDED_AT + 2 * LEFT_S)


def test_a_member_is_no_longer_waited_for_once_the_coordinator_has_heard_of_its_end() -> None:
    """A member of a communicator, for example, that has closed it before the others do."""
    world = World(unheard=True)
    heard_at = ENDED_AT + 2 * LEFT_S
    assert not world.left.missed(RUNNING, heard_at)
    world.link.unheard = False
    assert not world.left.missed(RUNNING, heard_at + LEFT_S - 0.1)
    assert world.left.await_end(RUNNING)
    assert not world.left.missed(RUNNING, heard_at + LEFT_S)
    assert not world.left.await_end(RUNNING)


def test_a_coordinator_that_never_comes_back_is_given_up() -> None:
    world = World(unheard=True)
    for after_s in (LEFT_S, UNHEARD_S - 0.1):
        assert not world.left.missed(RUNNING, ENDED_AT + after_s)
        assert world.left.await_end(RUNNING)
        assert not world.left.given_up(ENDED_AT + after_s)
    assert "has not said within 120 s whether the job is finished" in world.left.given_up(
        ENDED_AT + UNHEARD_S
    )
    world.link.unheard = False
    assert not world.left.given_up(ENDED_AT + UNHEARD_S)
