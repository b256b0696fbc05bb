"""How long a replay will still take, and what set its pace."""

import pytest

from swift_ft.train.boundary_log import ReplayClock, bottleneck, split
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


def spent(
    compute: float = 0.0, log: float = 0.0, line: float = 0.0, neighbour: float = 0.0
) -> dict[str, float]:
    return {"compute": compute, "log": log, "line": line, "neighbour": neighbour}


class TestWhatSetThePace:
    def test_alone(self) -> None:
        """What it does besides computing and waiting is its own as well."""
        shares = split(10.0, spent(compute=6.0, log=3.0), {})
        assert shares == spent(compute=7.0, log=3.0)
        assert bottleneck(shares) == "compute"
        assert bottleneck(split(10.0, spent(compute=3.0, log=6.9), {})) == "log"
        assert bottleneck(split(10.0, spent(compute=3.0, neighbour=6.9), {})) == "neighbour"

    def test_a_helper_that_waits_for_the_log_is_waited_for_by_its_owner(self) -> None:
        helper = spent(compute=2.0, log=7.0, line=1.0)
        shares = split(10.0, spent(compute=2.0, log=0.5, line=7.0), {1: helper})
        assert bottleneck(shares) == "log"
        assert shares["log"] == 7.0
        assert shares["compute"] == 2.5  # and half a second that the owner did alone

    def test_a_helper_that_computes_most(self) -> None:
        helpers = {1: spent(compute=8.0, line=2.0), 3: spent(compute=3.0, line=7.0)}
        shares = split(10.0, spent(compute=3.0, line=6.5), helpers)
        assert bottleneck(shares) == "compute"
        assert shares == spent(compute=8.5, line=1.5)

    def test_the_line_if_even_the_busiest_waits(self) -> None:
        shares = split(10.0, spent(compute=2.0, line=8.0), {1: spent(compute=2.5, line=7.5)})
        assert bottleneck(shares) == "line"
        assert shares["line"] == 7.5

    def test_nobody_has_a_line_alone(self) -> None:
        assert split(1.0, spent(), {})["line"] == 0.0

    def test_the_seconds_are_all_told(self) -> None:
        clock = ReplayClock()
        clock.computed(1.0)
        clock.read(2.0, replayed_too=False)
        clock.read(4.0, replayed_too=True)
        with clock.line():
            pass
        told = clock.told()
        assert (told["compute"], told["log"], told["neighbour"]) == (1.0, 2.0, 4.0)
        assert 0.0 <= told["line"] < 1.0
