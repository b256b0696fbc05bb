"""Whether a process fits beside those that live on a machine."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch import agent
from swift_ft.launch.agent import Vacated, resident_bytes, room_for_one_more
from swift_ft.log.memory import available_memory

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
    needed: int, available: int | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "resident_bytes", lambda pid: needed // pid)
    monkeypatch.setattr(agent, "available_memory", lambda: available)
    assert room_for_one_more([2, 1]) == why


def test_what_a_process_takes_is_read_from_the_system() -> None:
    mine, free = resident_bytes(os.getpid()), available_memory()
    assert 1 << 20 < mine < 1 << 40
    assert free is not None
    assert free > 0
    assert resident_bytes(2**22 + 1) == 0, "it is gone"
    assert room_for_one_more([]) == "none of them is on this machine"
    assert room_for_one_more([os.getpid()]) == ""


def test_a_place_that_is_given_up_is_missed_unless_it_is_vacant_or_taken() -> None:
    view = pb.View(
        shrinks=True,
        vacant=[2],
        members=[
            pb.Member(rank=3, incarnation="new"),
            pb.Member(rank=4, incarnation="old-4"),
        ],
    )
    places = Vacated()
    lost: list[Any] = [
        SimpleNamespace(rank=rank, incarnation=f"old-{rank}", gone=False) for rank in (1, 2, 3, 4)
    ]
    for local_rank, child in enumerate(lost):
        places.add(local_rank, child)
    assert places.missed(view) == [], "its memory is not freed yet"
    for child in lost:
        child.gone = True
    assert places.missed(view) == [0], "rank 4 is not known to be lost yet"
    assert places.missed(view) == [], "it is said once"
    del view.members[1]
    assert places.missed(view) == [3]


def test_the_members_of_a_communicator_miss_nobody() -> None:
    places = Vacated()
    lost: Any = SimpleNamespace(rank=1, incarnation="old-1", gone=True)
    places.add(0, lost)
    assert places.missed(pb.View(taking_part=[pb.Seat(slot=0, member=1)])) == []
