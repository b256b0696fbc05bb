"""Who is which machine, in the first round of a rendezvous and in later ones."""

import pytest

from swift.launch.rendezvous import PlacedRendezvous, places


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([None, None], [0, 1]),
        ([None, 1], [0, 1]),  # the first one was lost; torch numbers the new one 0
        ([1, None], [1, 0]),
        ([None, 0, 2], [1, 0, 2]),
        ([2, None, 0, None], [2, 1, 0, 3]),
        ([0, 2], [0, 1]),  # fewer than before
        ([1, 1, None], [1, 0, 2]),
    ],
)
def test_a_machine_keeps_its_place_and_a_new_one_gets_a_free_one(
    before: list[int | None], after: list[int]
) -> None:
    assert places(before) == after


def test_a_machine_that_was_told_its_number_asks_nobody() -> None:
    info = PlacedRendezvous("run", 1, 3, "nowhere.invalid", 1).next_rendezvous()
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (1, 3, "nowhere.invalid")


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_that_no_machine_has(number: int) -> None:
    with pytest.raises(ValueError, match=f"--node-rank {number}: 0 to 2"):
        PlacedRendezvous("run", number, 3, "a01", 1)
