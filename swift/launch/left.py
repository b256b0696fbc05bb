"""Ranks that have ended with 0 while the job, as far as is known, is not over.

It may have just finished, which the next View shows. Or they have left it early, which is an error: the coordinator
fences one that is a member, and one that is none is missed here. It decides once it has heard of their end, so a
coordinator that is away is waited for.
"""

import math

from swift._pb import coordinator_pb2 as pb
from swift.launch.children import Child
from swift.launch.link import CoordinatorLink

LEFT_S = 5.0
"""So long a rank that has left is looked for in the View, once the coordinator has heard of its end."""
UNHEARD_S = 120.0
"""A machine on which nothing runs any more waits so long for a coordinator that does not answer."""


class Left:
    """Of one launcher. Its main thread."""

    def __init__(self, link: CoordinatorLink) -> None:
        self._link = link
        self._left: dict[int, tuple[Child, float]] = {}
        """By local rank: the process, and when it ended."""
        self._unheard_at = -math.inf
        """When the coordinator was last known not to have heard of all ends."""

    def add(self, local_rank: int, child: Child, now: float) -> None:
        """It has ended with 0, and its end is told."""
        self._left[local_rank] = child, now

    def clear(self) -> None:
        """Other processes take all places."""
        self._left.clear()

    def await_end(self, view: pb.View | None) -> bool:
        """The job is not over as far as is known, and was not done without these."""
        return any(_misses(view, child) is not None for child, _ in self._left.values())

    def missed(self, view: pb.View | None, now: float) -> list[Child]:
        """Those for which the job waits: who was no member of it is fenced by nobody. Named once."""
        if self._link.unheard:
            self._unheard_at = now
        missed = []
        for local_rank, (child, ended_at) in list(self._left.items()):
            if view is not None and now - max(ended_at, self._unheard_at) >= LEFT_S:
                del self._left[local_rank]
                if _misses(view, child):
                    missed.append(child)
        return missed

    def given_up(self, now: float) -> str:
        """(nothing else runs here) Why the end of the job is not waited for any longer; empty: it is."""
        newest = max((ended_at for _, ended_at in self._left.values()), default=math.inf)
        if not self._link.unheard or now - newest < UNHEARD_S:
            return ""
        return (
            f"all ranks here have ended with exit code 0, and the coordinator has not said within {UNHEARD_S:g} s "
            "whether the job is finished: swift-ft status says so once it is back"
        )


def _misses(view: pb.View | None, child: Child) -> bool | None:
    """Whether the job waits for that process, which has ended with 0, to join. None: it has nothing to do with it;
    False: it has joined, so the coordinator will say that the job is finished, or has lost it."""
    if view is None or view.state == pb.FINISHED:
        return None
    if any(member.incarnation == child.incarnation for member in view.members):
        return False
    return True if view.state != pb.RUNNING else None
