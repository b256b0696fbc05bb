"""Snapshots: copies of the ranks' states in host memory, every k steps (`strategy="snapshot"`).

Each rank copies its own state, and sends the copy to a partner, which keeps it (`swift_ft.train.snapshots`). Then all
ranks agree that they are done: the version counts from then on, and older copies go.

    own copy → transfers, in one order for all → agreement
    lost before the agreement   the older version is whole at all ranks, and the new one may be
    lost after it               the new version is whole at all ranks

The planner learns in each report which copies a rank holds, and so need not be told of them before
(`swift_ft.planner.plan`). The first step of a generation begins with a snapshot: whoever is new holds nothing.

The older copies' memory is kept for the next ones: a rank needs four times its state, its own and another one's, twice.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swift_ft import events
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import ReplayRefused, UsageError
from swift_ft.planner import Assignment, HeldSnapshot, RecoveryGroups
from swift_ft.state.checkpoint_file import Snapshot
from swift_ft.state.transfer import Transfer, digest_of, receive_state, send_state
from swift_ft.state.tree import split
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.generation import Membership
from swift_ft.train.training_state import TrainerState

# Who keeps whose snapshot: for each rank another one, which should not be lost together with it.

CopyOfSnapshot = tuple[int, int]
"""(rank whose copy it is, rank that keeps it)"""


def partners(ranks: Sequence[int], host_of: Mapping[int, str], group_of: Mapping[int, int]) -> dict[int, int]:
    """Rank -> the rank that keeps its copy; none for a rank that is alone.

    On another host if hosts are known (no empty text), in another recovery group if there is one, then with the fewest
    copies so far, then the next one. All ranks work out the same.
    """
    keeps = dict.fromkeys(ranks, 0)
    chosen: dict[int, int] = {}
    for index, rank in enumerate(ranks):
        others = [*ranks[index + 1 :], *ranks[:index]]
        if not others:
            break
        chosen[rank] = min(
            others,
            key=lambda other: (
                host_of[other] == host_of[rank],
                group_of[other] == group_of[rank],
                keeps[other],
            ),
        )
        keeps[chosen[rank]] += 1
    return chosen


def in_order(chosen: Mapping[int, int]) -> list[CopyOfSnapshot]:
    """All transfers, in the order in which every rank carries out its own: as many at once as ranks allow.

    One order for all, so none waits for another one in a circle.
    """
    left, ordered = sorted(chosen.items()), list[CopyOfSnapshot]()
    while left:
        busy: set[int] = set()
        for transfer in left:
            if busy.isdisjoint(transfer):
                busy.update(transfer)
                ordered.append(transfer)
        left = [transfer for transfer in left if transfer not in ordered]
    return ordered


class Checks(Protocol):
    """This process, as a member of the job."""

    def check(self) -> None:
        """Raises if a newer generation is published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCopy:
    """A state at one version, in memory of its own."""

    state: dict[str, Any]
    """What `TrainerState.load_state_dict` takes: `apart`."""
    digest: str
    bytes: int

    def apart(self) -> dict[str, Any]:
        """In memory that a trainer may have: optimizers keep the tensors that they are given."""
        state: dict[str, Any] = Snapshot(self.state).state()
        return state


