"""Leases: who has not been heard for too long. Ranks, and in the same way log servers."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Leases(Generic[Who]):
    """When each was heard last; `now` is monotonic seconds. Not durable: after a restart all begin anew."""

    def __init__(self, who: Iterable[Who], now: float) -> None:
        self._heard = dict.fromkeys(who, now)
        self._own = dict(self._heard)
        """When each spoke itself."""

    def hear(self, who: Who, now: float) -> None:
        self._heard[who] = self._own[who] = now

    def keep(self, who: Who, now: float, at_most_s: float) -> None:
        """Somebody says that it lives. That counts for so long after it spoke itself."""
        if now - self._own.setdefault(who, now) <= at_most_s:
            self._heard[who] = now

    def forget(self, who: Who) -> None:
        self._heard.pop(who, None)
        self._own.pop(who, None)

    def start_afresh(self, now: float) -> None:
        self._heard = dict.fromkeys(self._heard, now)
        self._own = dict(self._heard)

    def overdue(self, there: Iterable[Who], limit_s: float, now: float) -> dict[Who, str]:
        """Those of them whose lease has run out -> in words."""
        ages = {who: self.age_s(who, now) for who in there}
        return {who: f"was silent for {age:.1f} s" for who, age in ages.items() if age > limit_s}

    def age_s(self, who: Who, now: float) -> float:
        return now - self._heard.setdefault(who, now)
