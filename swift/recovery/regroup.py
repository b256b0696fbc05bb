"""Recovery groups that change while the job runs: what a rank logs meanwhile.

::

    (operator)     other groups are wanted: durable at the coordinator, in the View as `next`, with a number
    (every rank)   saves its next checkpoint, of version c: from step c on it logs what the next groups need as well,
                   and says so with the checkpoint
    (coordinator)  a checkpoint v is complete, and every rank logs so since v or before: the next groups are in force
                   since v. Replays that begin before v are planned with the old groups up to that moment, and never
                   again after it
    (every rank)   sees it: logs by the groups in force alone

Nobody agrees on a step, and nobody waits: before v is complete both are logged, from v on either can be replayed.
"""

from collections.abc import Iterable, Mapping

from swift.recovery.groups import RecoveryGroups


class LoggedGroups:
    """One rank's. (engine) ``learn`` before each step and checkpoint, ``saving`` at a checkpoint; (channel) ``at``."""

    def __init__(self, rank: int, first: RecoveryGroups) -> None:
        self._rank = rank
        self._now, self._text = first, str(first)
        self._next: RecoveryGroups | None = None
        self._number = 0
        self._since: int | None = None

    def learn(self, now: str, wanted: str, number: int, since: Mapping[int, int]) -> None:
        """What the View says: the groups in force, those that are wanted and their number (0: none are), and for each
        rank the version since when it, or the process that held it before, logs by these."""
        if now != self._text:
            self._now, self._text = RecoveryGroups.parse(now), now
        if number != self._number:
            self._number = number
            self._next = RecoveryGroups.parse(wanted) if number else None
            self._since = None
        if self._since is None and self._next is not None:
            self._since = since.get(self._rank)

    def saving(self, version: int) -> tuple[int, int]:
        """A checkpoint of this version is saved now: (number of the next groups, version since when they are logged);
        the number is 0 without any."""
        if self._next is None:
            return 0, 0
        if self._since is None:
            self._since = version
        return self._number, self._since

    def at(self, step: int, replayed: Iterable[RecoveryGroups] = ()) -> tuple[RecoveryGroups, ...]:
        """Those by which this step is logged: what crosses any of them. `replayed`: by which it is replayed."""
        groups = [self._now]
        if self._next is not None and self._since is not None and step >= self._since:
            groups.append(self._next)
        return tuple(dict.fromkeys([*groups, *replayed]))
