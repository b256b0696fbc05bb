"""A profile of a job that runs: what has to be assumed, and who knows the rest."""

from dataclasses import dataclass
from typing import Protocol

from swift.plan.profile import Profile

DEFAULT_RATE = 1e9
"""Bytes per second, of a log that nobody has measured."""
DEFAULT_MTBF_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What the operator says. None: what was measured, else a default, and the plan says so."""

    log_read_bytes_per_s: float | None = None
    log_write_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    """None: nobody helps a replay."""
    machine_mtbf_s: float | None = None
    fixed_s: float | None = None
    machine_per_rank: bool = False
    """As if each rank had a machine of its own."""


class RunningJob(Protocol):
    """The line to a job."""

    def profile(self, given: Given) -> tuple[Profile, list[str]]:
        """What its ranks have measured, and what of it is assumed, in words.

        ServiceError: there is nothing yet. UsageError: such a job cannot be planned.
        """

    def regroup(self, groups: str) -> bool:
        """Other recovery groups, in force from a checkpoint on. False: it has these. UsageError: they cannot be."""

    def close(self) -> None: ...
