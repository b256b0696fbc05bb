"""Leases: who has not been heard for too long. Ranks, and in the same way log servers."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Leases(Generic[Who]):
    """When each was heard last; `now` is monotonic seconds. Not durable: after a restart all begin anew.

    All leases are of one length, so whoever was heard last comes last, and only the first ones can have run out.
    """

    def __init__(self, who: Iterable[Who], now: float) -> None:
        self._heard = dict.fromkeys(who, now)
        """In the order of time."""
        self._own = dict(self._heard)
        """When each spoke itself."""
        self._stood_s = 0.0
        """How long the leases' clock has stood still: what is in here is by that clock."""

    def hear(self, who: Who, now: float) -> None:
        self._own[who] = now - self._stood_s
        self._renew(who, now)

    def keep(self, who: Who, now: float, at_most_s: float) -> None:
        """Somebody says that it lives. That counts for so long after it spoke itself."""
        at = now - self._stood_s
        if at - self._own.setdefault(who, at) <= at_most_s:
            self._renew(who, now)

    def _renew(self, who: Who, now: float) -> None:
        self._heard.pop(who, None)
        self._heard[who] = now - self._stood_s

    def forget(self, who: Who) -> None:
        self._heard.pop(who, None)
        self._own.pop(who, None)

    def start_afresh(self, now: float) -> None:
        self._heard = dict.fromkeys(self._heard, now - self._stood_s)
        self._own = dict(self._heard)

    def stand_still(self, seconds: float, now: float) -> None:
        """The last `seconds` count for no lease: what came in them may not have been read."""
        self._stood_s += seconds
        at = now - self._stood_s
        for who in reversed(self._heard):
            if self._heard[who] <= at:
                break
            self._heard[who] = at  # it was heard in that time: as if now

    def overdue(self, limit_s: float, now: float) -> dict[Who, str]:
        """Those whose lease has run out -> in words."""
        found = {}
        for who, heard in self._heard.items():
            age_s = now - self._stood_s - heard
            if age_s <= limit_s:
                break
            found[who] = f"was silent for {age_s:.1f} s"
        return found

    def age_s(self, who: Who, now: float) -> float:
        at = now - self._stood_s
        return at - self._heard.setdefault(who, at)
