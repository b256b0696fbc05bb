"""Other recovery groups for a job that runs: asked for by an operator, in force from a complete checkpoint on.

`swift.recovery.regroup` says how ranks get there. Here: the groups in force and the version since when a replay may
begin by them; those that are wanted, and since when each rank logs by these.
"""

from services.coordinator import commands as m
from services.coordinator.commands import Refusal, Refused
from services.coordinator.planning import assignment_of
from services.coordinator.row import JobRow, State
from swift.recovery import RecoveryGroups
from swift.recovery.groups import NONE


class Regroup:
    """Changes the row; its caller makes that durable."""

    def __init__(self, row: JobRow) -> None:
        self._row = row

    def ask(self, change: m.ChangeGroups) -> bool:
        """Refusal: such groups cannot be. False: they are in force, or wanted already."""
        row = self._row
        if row.state is State.FORMING or row.state.is_over:
            raise Refusal(Refused.INVALID, f"job {row.job} is {row.state}: its groups cannot be changed now")
        assignment = assignment_of(row)
        try:
            groups = RecoveryGroups.parse(change.groups)
        except ValueError as error:
            raise Refusal(Refused.INVALID, str(error)) from None
        if not groups.starts and not change.groups.strip():
            raise Refusal(Refused.INVALID, f"name the stages of each group, such as 0-1,2-3, or {NONE}")
        if problem := groups.problem(assignment.num_stages, assignment.stages):
            raise Refusal(Refused.INVALID, problem)
        wanted = "" if groups == RecoveryGroups.parse(row.groups) else groups.name
        if wanted == row.groups_next:
            return False
        row.groups_next, row.groups_from = wanted, {}
        row.groups_number += 1
        return True

    def logged(self, durable: m.CheckpointDurable) -> bool:
        """(a rank, with its checkpoint) It logs by the wanted groups. False: that is known, or they are not wanted."""
        row, rank = self._row, durable.sender.rank
        if not row.groups_next or durable.groups_number != row.groups_number or rank in row.groups_from:
            return False
        row.groups_from[rank] = durable.groups_since
        return True

    def settle(self) -> bool:
        """True: with the newest complete checkpoint the wanted groups have come into force."""
        row = self._row
        newest = max(row.checkpoints, default=-1)
        if not row.groups_next or row.lacks(row.groups_from) or max(row.groups_from.values()) > newest:
            return False
        self._put_in_force(newest)
        return True

    def empty(self, version: int) -> bool:
        """The log is emptied, and all go on from that version: whatever is wanted is logged from there on. True: it has
        come into force."""
        row = self._row
        if row.groups_next:
            self._put_in_force(version)
            return True
        if row.groups_since:
            row.groups_since = version
        return False

    def _put_in_force(self, version: int) -> None:
        row = self._row
        row.groups, row.groups_since = str(RecoveryGroups.parse(row.groups_next)), version
        row.groups_next, row.groups_from = "", {}
