"""What the copies of a stream hold together."""

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from swift_ft.log.record import Steps
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator.log_placement import StreamCopy, combined, with_moved


def summary(
    first: int, last: int, *, trimmed: int = 0, corrupt: bool = False, records: int = 5
) -> StreamSummary:
    reason = "a checksum differs" if corrupt else ""
    return StreamSummary(
        stream="s0.F",
        records=records,
        first_step=first,
        last_step=last,
        trimmed_below_step=trimmed,
        corrupt=corrupt,
        reason=reason,
    )


NOTHING = StreamSummary(stream="s0.F", records=0)


def copy(
    server: int, first: int, last: int, *, whole_from: int | None = 0, lacks: Steps | None = None, **of: Any
) -> StreamCopy:
    """`lacks`: steps that are declared unlogged in it."""
    there = replace(summary(first, last, **of), unlogged=lacks)
    return StreamCopy(server=server, summary=there, whole_from=whole_from)


def test_one_copy_is_what_it_is() -> None:
    assert combined([copy(4, 3, 9, trimmed=3)]) == (summary(3, 9, trimmed=3), (4,))


def test_the_longer_of_two_is_read_first() -> None:
    found, servers = combined([copy(0, 0, 8), copy(1, 0, 9)])
    assert (found.first_step, found.last_step, servers) == (0, 9, (1, 0))


def test_what_was_written_before_a_copy_was_whole_does_not_count() -> None:
    """The end of a step that it did not see begin."""
    found, servers = combined([copy(0, 6, 9, whole_from=7)], lost="log server l1 is lost")
    assert (found.first_step, found.last_step, found.reason, servers) == (7, 9, "log server l1 is lost", (0,))


def test_what_was_dropped_is_gone_whichever_copy_says_so() -> None:
    """The mark may have got to one copy alone, and that need not be the one that is read first."""
    found, servers = combined(
        [copy(0, 0, 8, lacks=Steps(3, 4)), copy(1, 0, 9, lacks=Steps(4, 6)), copy(2, 0, 9, records=4)]
    )
    assert (found.unlogged, servers) == ((3, 6), (1, 2, 0))
    assert combined([copy(0, 0, 8)])[0].unlogged is None


def test_what_is_declared_in_a_copy_that_counts_for_nothing_is_gone() -> None:
    """It is written again there as well, behind the mark."""
    young = copy(1, 5, 9, lacks=Steps(3, 4), whole_from=None)
    found, _ = combined([young])
    assert (found.records, found.unlogged) == (0, (3, 4))
    found, servers = combined([copy(0, 0, 9), young])
    assert (found.unlogged, servers) == ((3, 4), (0,))


def test_a_younger_copy_is_not_read_where_an_older_one_is() -> None:
    found, servers = combined([copy(0, 7, 9, whole_from=7), copy(1, 0, 9)])
    assert (found.first_step, servers) == (0, (1,))


def test_steps_below_the_oldest_checkpoint_do_not_matter() -> None:
    _, servers = combined([copy(0, 10, 19, trimmed=10), copy(1, 0, 19)], floor=10)
    assert sorted(servers) == [0, 1]


def test_a_copy_of_the_recovery_under_way_does_not_count_at_all() -> None:
    found, servers = combined([copy(0, 6, 9, whole_from=None)], lost="gone")
    assert (found.records, found.corrupt, found.reason, servers) == (0, False, "gone", (0,))


def test_damage_in_one_copy_is_none() -> None:
    found, servers = combined([copy(0, 0, 9, corrupt=True), copy(1, 0, 8)])
    assert (found.corrupt, found.last_step, servers) == (False, 8, (1,))


def test_damage_in_all_of_them_is() -> None:
    found, servers = combined([copy(n, 0, 9, corrupt=True) for n in (3, 1)])
    assert (found.corrupt, found.reason, servers) == (True, "a checksum differs", (3, 1))


def test_a_stream_that_is_not_there_is_read_where_it_will_be() -> None:
    found, servers = combined([StreamCopy(server=2, summary=NOTHING), StreamCopy(server=0, summary=NOTHING)])
    assert (found.records, servers) == (0, (2, 0))


copies_of = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.integers(0, 10),
        st.booleans(),
        st.none() | st.integers(0, 20),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=4,
)


@given(drawn=copies_of, floor=st.integers(0, 10))
def test_never_more_than_the_copies_that_are_read_hold(
    drawn: list[tuple[int, int, bool, int | None, int]], floor: int
) -> None:
    """Whatever of it a plan counts on, each server that is named has from its first step to its own end."""
    copies = [
        copy(number, first, first + more, corrupt=corrupt, records=records, whole_from=whole_from)
        for number, (first, more, corrupt, whole_from, records) in enumerate(drawn)
    ]
    found, servers = combined(copies, floor=floor)
    assert servers
    if not found.records or found.corrupt:
        return
    for number in servers:
        one = copies[number]
        assert one.whole_from is not None
        assert not one.summary.corrupt
        assert max(one.summary.first_step, one.whole_from) <= max(found.first_step, floor)
    assert found.last_step == max(copies[number].summary.last_step for number in servers)
    assert found.first_step <= found.last_step


# --- what lost servers have moved ---


def test_moved_parts_lead_to_what_follows() -> None:
    whole = replace(summary(20, 30), reason="gone")
    for moved, first, servers in (
        ([copy(0, 0, 20)], 0, (0, 2)),
        ([copy(0, 0, 25)], 0, (0, 2)),
        ([copy(0, 0, 19)], 20, (2,)),
        ([copy(0, 0, 12), copy(1, 10, 20)], 0, (0, 1, 2)),
        ([copy(1, 10, 20), copy(0, 0, 12)], 0, (0, 1, 2)),
        ([copy(0, 0, 9), copy(1, 10, 20)], 10, (1, 2)),
        ([copy(0, 0, 20, whole_from=5)], 5, (0, 2)),
        ([copy(0, 0, 20, whole_from=None)], 20, (2,)),
        ([copy(0, 0, 20, corrupt=True)], 20, (2,)),
        ([copy(0, 0, 20), copy(1, 0, 22)], 0, (1, 2)),
    ):
        found, read = with_moved(whole, (2,), moved)
        assert (found.first_step, found.last_step, read) == (first, 30, servers)
        assert found.reason == ("gone" if first else "")


def test_moved_parts_are_left_where_they_are_if_they_are_not_needed() -> None:
    assert with_moved(summary(20, 30), (2,), [copy(0, 0, 20)], floor=20) == (summary(20, 30), (2,))
    assert with_moved(NOTHING, (2,), [copy(0, 0, 20)]) == (NOTHING, (2,))
    damaged = summary(20, 30, corrupt=True)
    assert with_moved(damaged, (2,), [copy(0, 0, 20)]) == (damaged, (2,))
