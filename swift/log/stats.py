"""What a writer of the log counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class WriterStats:
    """What a writer has done so far."""

    records: int = 0
    """Handed over to be sent."""
    bytes: int = 0
    """Raw bytes of these."""
    stored_bytes: int = 0
    """What the codecs made of them."""
    verified: int = 0
    """Not sent, because the log has them; found equal."""
    resent: int = 0
    """Sent again after a lost connection or a fence."""
    blocked_seconds: float = 0.0
    """How long `append` waited, in all, because the queue was full."""
    dropped_records: int = 0
    """Not logged, because the queue was full (when_full="drop")."""
    dropped_bytes: int = 0
    pace_bytes_per_s: float = 0.0
    """Raw bytes that the slowest of its log servers took per second lately, while there were any; 0: not known yet."""
