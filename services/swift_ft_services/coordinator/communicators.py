"""CommunicatorJob: the members of a `swift_ft.Communicator`, and their joint decisions.

::

    FORMING ──groups are built──> RUNNING ──all remaining members finished──> FINISHED
     ^  │                         │     ^                                        ^
     └──┘ death, generation + 1   │     │ groups are built                       │
                        shrink,   v     │                                        │
                        grow     RECOVERING ─┬──all remaining members finished───┘
                                     ^       │ death, or groups that could not be built: generation + 1
                                     └───────┘

Other jobs start a generation for each death. Here a death is only reported (`View.lost`), and the members decide how to
continue, as the processes of an MPI program with ULFM (User-Level Failure Mitigation) do; the terms are those of ULFM.

Every decision is made centrally, here, once each living member of the generation has voted. It is durable before any
member sees it, so it is the same for all, even if members die meanwhile. Votes are not durable: members repeat them.

A process that joins while the job runs waits until the members call `grow`.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.checks import check_holder, is_stale
from swift_ft_services.coordinator.commands import Effect, Invalid
from swift_ft_services.coordinator.endings import launcher_code
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import (
    JobRow,
    State,
)

CONFIG = "communicator"
"""Entry of a job's configuration that is "1" for a communicator."""
REVOKED_MAX = 256
"""Limit of revoked groups per generation. A member with more groups may revoke all."""
DECISIONS_KEPT = 2
"""Number of decisions kept: a member votes for a decision only after it has seen the previous one."""
_TAKEN_BY_ALL = (
    m.Tick,
    pb.HeartbeatRequest,
    m.Join,
    pb.ExitRequest,
    pb.FailRequest,
    pb.StopRequest,
    m.LogHeard,
)


def job_class(config: Mapping[str, str]) -> type[Job]:
    return CommunicatorJob if config.get(CONFIG) == "1" else Job


def present(row: JobRow) -> list[int]:
    """Returns the slots that take part in this generation and are still present, ascending."""
    return [slot for slot in sorted(row.taking_part) if _is_there(row, slot)]


def lost_slots(row: JobRow) -> list[int]:
    """Returns the slots that take part in this generation and are no longer present, ascending."""
    return [slot for slot in sorted(row.taking_part) if not _is_there(row, slot)]


def _is_there(row: JobRow, slot: int) -> bool:
    holder = row.holders.get(slot)
    return holder is not None and holder.member == row.taking_part[slot] and slot not in row.finished


