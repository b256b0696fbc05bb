"""SIGTERM of a job that runs: a checkpoint first."""

import signal
from typing import cast

import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.agent import Leaving
from swift_ft.launch.children import SignalGate, Signalled
from swift_ft.launch.link import CoordinatorLink

RUNS = pb.View(state=pb.RUNNING, checkpoints=[5])


class Gate(SignalGate):
    def __init__(self) -> None:  # no handlers
        self._received = None


class Link:
    def __init__(self) -> None:
        self.not_asked = False
        self.asked: list[str] = []

    def ask_checkpoint(self, reason: str) -> None:
        self.asked.append(reason)


class World:
    def __init__(self, patience_s: float = 15.0) -> None:
        self.gate, self.link = Gate(), Link()
        self.leaving = Leaving(self.gate, cast(CoordinatorLink, self.link), patience_s)

    def begins(self, view: pb.View | None = RUNS, signum: signal.Signals = signal.SIGTERM) -> bool:
        self.gate._received = signum
        return self.leaving.begins(view)

    def leaves(self, view: pb.View | None) -> bool:
        try:
            self.leaving.check(view)
        except Signalled as left:
            return left.signal == signal.SIGTERM
        return False


def test_nothing_happens_without_a_signal() -> None:
    world = World()
    assert not world.leaving.begins(RUNS)
    assert not world.leaves(RUNS)
    assert world.leaving.patience_s(3.0) == 3.0


def test_it_leaves_when_the_version_that_all_agreed_on_is_complete() -> None:
    world = World()
    assert world.begins()
    assert world.link.asked == ["a launcher was told to stop"]
    assert not world.leaving.begins(RUNS), "said once"
    for view in (
        RUNS,
        pb.View(state=pb.RUNNING, checkpoints=[5], checkpoint_at=17),
        pb.View(state=pb.RUNNING, checkpoints=[5, 10], checkpoint_at=17),
        pb.View(state=pb.RUNNING, checkpoints=[5, 10], checkpoint_at=30),  # somebody was past it
        pb.View(state=pb.RUNNING, checkpoints=[10, 20]),
    ):
        assert not world.leaves(view)
    assert world.leaves(pb.View(state=pb.RUNNING, checkpoints=[20, 30]))


def test_it_does_not_wait_for_what_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    assert world.begins()
    assert world.leaves(pb.View(state=pb.FENCING, checkpoints=[5])), "a rank was lost meanwhile"
    refused = World()
    assert refused.begins()
    refused.link.not_asked = True
    assert refused.leaves(RUNS)
    late = World(patience_s=15.0)
    assert late.begins()
    assert late.leaving.patience_s(60.0) <= 15.0
    now = events.now()
    monkeypatch.setattr(events, "now", lambda: now + 16.0)
    assert late.leaving.patience_s(60.0) == 0.0
    assert late.leaves(RUNS)


@pytest.mark.parametrize(
    ("view", "signum", "patience_s"),
    [
        (RUNS, signal.SIGINT, 15.0),
        (RUNS, signal.SIGTERM, 0.0),
        (pb.View(state=pb.RECOVERING), signal.SIGTERM, 15.0),
        (None, signal.SIGTERM, 15.0),
    ],
)
def test_other_signals_and_jobs_are_left_at_once(
    view: pb.View | None, signum: signal.Signals, patience_s: float
) -> None:
    world = World(patience_s)
    with pytest.raises(Signalled):
        world.begins(view, signum)
    assert world.link.asked == []


def test_a_second_signal_is_followed_at_once() -> None:
    world = World()
    assert world.begins()
    with pytest.raises(Signalled):
        world.begins()
