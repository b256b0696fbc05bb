"""Snapshots: copies of the ranks' states in host memory, every k steps (`strategy="snapshot"`).

Each rank copies its own state and sends the copy to a partner, which keeps it. Then a barrier confirms that all ranks
are done: from then on the new version is valid, and older copies are dropped.

    own copy → transfers, in one order on all ranks → barrier
    failure before the barrier   the older version is complete on all ranks; the new one may be
    failure after it             the new version is complete on all ranks

Each report lists the copies that a rank holds, so the planner needs no earlier message about them
(`swift_ft.planner.plan`). The first step of a generation begins with a snapshot, since a new process holds no copies.

The memory of older copies is reused for the next ones. A rank needs four times the size of its state: its own copy and
its partner's, two versions each.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft import events
from swift_ft.errors import ReplayRefused, UsageError
from swift_ft.planner import Assignment, HeldSnapshot
from swift_ft.state.checkpoint_file import Snapshot, restored
from swift_ft.state.transfer import Transfer, digest_of, receive_state, send_state
from swift_ft.state.tree import split
from swift_ft.train.generation import Membership
from swift_ft.train.participants import Participant, Site, Step

# Choice of partners: each rank's copy goes to another rank that is unlikely to be lost together with it.

CopyOfSnapshot = tuple[int, int]
"""(rank that owns the state, rank that keeps the copy)"""


def partners(ranks: Sequence[int], host_of: Mapping[int, str], group_of: Mapping[int, int]) -> dict[int, int]:
    """Returns rank -> the rank that keeps its copy; empty in a world of one rank.

    Prefers, in this order: another host (if hosts are known, i.e. not ""), another recovery group, the fewest copies so
    far, the next rank. All ranks compute the same result.
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
    """Returns all transfers in the order in which every rank does its own, with as many in parallel as possible.

    All ranks use the same order, so there is no deadlock.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotCopy:
    """Copy of a state at one version, in separate memory."""

    state: dict[str, Any]
    """The copied state in host memory, taken apart as `split` does; load it by way of `apart`. A copy that is passed on
    stays in host memory, while its skeleton says what was on a device."""
    digest: str
    bytes: int

    def apart(self) -> dict[str, Any]:
        """Returns a copy of the state for `TrainerState.load_state_dict`, since optimizers keep the tensors passed."""
        state: dict[str, Any] = restored(self.state["skeleton"], self.state["tensors"])
        return state


class Snapshots(Participant):
    """Snapshots that one rank holds, its own and those it keeps for others. Used by the trainer's thread.

    (before the first step of a generation, and after each k-th step) ``take_snapshot`` … (PLANNING) ``held`` →
    (RECOVERING) ``of`` and ``put``, ``forget_above``
    """

    def __init__(self, site: Site, membership: Callable[[], Membership]) -> None:
        self._site = site
        self._membership = membership
        self._copies: dict[int, dict[int, SnapshotCopy]] = {}
        """Version -> rank -> copy of its state."""
        self._spare: dict[int, SnapshotCopy] = {}
        """Rank -> an outdated copy, whose memory the next one reuses."""
        self._taken_in = 0

    def held_snapshots(self) -> tuple[HeldSnapshot, ...]:
        return tuple(
            HeldSnapshot(rank, version)
            for version, copies in sorted(self._copies.items())
            for rank in sorted(copies)
        )

    # --- taking them ---

    def before_step(self, step: Step) -> None:
        if not step.replaying and self._taken_in != self._membership().generation:
            self._snapshot_now()

    def after_step(self, step: Step) -> None:
        if step.by_all and step.version % self._site.config.steps_to_snapshot == 0:
            self._snapshot_now()

    def _snapshot_now(self) -> None:
        membership = self._membership()
        self.take_snapshot(membership.generation, membership.assignment, membership.hosts)

    def take_snapshot(self, generation: int, assignment: Assignment, hosts: Mapping[int, str]) -> None:
        """Takes a snapshot of this version. Raises RuntimeError if a rank is lost, UsageError if memory is short."""
        version, rank = self._site.state.version, self._site.rank
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
                    self._site.member.check,
                    self._transferring,
                    wire=self._site.world,
                )
                own = fresh[rank] = SnapshotCopy(state=own.state, digest=sent.digest, bytes=own.bytes)
                self.put(rank, version, own)
            elif kept[1] == rank:
                fresh[kept[0]] = self._received(kept, version)
                self.put(kept[0], version, fresh[kept[0]])
        passed_s = time.monotonic() - began - copied_s
        self._site.world.run(lambda collectives: collectives.barrier())
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
        spare = self._spare.pop(self._site.rank, None)
        snapshot = Snapshot(
            self._site.state.state_dict(), into={} if spare is None else spare.state["tensors"]
        )
        snapshot.wait()
        state = {
            "version": self._site.state.version,
            "skeleton": snapshot.skeleton,
            "tensors": snapshot.named(),
        }
        return SnapshotCopy(state=state, digest="", bytes=snapshot.nbytes)

    def _received(self, kept: CopyOfSnapshot, version: int) -> SnapshotCopy:
        spare = self._spare.pop(kept[0], None)
        into = {} if spare is None else split(spare.state)[0]
        try:
            received = receive_state(
                _transfer(kept, version),
                self._site.rank,
                into,
                self._site.member.check,
                wire=self._site.world,
                older_copy=True,
            )
        except ReplayRefused as error:  # not enough memory
            raise UsageError(
                f"no room for a snapshot of rank {kept[0]} on rank {self._site.rank}: {error}; or use "
                "strategy='checkpoint', or 'auto' without snapshot_every: they keep nothing in memory"
            ) from None
        return SnapshotCopy(state=received.state, digest=received.digest, bytes=received.bytes)

    def _transferring(self, done: int, total: int) -> None:
        if 2 * done >= total:
            self._site.faults.at("snapshot", self._site.state.version)

    def _transfers(self, assignment: Assignment, hosts: Mapping[int, str]) -> list[CopyOfSnapshot]:
        ranks = assignment.occupied
        stages = {rank: assignment.slots[rank].stage_group for rank in ranks}
        groups = self._site.channel.groups
        # Without recovery groups every rank is its own group, numbered below all stages.
        group_of = {rank: groups.stages(stages[rank])[0] if groups.starts else -1 - rank for rank in ranks}
        return in_order(partners(ranks, {rank: hosts.get(rank, "") for rank in ranks}, group_of))

    def _only(self, version: int, fresh: Mapping[int, SnapshotCopy]) -> None:
        """(all ranks hold `fresh`) Drops all other copies, and keeps their memory for the next snapshot."""
        for copies in self._copies.values():
            for rank, copy in copies.items():
                if rank in fresh and copy is not fresh[rank]:
                    self._spare[rank] = copy
        self._spare = {rank: copy for rank, copy in self._spare.items() if rank in fresh}
        self._copies = {version: dict(fresh)}

    # --- going back to them ---

    def put(self, rank: int, version: int, copy: SnapshotCopy) -> None:
        self._copies.setdefault(version, {})[rank] = copy

    def of(self, rank: int, version: int) -> SnapshotCopy:
        """Returns a copy. Raises ReplayRefused if there is none, or if its digest has changed since it was taken."""
        copy = self._copies.get(version, {}).get(rank)
        if copy is None:
            raise ReplayRefused(
                f"rank {self._site.rank} holds no snapshot of rank {rank} at version {version}"
            )
        if digest_of(copy.state, version) != copy.digest:
            raise ReplayRefused(
                f"the snapshot of rank {rank} at version {version} in the memory of rank {self._site.rank} is not what "
                "was taken: its digest differs"
            )
        return copy

    def forget_above(self, version: int) -> None:
        """Drops copies newer than `version`, because the run goes back to it and repeats the later steps."""
        for newer in [other for other in self._copies if other > version]:
            del self._copies[newer]


def _transfer(kept: CopyOfSnapshot, version: int) -> Transfer:
    return Transfer(joiner=kept[1], sources=(kept[0],), version=version)
