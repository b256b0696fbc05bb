"""Whether a process fits beside those that live on a machine."""

import os

import pytest

from swift.launch.beside import available_bytes, resident_bytes, room_for_one_more, why_no_room

GIB = 1 << 30


@pytest.mark.parametrize(
    ("needed", "available", "why"),
    [
        (GIB, 2 * GIB, ""),
        (GIB, GIB, ""),
        (2 * GIB, GIB, "1024 MiB are free, and a rank here takes 2048 MiB"),
        (2 * GIB, None, ""),
    ],
)
def test_a_lost_rank_is_taken_for_as_large_as_the_largest(
    needed: int, available: int | None, why: str
) -> None:
    assert why_no_room(needed, available) == why


def test_what_a_process_takes_is_read_from_the_system() -> None:
    mine, free = resident_bytes(os.getpid()), available_bytes()
    assert 1 << 20 < mine < 1 << 40
    assert free is not None
    assert free > 0
    assert resident_bytes(2**22 + 1) == 0, "it is gone"
    assert room_for_one_more([]) == ""
