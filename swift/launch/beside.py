"""Whether a process of a lost rank fits beside those that live on this machine.

A pipeline whose stage has no other rank goes on if the stage moves to where a survivor is: into a process of its own,
on the survivor's device. torch's schedules run the stages that they were made with, so the survivor's own process
cannot run a second one.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from swift._pb import coordinator_pb2 as pb

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def available_bytes() -> int | None:
    """What a new process of this machine can take without swapping; None: the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def why_no_room(needed: int, available: int | None) -> str:
    """Empty: there is. `needed`: what the largest of the living takes; the lost one is taken for as large."""
    if available is None or needed <= available:
        return ""
    return f"{available >> 20} MiB are free, and a rank here takes {needed >> 20} MiB"


def room_for_one_more(pids: Iterable[int]) -> str:
    """Why another process as large as these does not fit; empty: it does."""
    living = list(map(resident_bytes, pids))
    return why_no_room(max(living), available_bytes()) if living else "none of them is on this machine"


class Vacated:
    """Places of this machine that were given up, as long as it is not known whether the others go on without them."""

    def __init__(self) -> None:
        self._lost: dict[int, tuple[int, str]] = {}

    def add(self, local_rank: int, rank: int, incarnation: str) -> None:
        """`incarnation`: of the process that was lost."""
        self._lost[local_rank] = rank, incarnation

    def missed(self, view: pb.View) -> list[int]:
        """The local ranks of those that this View neither leaves vacant nor has another process for. What it says of
        the others is forgotten with them. The members of a communicator decide themselves: they miss nobody."""
        holders = {member.rank: member.incarnation for member in view.members}
        there = {*view.vacant, *holders}
        known = [place for place, (rank, lost) in self._lost.items() if holders.get(rank) != lost]
        ranks = {local_rank: self._lost.pop(local_rank)[0] for local_rank in known}
        return [local_rank for local_rank, rank in ranks.items() if view.shrinks and rank not in there]
