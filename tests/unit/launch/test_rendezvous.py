"""Machines that were told their numbers."""

import pytest

from swift_ft.launch.rendezvous import PlacedRendezvous


def test_a_machine_that_was_told_its_number_asks_nobody() -> None:
    rendezvous = PlacedRendezvous(4, 1, 3, "nowhere.invalid", 1)
    info = rendezvous.next_rendezvous()
    assert (info.number, info.ranks_of, info.master_addr) == (1, [4, 4, 4], "nowhere.invalid")
    assert [info.rank(local_rank) for local_rank in range(4)] == [4, 5, 6, 7]


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_that_no_machine_has(number: int) -> None:
    with pytest.raises(ValueError, match=f"--node-rank {number}: 0 to 2"):
        PlacedRendezvous(4, number, 3, "a01", 1)
