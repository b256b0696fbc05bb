"""Moves of losses: which rank gives its place to one that was lost (`move_losses`; `swift.recovery.moving`).

::

    (a Tick)      `look`: a move has come to pay; the View shows it
    (a launcher)  has a process join for the lost rank, in the place of the other
    (the Join)    fills the slot, in a generation of its own: `keep`
    (RUNNING)     the View still shows it: the launcher ends the other one, whose slot becomes vacant as ever

Both places are on one machine: its launcher has had the lost rank, and has the other. What happens meanwhile comes
first: if the other rank is lost, or is all that its stage has left, or another generation is made before the process
has joined, nothing is shown any more, and the launcher lets that process go.
"""

from collections.abc import Mapping

from services.coordinator.row import JobRow, State, replicas_of
from services.coordinator.timing import Timing
from services.coordinator.vacancies import reroutes_lost, whole
from swift.recovery import Assignment, RankMeasured, worth_moving


class Moves:
    """Of one job."""

    def __init__(self, row: JobRow, timing: Timing) -> None:
        self._row = row
        self._timing = timing
        self._since: float | None = None
        """When the move that is shown was seen first, or its process to have joined. Not durable: a coordinator that
        begins anew waits anew."""
        self._joined = False
        self._failed: set[tuple[int, int]] = set()
        """(generation, lost rank): nobody has joined for it."""

    def look(self, measured: Mapping[int, RankMeasured], version: int, now: float) -> bool:
        """Whether what is to be moved has changed. `version`: the newest that a rank has."""
        row = self._row
        if row.state is not State.RUNNING:
            return False
        if row.move:
            return self._give_up(now)
        if not row.vacant or not moves(row) or row.finished or row.end is not None:
            return False
        lost = {slot: since for slot, since in row.vacant.items() if since is not None}
        replicas = replicas_of(row.config)
        found = worth_moving(
            {rank: known for rank, known in measured.items() if rank in row.holders},
            stage_groups=Assignment.grid(row.world_size, replicas=replicas).stage_groups,
            replicas=replicas,
            lost=lost,
            version=version,
            movable={to: self._beside(to) for to in lost if (row.generation, to) not in self._failed},
        )
        if found is not None:
            row.move, self._since, self._joined = [found.rank, found.to], now, False
        return found is not None

    def _give_up(self, now: float) -> bool:
        """For want of room, say, or because its process has failed; or the lost rank has come back in another way, and
        nobody ends the other one."""
        _, to = self._row.move
        joined = to in self._row.holders
        if self._since is None or joined != self._joined:
            self._since, self._joined = now, joined
        if now - self._since <= self._timing.replaced_within_s:
            return False
        self._failed.add((self._row.generation, to))
        self._row.move, self._since = [], None
        return True

    def _beside(self, slot: int) -> list[int]:
        """The ranks that are there of the launcher that has had this one, and that the job can do without then."""
        row = self._row
        run = row.run_of.get(slot)
        there = {rank for rank, holder in row.holders.items() if not holder.gone}
        return [
            rank
            for rank in sorted(there)
            if run and row.run_of.get(rank) == run and whole(row, there - {rank} | {slot})
        ]


def moves(row: JobRow) -> bool:
    """The job is configured so."""
    return row.config.get("move_losses") == "True" and reroutes_lost(row)


def keep(row: JobRow) -> None:
    """(a new generation; who is lost holds no slot any more) Only a move whose process has joined goes on, and only if
    the job can do without the other rank."""
    if not row.move:
        return
    rank, to = row.move
    if rank not in row.holders or to not in row.holders or not whole(row, set(row.holders) - {rank}):
        row.move = []
