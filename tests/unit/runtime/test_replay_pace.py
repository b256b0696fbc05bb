"""How long a replay will still take, and whether it moves at all."""

import threading
import time

import pytest

from swift_ft.train.replay import Pace, Standstill, Stillness


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace(clock: Clock, predicted_s: float | None = None) -> Pace:
    return Pace(rank=2, first=5, target=15, predicted_s=predicted_s, clock=clock)


def left(one: Pace) -> tuple[int, int, float | None]:
    said = one.progress()
    return said.version, said.target, said.seconds_left if said.HasField("seconds_left") else None


class TestPace:
    def test_by_the_prediction_until_two_steps_are_done(self, clock: Clock) -> None:
        one = pace(clock, predicted_s=20.0)
        assert left(one) == (5, 15, 20.0)
        clock.now += 4
        one.at(6)
        assert left(one) == (6, 15, 16.0)

    def test_without_one_nobody_knows_yet(self, clock: Clock) -> None:
        one = pace(clock)
        one.at(6)
        assert left(one) == (6, 15, None)

    def test_by_its_pace_from_then_on_and_the_first_step_does_not_count(self, clock: Clock) -> None:
        one = pace(clock, predicted_s=1.0)
        clock.now += 30  # shapes are inferred
        one.at(6)
        clock.now += 2
        one.at(7)
        assert left(one) == (7, 15, 16.0)
        clock.now += 3
        one.at(8)
        assert left(one) == (8, 15, pytest.approx(7 * 2.5))

    def test_it_grows_less_while_a_step_is_under_way_and_never_below_nothing(self, clock: Clock) -> None:
        one = pace(clock, predicted_s=1.0)
        clock.now += 5
        assert left(one)[2] == 0.0
        for version in (6, 7):
            clock.now += 1
            one.at(version)
        clock.now += 0.5
        assert left(one)[2] == 7.5
        clock.now += 60
        assert left(one)[2] == 0.0


# -- a replay in which nothing moves -------------------------------------------------------------------


LIMIT_S = 10.0


def test_what_counts_as_standing_still() -> None:
    still = Stillness(LIMIT_S, 0.0, (0, 0), 5.0)
    assert not still.observe(9.0, (0, 0), 5.1)
    assert still.observe(10.0, (0, 0), 5.1)


def test_whoever_moves_has_the_whole_time_again() -> None:
    still = Stillness(LIMIT_S, 0.0, (0, 0), 0.0)
    assert not still.observe(9.0, (0, 1), 0.0)
    assert not still.observe(18.0, (0, 1), 0.0)
    assert still.observe(19.0, (0, 1), 0.0)


def test_whoever_computes_is_not_still() -> None:
    still = Stillness(LIMIT_S, 0.0, 0, 0.0)
    assert not still.observe(10.0, 0, 8.0)
    assert not still.observe(19.0, 0, 8.0)
    assert still.observe(20.0, 0, 8.1)


def test_a_wait_of_the_trainers_is_refused_with_its_line() -> None:
    said: list[str] = []
    free = threading.Event()

    def refuse(why: str) -> None:
        said.append(why)
        free.set()

    with Standstill(0.05, lambda: 0, refuse, free.is_set):
        free.wait(60)  # the trainer's own
    assert len(said) == 1
    assert "stands still for 0.05 s, in test_replay_pace.py:" in said[0]
    assert "free.wait(60)" in said[0]


def test_a_replay_that_ends_is_left_alone() -> None:
    said: list[str] = []
    moved = iter(range(10**9))
    with Standstill(0.02, lambda: next(moved), said.append, lambda: False) as watch:
        time.sleep(0.1)
    watch._thread.join(60)
    assert said == []
