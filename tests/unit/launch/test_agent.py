"""The agent's word on one exit, without processes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch import moving
from swift.launch.agent import LEFT_S, ReplacingAgent
from swift.launch.beside import Vacated
from swift.launch.moving import Moving


def of_one_life(view: pb.View, **more: Any) -> dict[str, Any]:
    """What an agent has whose job is on its way."""
    return {
        "outcome": None,
        "_attempts": Counter(),
        "_deaths": Counter(),
        "_waiting": [],
        "_before": None,
        "_job": SimpleNamespace(run="r"),
        "_link": SimpleNamespace(view=view, fail=lambda reason: None),
        "_replacements_left": 3,
        "_has_run": False,
        **more,
    }


@pytest.mark.parametrize(("state", "replaced"), [(pb.RUNNING, [0]), (pb.FORMING, [])])
def test_a_rank_that_ends_in_the_moment_in_which_the_job_runs_is_replaced(
    state: Any, replaced: list[int]
) -> None:
    """The View is there, and is only looked at once deaths are dealt with."""
    agent = ReplacingAgent.__new__(ReplacingAgent)
    child: Any = SimpleNamespace(rank=0, pid=7, exit_code=3, incarnation="a")
    found: list[int] = []
    stubs = of_one_life(
        pb.View(generation=1, state=state),
        _ranks={0: child},
        _moving=Moving({}, [], lambda _place: child),
        _notify=lambda child, *, given_up: None,
        _replace=lambda _child, local_rank, _reason: found.append(local_rank),
    )
    vars(agent).update(stubs)
    agent._on_exit(child)
    assert found == replaced
    assert (agent.outcome is None) == bool(replaced)


HOLDS = pb.Member(rank=1, incarnation="b")
ANOTHER = pb.Member(rank=0, incarnation="a")


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
    agent = ReplacingAgent.__new__(ReplacingAgent)
    failed: list[int] = []
    stubs: dict[str, Any] = {
        "_left_at": {1: 100.0},
        "_done": {1: SimpleNamespace(rank=1, incarnation="b")},
        "_before": None,
        "_job": SimpleNamespace(run="r"),
        "_link": SimpleNamespace(view=None),
        "_fail_without": lambda child: failed.append(child.rank),
    }
    vars(agent).update(stubs)
    agent._miss_those_who_left(100.0 + LEFT_S)
    assert not failed
    if view is not None:
        view.runs.append("r")
    vars(agent)["_link"] = SimpleNamespace(view=view)
    agent._miss_those_who_left(100.0 + LEFT_S - 0.1)
    assert not failed
    agent._miss_those_who_left(100.0 + LEFT_S)
    assert failed == [1] * fails


@pytest.mark.parametrize("code", [0, 1, 2, 3, -9])
def test_a_process_that_was_to_take_a_place_and_has_not_come_leaves_it_vacant(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it has ended: the job did without it, and goes on so."""
    monkeypatch.setattr(moving, "room_for_one_more", lambda _pids: "")
    agent = ReplacingAgent.__new__(ReplacingAgent)
    gives: Any = SimpleNamespace(rank=0, pid=6, incarnation="a")
    takes: Any = SimpleNamespace(rank=1, pid=7, exit_code=code, incarnation="b")
    hosts: dict[int, int] = {}
    ranks = {0: gives}
    follower = Moving(hosts, [], lambda place: ranks.setdefault(place, takes))
    told: list[tuple[int, bool]] = []
    vacant: list[str] = []
    view = pb.View(generation=2, state=pb.RUNNING, shrinks=True, move=pb.Move(rank=0, to=1))
    stubs = of_one_life(
        view,
        _ranks=ranks,
        _has_run=True,
        _moving=follower,
        _vacated=Vacated(),
        _notify=lambda child, *, given_up: told.append((child.rank, given_up)),
        _leave_vacant=lambda verdict: vacant.append(verdict.reason),
    )
    vars(agent).update(stubs)
    workers: Any = [SimpleNamespace(global_rank=rank, local_rank=rank) for rank in (0, 1)]
    follower.follow(view, workers, ranks)
    assert hosts == {1: 0}
    agent._on_exit(takes)
    assert told == [(1, True)]
    assert vacant == ["rank 1: its process has ended"]
    assert agent.outcome is None
    assert hosts == {}
