"""Bodies that a writer with a ring reads after the call: lent by the caller, or written by a borrower of the ring."""

from typing import Protocol

from swift.log.record import RecordKey
from swift.log.ring import Memory, Producer


class Borrower(Protocol):
    """Who writes bodies into a ring by himself."""

    def finish(self) -> None:
        """(a flush, a full ring) Returns when all that is under way is there."""

    def let_go(self) -> None:
        """(the writer is closed) Returns when nobody writes any more."""


class _Nobody:
    def finish(self) -> None: ...

    def let_go(self) -> None: ...


NOBODY: Borrower = _Nobody()
"""As long as the ring is lent to nobody."""


class Lending(Protocol):
    """A writer with a ring: a body may be read after the call, by a native thread or by a device."""

    @property
    def copied(self) -> int:
        """What was appended below this position belongs to the caller again."""

    def append_at(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        address: int,
        size: int,
        now: bool = False,
        keep: bool = False,
    ) -> int:
        """As `Writer.append`, of ``size`` bytes at an address; gives the position that `copied` will pass, or -1 if
        they were dropped. ``now``: they are copied before this returns."""

    def settle(self) -> None:
        """Returns when all that was appended belongs to the caller again; takes no longer than the copies."""

    def lend_ring(self, borrower: Borrower) -> tuple[Memory, Producer]:
        """For bodies that somebody else writes, appended at address 0. There is one borrower."""