class Snapshots:
    """One rank's. Trainer's thread.

    (before the first step of a generation, and behind each k-th step) ``take_snapshot`` … (PLANNING) ``held`` →
    (RECOVERING) ``own``, ``kept`` and ``put``, ``forget_above``
    """

    def __init__(
        self,
        rank: int,
        every: int,
        member: Checks,
        state: TrainerState,
        world: ReconfigurableGroup,
        faults: FaultInjector,
        groups: RecoveryGroups,
    ) -> None:
        """`every`: steps between two snapshots; 0: none is ever taken. `groups`: which ranks are lost together."""
        self._rank = rank
        self._every = every
        self._member = member
        self._state = state
        self._world = world
        self._faults = faults
        self._groups = groups
        self._copies: dict[int, dict[int, SnapshotCopy]] = {}
        """Version -> rank -> its state."""
        self._spare: dict[int, SnapshotCopy] = {}
        """Of each rank one that is not needed any more: the memory of the next."""
        self._taken_in = 0

    def held(self) -> tuple[HeldSnapshot, ...]:
        """What a report says."""
        return tuple(
            HeldSnapshot(rank, version)
            for version, copies in sorted(self._copies.items())
            for rank in sorted(copies)
        )

    # --- taking them ---

    def before_step(self, membership: Membership) -> None:
        """(all ranks, at the same version) The first one of a generation."""
        if self._every and self._taken_in != membership.generation:
            self.take_snapshot(membership.generation, membership.assignment, membership.hosts)

    def after_step(self, membership: Membership) -> None:
        """(all ranks, in the generation in which they have begun the step)"""
        if self._every and self._state.version % self._every == 0:
            self.take_snapshot(membership.generation, membership.assignment, membership.hosts)

    def take_snapshot(self, generation: int, assignment: Assignment, hosts: Mapping[int, str]) -> None:
        """Of this version. Raises RuntimeError if a rank is lost, UsageError if the memory does not suffice."""
        version, rank = self._state.version, self._rank
        began = time.monotonic()
        own = self._copied()
        copied_s = time.monotonic() - began
        fresh = {rank: own}
        for kept in self._transfers(assignment, hosts):
            if kept[0] == rank:
                sent = send_state(
                    _transfer(kept, version),
                    rank,
                    own.state,
                    self._member.check,
                    self._transferring,
                    self._world,
                )
                own = fresh[rank] = SnapshotCopy(state=own.state, digest=sent.digest, bytes=own.bytes)
                self.put(rank, version, own)
            elif kept[1] == rank:
                fresh[kept[0]] = self._received(kept, version)
                self.put(kept[0], version, fresh[kept[0]])
        passed_s = time.monotonic() - began - copied_s
        self._world.run(lambda collectives: collectives.barrier())
        self._only(version, fresh)
        self._taken_in = generation
        events.emit(
            "snapshot_taken",
            rank=rank,
            generation=generation,
            version=version,
            digest=own.digest,
            kept_for=sorted(set(fresh) - {rank}),
            bytes=own.bytes,
            kept_bytes=sum(copy.bytes for other, copy in fresh.items() if other != rank),
            copy_s=copied_s,
            pass_s=passed_s,
            seconds=time.monotonic() - began,
        )

    def _copied(self) -> SnapshotCopy:
        spare = self._spare.pop(self._rank, None)
        snapshot = Snapshot(self._state.state_dict(), into={} if spare is None else split(spare.state)[0])
        return SnapshotCopy(state=snapshot.state(), digest="", bytes=snapshot.nbytes)

    def _received(self, kept: CopyOfSnapshot, version: int) -> SnapshotCopy:
        spare = self._spare.pop(kept[0], None)
        into = {} if spare is None else split(spare.state)[0]
        try:
            received = receive_state(
                _transfer(kept, version),
                self._rank,
                into,
                self._member.check,
                wire=self._world,
                older_copy=True,
            )
        except ReplayRefused as error:  # there is no room
            raise UsageError(
                f"no room for a snapshot of rank {kept[0]} on rank {self._rank}: {error}; or use "
                "strategy='checkpoint', or 'auto' without snapshot_every: they keep nothing in memory"
            ) from None
        return SnapshotCopy(state=received.state, digest=received.digest, bytes=received.bytes)

    def _transferring(self, done: int, total: int) -> None:
        if 2 * done >= total:
            self._faults.at("snapshot", self._state.version)

    def _transfers(self, assignment: Assignment, hosts: Mapping[int, str]) -> list[CopyOfSnapshot]:
        ranks = assignment.occupied
        stages = {rank: assignment.slots[rank].stage_group for rank in ranks}
        # Without groups every rank is one by itself: numbers that no stage has.
        group_of = {
            rank: self._groups.stages(stages[rank])[0] if self._groups.starts else -1 - rank for rank in ranks
        }
        return in_order(partners(ranks, {rank: hosts.get(rank, "") for rank in ranks}, group_of))

    def _only(self, version: int, fresh: Mapping[int, SnapshotCopy]) -> None:
        """All ranks have these: no others are needed."""
        for copies in self._copies.values():
            for rank, copy in copies.items():
                if rank in fresh and copy is not fresh[rank]:
                    self._spare[rank] = copy
        self._spare = {rank: copy for rank, copy in self._spare.items() if rank in fresh}
        self._copies = {version: dict(fresh)}

    # --- going back to them ---

    def put(self, rank: int, version: int, copy: SnapshotCopy) -> None:
        """It is whole."""
        self._copies.setdefault(version, {})[rank] = copy

    def of(self, rank: int, version: int) -> SnapshotCopy:
        """Raises ReplayRefused if it is not there, or not what was taken."""
        copy = self._copies.get(version, {}).get(rank)
        if copy is None:
            raise ReplayRefused(f"rank {self._rank} holds no snapshot of rank {rank} at version {version}")
        if digest_of(copy.state, version) != copy.digest:
            raise ReplayRefused(
                f"the snapshot of rank {rank} at version {version} in the memory of rank {self._rank} is not what was "
                "taken: its digest differs"
            )
        return copy

    def forget_above(self, version: int) -> None:
        """The run goes back to it: what was taken later is of steps that are done again."""
        for newer in [other for other in self._copies if other > version]:
            del self._copies[newer]


def _transfer(kept: CopyOfSnapshot, version: int) -> Transfer:
    return Transfer(joiner=kept[1], sources=(kept[0],), version=version)
