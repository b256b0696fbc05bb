"""A part of a stream, for a reader that does not want all of it."""

from dataclasses import dataclass

from swift.log.record import RecordKey
from swift.log.unlogged import MARK_SLOT


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadFilter:
    """Of the steps below `below_step`, and of their microbatches below `of`: those from `first` to `behind` only.

    Everything else is in it: what declares records unlogged as well.
    """

    first: int
    behind: int
    of: int
    below_step: int

    def has(self, key: RecordKey) -> bool:
        return (
            self.first <= key.microbatch < self.behind
            or key.microbatch >= self.of
            or key.step >= self.below_step
            or key.slot == MARK_SLOT
        )
