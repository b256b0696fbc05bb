"""The agent's word on one exit, without processes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch.agent import LEFT_S, ReplacingAgent
from swift.launch.moving import Moving


@pytest.mark.parametrize(("state", "replaced"), [(pb.RUNNING, [0]), (pb.FORMING, [])])
def test_a_rank_that_ends_in_the_moment_in_which_the_job_runs_is_replaced(
    state: Any, replaced: list[int]
) -> None:
    """The View is there, and is only looked at once deaths are dealt with."""
    agent = ReplacingAgent.__new__(ReplacingAgent)
    child: Any = SimpleNamespace(rank=0, pid=7, exit_code=3, incarnation="a")
    found: list[int] = []
    stubs: dict[str, Any] = {
        "_ranks": {0: child},
        "outcome": None,
        "_attempts": Counter(),
        "_deaths": Counter(),
        "_waiting": [],
        "_before": None,
        "_job": SimpleNamespace(run="r"),
        "_link": SimpleNamespace(view=pb.View(generation=1, state=state), fail=lambda reason: None),
        "_replacements_left": 3,
        "_has_run": False,
        "_moving": Moving(),
        "_notify": lambda child, *, given_up: None,
        "_replace": lambda _child, local_rank, _reason: found.append(local_rank),
    }
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