class CommunicatorJob(Job):
    """The core of a communicator's job. It has no log, no checkpoints and no plan: members manage their state
    themselves.

    Invariants: all members that receive a decision of a generation receive the same one. A generation contains only
    members not known to be dead. A process takes part only after it has joined.
    """

    legal: Mapping[State, frozenset[State]] = {
        State.FORMING: frozenset({State.FORMING, State.RUNNING, State.FAILED, State.STOPPED}),
        State.RUNNING: frozenset({State.RECOVERING, State.FORMING, State.FINISHED, State.FAILED}),
        State.RECOVERING: frozenset(
            {State.RECOVERING, State.RUNNING, State.FORMING, State.FINISHED, State.FAILED}
        ),
        State.FINISHED: frozenset({State.FORMING}),
        State.FAILED: frozenset({State.FORMING}),
        State.STOPPED: frozenset({State.FORMING}),
    }
    uses_log = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._votes: dict[int, pb.VoteRequest] = {}
        """slot -> its vote for the next decision."""

    def _apply_command(self, command: m.Command, now: float) -> list[Effect]:
        match command:
            case pb.VoteRequest():
                return self._vote(command)
            case pb.RevokeRequest():
                return self._revoke(command)
            case pb.FinishRequest():
                return self._finish(command)
            case pb.AskCheckpointRequest(incarnation=""):
                return []  # a launcher that is asked to stop asks every job for one
            case _ if isinstance(command, _TAKEN_BY_ALL):
                return super()._apply_command(command, now)
        what = m.name_of(command)
        raise Invalid(f"job {self.row.job} is a communicator's, which knows no {what}")

    def resume(self) -> list[Effect]:
        return []

    # --- members come and go ---

    def _join(self, join: m.Join, now: float) -> list[Effect]:
        rank = join.request.member.rank
        if rank in self.row.finished and rank not in self.row.holders:
            del self.row.finished[rank]  # another process held this rank and has left
        return [*super()._join(join, now), *self._form()]

    def _form(self) -> list[Effect]:
        """Starts the connection phase once all members have joined."""
        row = self.row
        if row.state is not State.FORMING or row.taking_part or len(row.holders) < row.world_size:
            return []
        row.taking_part = {slot: holder.member for slot, holder in sorted(row.holders.items())}
        return [m.PublishView(at_once=True)]

    def _exited(self, exited: pb.ExitRequest) -> list[Effect]:
        """A member that exits without having left is lost; exit code 2, a usage error, fails the job."""
        row, rank = self.row, exited.rank
        holder = row.holders.get(rank)
        held = holder is not None and holder.is_process(exited.incarnation, exited.pid)
        if exited.exit_code == 2 and held and not row.state.is_over:
            return self.become_failed(f"rank {rank} exited with code 2", launcher_code(2))
        return super()._exited(exited)

    def _deaths(self, dead: Mapping[int, str], lost: Mapping[int, str]) -> list[Effect]:
        row = self.row
        reason = "; ".join(f"rank {rank} {why}" for rank, why in sorted(dead.items()))
        if row.state is State.FORMING:
            return [*self.become_forming(dead, reason), *self._form()]
        took_part = any(row.holders[rank].member == row.taking_part.get(rank) for rank in dead)
        left = [slot for slot in present(row) if slot not in dead]
        if not left and row.finished and row.state is State.RUNNING:
            return [*self._fence(dead), *self._finish_if_all(reason)]
        if not left:  # no member has state any more: waiting processes start again
            return [*self.become_forming(dead, f"nobody is left: {reason}"), *self._form()]
        if row.state is State.RECOVERING and took_part:  # no member has seen the decision BUILT
            return self._rebuild(left, reason, dead)
        events = self._fence(dead)
        self._votes = {slot: vote for slot, vote in self._votes.items() if slot not in dead}
        return [*events, m.PublishView(at_once=True), *self._decide()]

    def _new_generation(self, dead: Mapping[int, str], reason: str) -> list[m.Emit]:
        events = super()._new_generation(dead, reason)
        row = self.row
        row.taking_part, row.decisions, row.revoked = {}, {}, {}
        row.granted = row.generation  # a communicator has no log servers to wait for
        self._votes.clear()
        return events

    def _fence_logs(self) -> list[Effect]:
        self.row.granted = self.row.generation
        return []

    # --- decisions ---

    def _revoke(self, revoke: pb.RevokeRequest) -> list[Effect]:
        row = self.row
        if is_stale(row, revoke) or row.state.is_over:
            return []
        if revoke.label in row.revoked or len(row.revoked) >= REVOKED_MAX:
            return []
        row.revoked = {**row.revoked, revoke.label: f"rank {revoke.rank}: {revoke.reason}"}
        said = {"rank": revoke.rank, "label": revoke.label, "reason": revoke.reason}
        return [self._event("revoked", **said), m.PublishView(at_once=True)]

    def _vote(self, vote: pb.VoteRequest) -> list[Effect]:
        row, slot = self.row, vote.rank
        if is_stale(row, vote) or row.state.is_over:
            return []
        if row.holders[slot].member != row.taking_part.get(slot):
            raise Invalid(f"rank {slot} takes no part in generation {row.generation} yet")
        if vote.number > self._next:
            raise Invalid(f"decision {vote.number} comes after {self._next}, which is open")
        if vote.number < self._next or slot in self._votes:
            return []  # repeated
        if vote.kind == pb.BUILT and row.state is State.RUNNING:
            raise Invalid(f"the groups of generation {row.generation} are built already")
        vote.acknowledged[:] = sorted(row.taking_part.keys() & vote.acknowledged)
        self._votes[slot] = vote
        if vote.kind == pb.BUILT and not vote.value:
            return self._not_built(vote.reason)
        return self._decide()

    def _not_built(self, why: str) -> list[Effect]:
        """Starts another generation at once: the others might wait long for this member's connections, and none of them
        has seen a decision that the groups are built."""
        reason = f"groups could not be built: {why}"
        if ends := self.setbacks.refuse(reason):
            return self.become_failed(ends)
        return self._rebuild(present(self.row), reason)

    @property
    def _next(self) -> int:
        return max(self.row.decisions, default=-1) + 1

    def _decide(self) -> list[Effect]:
        """Makes the open decision once all present members have voted for it."""
        row, voters = self.row, present(self.row)
        if not voters or any(slot not in self._votes for slot in voters):
            return []
        votes = [self._votes[slot] for slot in voters]
        kinds = {vote.kind for vote in votes}
        if len(kinds) > 1:
            return self._decided(pb.Decision(kind=pb.MISMATCH, words=_called(votes)))
        value = reduce(and_, (vote.value for vote in votes))
        match kinds.pop():
            case pb.AGREE:
                known = set.intersection(*(set(vote.acknowledged) for vote in votes))
                failed = [slot for slot in lost_slots(row) if slot not in known]
                return self._decided(pb.Decision(kind=pb.AGREE, value=value, failed=failed))
            case pb.SHRINK:
                return self._rebuild(voters, f"shrunk to {len(voters)} members")
            case pb.GROW:
                waiting = [
                    slot for slot, holder in row.holders.items() if self._waits(slot) and not holder.gone
                ]
                if not waiting:
                    return self._decided(pb.Decision(kind=pb.GROW))
                return self._rebuild([*voters, *waiting], f"grown by {len(waiting)} members")
        return self._built()

    def _waits(self, slot: int) -> bool:
        """Returns whether the process joined after this generation started, and has not left."""
        row = self.row
        return slot not in row.finished and row.taking_part.get(slot) != row.holders[slot].member

    def _decided(self, decision: pb.Decision) -> list[Effect]:
        row, number = self.row, self._next
        decision.number = number
        row.decisions = {
            **{known: made for known, made in row.decisions.items() if known > number - DECISIONS_KEPT},
            number: decision,
        }
        self._votes.clear()
        event = self._event(
            "decided", number=number, kind=pb.VoteKind.Name(decision.kind), value=decision.value
        )
        return [event, m.PublishView(at_once=True)]

    def _built(self) -> list[Effect]:
        row = self.row
        row.refusals, row.setbacks, row.exits = 0, 0, {}
        decided = self._decided(pb.Decision(kind=pb.BUILT, value=1))
        self._enter(State.RUNNING)
        return [*self._transition(), *decided]

    def _rebuild(
        self, slots: Sequence[int], reason: str, dead: Mapping[int, str] | None = None
    ) -> list[Effect]:
        """Starts a new generation of the members in `slots`. Members that have finished stay marked as left."""
        row = self.row
        self._enter(State.FORMING if row.state is State.FORMING else State.RECOVERING)
        finished = row.finished
        events = self._new_generation(dead or {}, reason)
        row.finished = finished
        row.taking_part = {slot: row.holders[slot].member for slot in sorted(slots)}
        return [*self._transition(), *events]

    # --- the end ---

    def _finish(self, finish: pb.FinishRequest) -> list[Effect]:
        row, slot = self.row, finish.rank
        check_holder(row, finish)
        if slot in row.finished or row.state.is_over:
            return []
        row.finished[slot] = finish.version
        self._votes.pop(slot, None)
        ends = self._finish_if_all()
        return ends or [self._event("rank_finished", rank=slot), m.PublishView(at_once=True), *self._decide()]

    def _finish_if_all(self, reason: str = "") -> list[Effect]:
        """Finishes the job once all members have left, or the last ones were lost (`reason`) after the others."""
        row = self.row
        if row.state not in (State.RUNNING, State.RECOVERING) or present(row):
            return []
        self._enter(State.FINISHED)
        row.reason = reason
        return self._transition()


def _called(votes: Sequence[pb.VoteRequest]) -> str:
    return ", ".join(f"rank {vote.rank} has called {pb.VoteKind.Name(vote.kind).lower()}" for vote in votes)
