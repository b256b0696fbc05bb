"""What log servers are asked so that a generation, or an empty log, comes to them, and what an answer means.

Decided here, without I/O; the driver asks over gRPC, the simulation in simulated time.
"""

import enum
from collections.abc import Mapping

from services.coordinator import commands as m
from services.coordinator.core import Job
from services.coordinator.row import State


class Call(enum.Enum):
    """To one server. Where it fails, its server is asked again from the first one on."""

    FENCE = "it takes appends of this generation only"
    FENCE_HELD = (
        "the same, if it knows the job: once it is fenced nobody can tell any more that it came back empty"
    )
    EMPTY = "it drops what it has of the job: a new server's own records come later"
    GIVE_UP = "it drops the job's records, also those that came to a new server since"


# A generation's resets, by their numbers.
EMPTIED_WHEN_NEW, GIVEN_UP = 0, 1
RESETS: Mapping[Call, int] = {Call.EMPTY: EMPTIED_WHEN_NEW, Call.GIVE_UP: GIVEN_UP}


def to_fence(job: Job) -> dict[str, tuple[Call, ...]]:
    """Of every log server in use, by its address. One that does not know the job any more: see `used_anew`."""
    fresh = job.places.fresh()
    # Before a job runs nothing of it is in any log.
    held = (Call.FENCE_HELD if job.row.granted and job.row.state is not State.FORMING else Call.FENCE,)
    return {
        job.row.log_servers[number].address: (Call.FENCE, Call.EMPTY) if number in fresh else held
        for number in job.row.living()
    }


def to_give_up(job: Job) -> dict[str, tuple[Call, ...]]:
    """All hold the generation, but for those that came back empty since. Fenced, these would take their writers on,
    with a hole where the records are that they know to be acknowledged."""
    return dict.fromkeys(job.row.addresses(), (Call.FENCE_HELD, Call.GIVE_UP))


def used_anew(job: Job, generation: int, address: str) -> m.ChangeLogServers | None:
    """That server held this generation, or one before, and does not know the job any more: it came back with
    another disk, or an empty one. What it had is lost: it is used as a new one, in a new generation. None: that is
    known, or over."""
    row, number = job.row, job.places.number_of(address)
    if number is None or row.generation != generation or row.state is State.FORMING or row.state.is_over:
        return None
    return m.ChangeLogServers(
        lost=address,
        add=address,
        add_host=row.log_servers[number].host,
        why="has come back without this job's records",
    )
