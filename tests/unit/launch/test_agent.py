"""The agent's word on one exit, without processes."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.agent import ReplacingAgent
from swift_ft.launch.children import StartFailed
from swift_ft.launch.decisions import CHECKS_MAX
from swift_ft.launch.health_check import WaitingPlaces
from swift_ft.launch.ranks import MachinePlace


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
        "_has_session": False,
        "_rehearsals": SimpleNamespace(give_way=lambda: None),
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
    gave_way: list[bool] = []
    stubs = of_one_life(
        pb.View(generation=1, state=state),
        _rehearsals=SimpleNamespace(give_way=lambda: gave_way.append(True)),
        _ranks={0: child},
        _notify=lambda child, *, given_up: None,
        _replace=lambda _child, local_rank, _reason: found.append(local_rank),
    )
    vars(agent).update(stubs)
    agent._on_exit(child)
    assert found == replaced
    assert gave_way, "a rehearsal ends before a process takes the place"
    assert (agent.outcome is None) == bool(replaced)


class Full:
    """A machine with two places whose processes are lost, and on which none can be started at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, failures: int) -> None:
        self.now = 100.0
        monkeypatch.setattr(events, "now", lambda: self.now)
        nobody: Any = None
        self.waiting = WaitingPlaces(None, nobody, lambda _place: {})
        self.failures = failures
        self.tried: list[int] = []
        self.agent = ReplacingAgent.__new__(ReplacingAgent)
        place = MachinePlace(number=1, ranks_of=[4, 2], master_addr="a01", master_port=1)
        stubs = of_one_life(
            pb.View(generation=1, state=pb.RUNNING, runs=["r"]),
            _ranks={},
            _waiting=self.waiting,
            _give_rank=self.give,
            _place=place,
            _settle=set,
        )
        vars(self.agent).update(stubs)
        self.lost: Any = SimpleNamespace(gone=True)
        for place in range(2):
            reason = f"rank {4 + place}: killed by SIGKILL"
            self.waiting.add(place, self.lost, at=self.now, reason=reason, generation=1)

    def give(self, place: int) -> Any:
        self.tried.append(place)
        if len(self.tried) <= self.failures:
            raise StartFailed("no process can be started")
        return SimpleNamespace(pid=7, kind="a fork")


def test_a_rank_whose_process_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Full(monkeypatch, failures=1)
    for _ in range(2):
        machine.agent._replace_due()
        assert machine.tried == [0, 1], "place 0 not before its time"
    machine.now += 1.0
    machine.agent._replace_due()
    assert machine.tried == [0, 1, 0]
    assert not machine.waiting
    assert machine.agent.outcome is None
    assert capsys.readouterr().err.splitlines() == [
        "swift: rank 4: no process can be started: tried again in 1 s",
        "swift: rank 5: killed by SIGKILL: replaced by process 7 (a fork)",
        "swift: rank 4: killed by SIGKILL: replaced by process 7 (a fork)",
    ]


def test_a_rank_is_not_replaced_before_its_process_has_left_its_ports_and_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Full(monkeypatch, failures=0)
    machine.lost.gone = False
    machine.agent._replace_due()
    assert machine.tried == []
    assert machine.waiting.patience_s(5.0) == 5.0, "nothing is due"
    machine.lost.gone = True
    assert machine.waiting.patience_s(5.0) == 0.0
    machine.agent._replace_due()
    assert machine.tried == [0, 1]


def test_a_rank_whose_process_can_never_be_started_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Full(monkeypatch, failures=99)
    for _ in range(CHECKS_MAX):
        assert machine.agent.outcome is None
        machine.agent._replace_due()
        machine.now += 30.0
    outcome = machine.agent.outcome
    assert outcome is not None
    assert (outcome.exit_code, bool(machine.waiting)) == (3, False)
    assert outcome.line == "swift: rank 4: no process can be started, 6 times in a row: the job is stopped"


def test_nothing_else_is_started_while_a_dead_ranks_memory_is_freed() -> None:
    agent = ReplacingAgent.__new__(ReplacingAgent)
    stubs = of_one_life(
        pb.View(generation=1, state=pb.RUNNING),
        _waiting=WaitingPlaces(None, SimpleNamespace(), lambda _place: {}),  # type: ignore[arg-type]
        _last_death=None,
    )
    vars(agent).update(stubs)
    lost: Any = SimpleNamespace(rank=0, pid=7, exit_code=-9, incarnation="a", gone=False)
    agent._replace(lost, 0, "rank 0: killed by SIGKILL")
    assert agent._waiting
    assert not agent._is_quiet()
