"""Machines that were told their numbers."""

from swift_ft.launch.rendezvous import PlacedRendezvous


def test_a_machine_that_was_told_its_number_asks_nobody() -> None:
    rendezvous = PlacedRendezvous(4, 1, 3, "nowhere.invalid", 1)
    info = rendezvous.next_rendezvous()
    assert (info.number, info.ranks_of, info.master_addr) == (1, [4, 4, 4], "nowhere.invalid")
    assert [info.rank(local_rank) for local_rank in range(4)] == [4, 5, 6, 7]
