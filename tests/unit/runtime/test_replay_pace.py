"""How long a replay will still take."""

import pytest

from swift_ft.train.replay import Pace


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
