"""Where a run ends: its last step, or the one in which a trainer has said so; and what is told of it."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import optional
from swift_ft.train.config import SessionConfig
from swift_ft.train.step import Ending
from tests.unit.runtime.wired import site_of, step_of


class World:
    """A rank of a job that is finished as soon as it says so."""

    def __init__(self, *, saves: bool = False) -> None:
        self.view = pb.View(state=pb.RUNNING)
        self.said: list[tuple[Any, ...]] = []
        self.state = SimpleNamespace(version=0, stopped=None, updates=SimpleNamespace(totals=dict))
        watcher = SimpleNamespace(wait_for=lambda *_: self.view)
        watcher.latest = self.view
        self.watcher = watcher
        member = SimpleNamespace(
            watcher=watcher,
            client=SimpleNamespace(call=self.finished),
            check=lambda: None,
            say=lambda statement: statement() is None,
            say_measured=lambda: None,
        )
        self.order: list[str] = []
        """Of what is told, and by whom."""
        store = SimpleNamespace(wait_saved=lambda: self.order.append("settled"))
        saving = SimpleNamespace(
            save_last=lambda: self.order.append("saved"), tell_untold=lambda: self.order.append("told")
        )
        config = SessionConfig(last_checkpoint=saves)
        site = site_of(config=config, member=member, state=self.state, store=store)
        self.ending = Ending(site, cast(Any, saving))

    def finished(self, said: pb.FinishRequest) -> None:
        self.said.append((said.version, said.num_steps, optional(said, "called"), said.reason))
        self.order.append("finished")
        self.view.state = pb.FINISHED

    def step(self, *, stops: str | None = None, of: int = 100) -> None:
        self.ending.begin(of)
        self.ending.begin_step(step_of())
        if stops is not None:
            self.ending.call(stops)
        self.state.version += 1
        self.ending.after_step(step_of(self.state.version - 1))

    def last(self, num_steps: int) -> int:
        self.ending.begin(num_steps)
        return self.ending.last()

    def finish(self, num_steps: int) -> tuple[Any, ...]:
        stats = SimpleNamespace(records=0, bytes=0, verified=0)
        writer = SimpleNamespace(flush=lambda _timeout_s: None, stats=stats)
        self.ending.begin(num_steps)
        self.ending.finish(cast(Any, writer), 0.0)
        (said,) = self.said
        return said


def test_a_run_ends_with_its_last_step() -> None:
    world = World()
    world.step()
    assert world.last(3) == 3
    world.step()
    world.step()
    assert world.finish(3) == (3, 3, None, "")


def test_who_calls_it_ends_with_that_step_and_says_so() -> None:
    world = World()
    world.step()
    world.step(stops="enough")
    assert world.last(100) == 2
    assert world.finish(100) == (2, 100, True, "enough")


def test_who_takes_over_that_state_has_said_it_as_well() -> None:
    first, heir = World(), World()
    first.step(stops="enough")
    heir.state.version, heir.state.stopped = first.state.version, first.state.stopped
    assert heir.last(100) == 1
    assert heir.finish(100) == (1, 100, True, "enough")
    assert first.last(101) == 101, "a run that is to do more goes on"
    first.step(of=101)
    assert first.state.stopped is None


def test_in_the_last_step_it_changes_nothing() -> None:
    world = World()
    world.step(stops="enough", of=1)
    assert world.finish(1) == (1, 1, None, "")


def test_a_step_that_is_dropped_has_not_called_it() -> None:
    world = World()
    world.ending.begin_step(step_of())
    world.ending.call("too early")
    world.step()  # the same step again
    assert world.last(100) == 100


@pytest.mark.parametrize(("num_steps", "last"), [(100, 10), (50, 10), (101, 101), (5, 5)])
def test_the_others_go_by_the_view_unless_they_are_to_do_more(num_steps: int, last: int) -> None:
    world = World()
    world.watcher.latest = pb.View(state=pb.RUNNING, ends_at=10, ends_of=100)
    assert world.last(num_steps) == last


@pytest.mark.parametrize(("does_it_itself", "called"), [(True, False), (False, None)])
def test_who_has_done_that_step_without_calling_it_says_so(does_it_itself: bool, called: bool | None) -> None:
    world = World()
    world.step()
    if not does_it_itself:  # it was copied
        world.state.version = 2
    world.watcher.latest = pb.View(state=pb.RUNNING, ends_at=world.state.version, ends_of=100)
    assert world.finish(100) == (world.state.version, 100, called, "")


@pytest.mark.parametrize("saves", [True, False])
def test_nobody_is_through_before_the_coordinator_knows_of_the_last_checkpoint(saves: bool) -> None:
    world = World(saves=saves)
    world.step()
    world.finish(1)
    assert world.order == [*["saved"] * saves, "settled", "told", "finished"]
