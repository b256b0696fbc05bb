"""A lease that somebody else keeps: for a while after its holder has spoken itself."""

from services.coordinator.leases import Leases


def test_it_is_believed_for_a_while_and_what_it_says_itself_begins_that_anew() -> None:
    leases = Leases([0, 1], now=0.0)
    for now in range(1, 31):
        leases.keep(0, float(now), at_most_s=20.0)
    assert leases.overdue([0, 1], 9.0, 20.0) == {1: "was silent for 20.0 s"}
    assert leases.overdue([0], 9.0, 30.0) == {0: "was silent for 10.0 s"}
    leases.hear(0, 31.0)
    leases.keep(0, 50.0, at_most_s=20.0)
    assert leases.overdue([0], 9.0, 55.0) == {}
    leases.start_afresh(60.0)
    leases.keep(0, 79.0, at_most_s=20.0)
    assert leases.overdue([0], 9.0, 85.0) == {}
