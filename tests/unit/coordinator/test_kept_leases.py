"""Leases: who comes first has run out first; kept ones, and a clock that stands still."""

from swift_ft_services.coordinator.liveness import Leases


def test_it_is_believed_for_a_while_and_what_it_says_itself_begins_that_anew() -> None:
    leases = Leases([0, 1], now=0.0)
    for now in range(1, 31):
        leases.keep(0, float(now), at_most_s=20.0)
    assert leases.overdue(9.0, 20.0) == {1: "was silent for 20.0 s"}
    assert leases.overdue(9.0, 30.0) == {1: "was silent for 30.0 s", 0: "was silent for 10.0 s"}
    leases.forget(1)
    leases.renew(0, 31.0)
    leases.keep(0, 50.0, at_most_s=20.0)
    assert leases.overdue(9.0, 55.0) == {}
    leases.start_afresh(60.0)
    leases.keep(0, 79.0, at_most_s=20.0)
    assert leases.overdue(9.0, 85.0) == {}


def test_only_whoever_was_heard_least_lately_is_looked_at() -> None:
    leases = Leases(range(4), now=0.0)
    for now, who in enumerate([2, 0, 3, 2], start=1):
        leases.renew(who, float(now))
    assert leases.overdue(1.5, 3.0) == {1: "was silent for 3.0 s"}
    assert list(leases.overdue(0.5, 4.0)) == [1, 0, 3]
    assert leases.age_s(2, 5.0) == 1.0


def test_time_in_which_nothing_was_read_counts_for_none() -> None:
    leases = Leases([0], now=0.0)
    leases.stand_still(50.0, 50.0)
    assert leases.overdue(9.0, 58.0) == {}
    leases.renew(1, 58.0)
    assert leases.overdue(9.0, 60.0) == {0: "was silent for 10.0 s"}
    assert list(leases.overdue(9.0, 68.0)) == [0, 1]


def test_whoever_was_heard_while_the_clock_stood_is_as_if_heard_now() -> None:
    leases = Leases([0, 1], now=0.0)
    leases.renew(0, 4.0)
    leases.stand_still(5.0, 5.0)
    leases.renew(1, 5.5)
    assert [leases.age_s(who, 6.0) for who in (0, 1)] == [1.0, 0.5]
    assert list(leases.overdue(9.0, 14.3)) == [0]
    assert list(leases.overdue(9.0, 14.6)) == [0, 1]
