"""Moves of losses: which rank gives its place to one that was lost (`move_losses`; `swift.recovery.moving`).

::

    (a Tick)      `due`: a move has come to pay; the View shows it
    (a launcher)  has a process join for the lost rank, in the place of the other; then it ends that one
    (here)        the Join fills the slot, the exit leaves another one vacant, as ever

Both places are on one machine: its launcher has had the lost rank, and has the other.
"""

from collections.abc import Mapping

from services.coordinator.row import JobRow, State
from services.coordinator.vacancies import reroutes_lost
from swift.recovery import RankMeasured, worth_moving


def due(row: JobRow, measured: Mapping[int, RankMeasured], version: int) -> bool:
    """A move has come to pay, and stands in the row now. `version`: the newest that a rank has."""
    if row.state is not State.RUNNING or row.move or not row.vacant or not moves(row):
        return False
    lost = {slot: since for slot, since in row.vacant.items() if since is not None}
    found = worth_moving(
        {rank: known for rank, known in measured.items() if rank in row.holders},
        replicas=int(row.config["replicas"]),
        lost=lost,
        version=version,
        movable={slot: _beside(row, slot) for slot in lost},
    )
    if found is not None:
        row.move = [found.rank, found.to]
    return found is not None


def moves(row: JobRow) -> bool:
    """The job is configured so."""
    return row.config.get("move_losses") == "True" and reroutes_lost(row)


def _beside(row: JobRow, slot: int) -> list[int]:
    """The ranks of the launcher that has had this one."""
    run = row.run_of.get(slot)
    return [rank for rank in row.holders if run and row.run_of.get(rank) == run]
