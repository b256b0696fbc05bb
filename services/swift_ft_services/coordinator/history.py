"""A job's history in the store: the states that its newest generations have entered, with their times.

    history/NAME/GENERATION/STATE    written in the transaction that makes the state durable, and never changed

A generation enters a state once (`LEGAL`: what leads back to FORMING or FENCING raises the generation). The history is
for people: no decision reads it, and a damaged entry is left out.
"""

from collections.abc import Mapping

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator.job_record import JobRow, State, opened, sealed

GENERATIONS_MAX = 256
"""Number of generations that are kept of a job."""
WORDS_MAX = 1000
"""Limit of a reason and of a plan, in characters: a whole history fits into one message."""
_ORDER = (
    *(pb.FORMING, pb.FENCING, pb.PLANNING, pb.RECOVERING, pb.RUNNING),
    *(pb.FINISHED, pb.FAILED, pb.STOPPED),
)
"""Order in which a generation enters its states."""


def prefix_of(job: str) -> str:
    return f"history/{job}/"


def _key(job: str, generation: int, state: State) -> str:
    return f"{prefix_of(job)}{generation:012d}/{state}"


def put(row: JobRow, at: float) -> dict[str, str]:
    """Returns the entry of the state that the row has entered, by its key. `at`: seconds since 1970."""
    key = _key(row.job, row.generation, row.state)
    told: dict[str, object] = {"at": at}
    if row.state in (State.FORMING, State.FENCING) or row.state.is_over:
        told |= {"reason": row.reason[:WORDS_MAX]}
    if row.state is State.RECOVERING and row.plan is not None:
        told |= {"plan": row.plan.reason[:WORDS_MAX]}
    return {key: sealed(key, told)}


def forgotten(row: JobRow) -> list[str]:
    """Returns the keys to delete when the row's generation is put."""
    oldest = row.generation - GENERATIONS_MAX
    return [_key(row.job, oldest, state) for state in State] if oldest > 0 else []


def read(job: str, stored: Mapping[str, str]) -> list[pb.Generation]:
    """Returns the generations, ascending, of what is stored under `prefix_of(job)`."""
    found: dict[int, pb.Generation] = {}
    for key, entry in stored.items():
        number, _, state = key.removeprefix(prefix_of(job)).partition("/")
        try:
            told = opened(key, entry)
        except ValueError as error:
            events.emit("history_damaged", job=job, reason=str(error))
            continue
        generation = found.setdefault(int(number), pb.Generation(number=int(number)))
        generation.plan = generation.plan or told.get("plan", "")
        generation.entries.add(state=pb.State.Value(state), at=told["at"], reason=told.get("reason", ""))
    for generation in found.values():
        generation.entries.sort(key=lambda entry: _ORDER.index(entry.state))
    return [found[number] for number in sorted(found)]
