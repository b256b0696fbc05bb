"""The agent's word on one exit, without processes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch import moving
from swift.launch.agent import ReplacingAgent
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
