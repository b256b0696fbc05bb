"""The agent's word on one exit, without processes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swift._pb import coordinator_pb2 as pb
from swift.launch.agent import ReplacingAgent


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
        "_due": {},
        "_before": None,
        "_job": SimpleNamespace(run="r"),
        "_link": SimpleNamespace(view=pb.View(generation=1, state=state), fail=lambda reason: None),
        "_replacements_left": 3,
        "_has_run": False,
        "_notify": lambda child: None,
        "_replace": lambda local_rank, reason, generation: found.append(local_rank),
    }
    vars(agent).update(stubs)
    agent._on_exit(child)
    assert found == replaced
    assert (agent.outcome is None) == bool(replaced)
