"""The rank's side of each recovery strategy.

The planner's side, and the recipe for another strategy, are in `swift_ft.planner.strategies`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from swift_ft import events
from swift_ft.comm.backend import REPLICA_CHUNK, Pending
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import ReplayRefused, ReplicaDiffers, ServiceError
from swift_ft.planner import RankPlan, Strategy
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.journal import UndoResult
from swift_ft.state.transfer import Transfer, receive_state, send_state
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.participants import Copied, Site
from swift_ft.train.snapshots import SnapshotCopy, Snapshots
from swift_ft.train.training_state import TrainerState, in_common


class Restore:
    """The rank's side of one strategy. Stateless: `TABLE` has one object per strategy.

    This base class serves strategies in which the rank holds the version already: its methods are no-ops.
    """

    def restore(self, site: Site, mine: RankPlan) -> None:
        """(the rank with this strategy) Restores its state to `mine.from_version`, without any other rank. Raises
        ReplayRefused if that is impossible; `site.state.present` is False then if no state is left."""

    def copy(self, site: Site, entry: RankPlan) -> None:
        """(every rank, for each entry whose policy copies, in one order on all ranks, after all have called `restore`)
        Takes part in the copy if this rank is the joiner or a source."""


class Load(Restore):
    """Loads this rank's checkpoint. Discards later steps and the record of where the state came from."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        events.emit("restore_begin", rank=site.rank, generation=site.generation)
        site.state.present = False
        site.copied = None
        load_checkpoint(site.state, site.store, mine.from_version)
        site.state.present = True
        events.emit("restore_end", rank=site.rank, generation=site.generation, version=mine.from_version)


def load_checkpoint(
    state: TrainerState, store: CheckpointStore, version: int, *, in_common_only: bool = False
) -> None:
    """Loads a checkpoint into `state`. `in_common_only`: without the state specific to each replica, as in a copy.
    Raises ReplayRefused for any error, also of the trainer's own objects: the coordinator may have another plan."""
    with _loading(f"the checkpoint of version {version}"):
        saved = store.load(version)
        state.load_state_dict(in_common(saved) if in_common_only else saved)


@contextmanager
def _loading(what: str) -> Iterator[None]:
    """Raises ReplayRefused for any error, because the coordinator may have another plan."""
    try:
        yield
    except ServiceError as error:
        raise ReplayRefused(str(error)) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"{what} cannot be loaded: {why}") from error


class Replica(Restore):
    """Copies the state from its sources to the joiner (`swift_ft.state.transfer`)."""

    def copy(self, site: Site, entry: RankPlan) -> None:
        transfer = Transfer(joiner=entry.rank, sources=entry.sources, version=entry.from_version)
        if site.rank == entry.rank:
            _receive(site, transfer)
        elif site.rank in entry.sources:
            _send(site, transfer)


def _send(site: Site, transfer: Transfer) -> None:
    events.emit(
        "copy_begin", rank=site.rank, generation=site.generation, role="source", peers=[transfer.joiner]
    )
    send_state(
        transfer,
        site.rank,
        site.state.shared_dict(),
        site.member.check,
        site.faults.copying,
        wire=World(site.world, site.faults),
        logged=site.flushed and site.copied is None,
    )


def _receive(site: Site, transfer: Transfer) -> None:
    where: dict[str, Any] = {"rank": site.rank, "generation": site.generation}
    events.emit("restore_begin", **where)
    events.emit("copy_begin", **where, role="joiner", peers=list(transfer.sources))
    site.state.present = False
    received = receive_state(
        transfer,
        site.rank,
        site.state.destinations(),
        site.member.check,
        site.faults.copying,
        wire=World(site.world, site.faults),
    )
    try:
        site.state.load_state_dict(received.state)
    except ServiceError as error:
        raise ReplicaDiffers(f"ranks {list(transfer.sources)} hold another state: {error}") from None
    except Exception as error:  # the coordinator may have another plan
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"the state of ranks {list(transfer.sources)} cannot be loaded: {why}") from error
    site.state.present = True
    site.copied = Copied(transfer.version, received.witnesses)
    events.emit(
        "replica_received",
        **where,
        version=transfer.version,
        digest=received.digest,
        sources=[{"rank": rank, "digest": received.digest} for rank in transfer.sources],
        bytes=received.bytes,
        seconds=received.seconds,
    )
    events.emit("restore_end", **where, version=transfer.version)


class World:
    """`Wire` of a replica's copy: the group of all ranks, whose waits end when a newer generation is announced."""

    def __init__(self, world: ReconfigurableGroup, faults: FaultInjector):
        self._world = world
        self._faults = faults

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        pending: Pending = self._world.send(tensors, to, tag)
        return pending

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        pending: Pending = self._world.recv(tensors, source, tag)
        return _Arriving(pending, tensors[0], self._faults) if tag >= REPLICA_CHUNK else pending


class _Arriving:
    """A chunk being received, in which a drill may flip a bit."""

    def __init__(self, pending: Pending, data: torch.Tensor, faults: FaultInjector):
        self._pending = pending
        self._data = data
        self._faults = faults

    def wait(self) -> Any:
        result = self._pending.wait()
        self._faults.flip_in_copy(self._data)
        return result


class Snapshot(Restore):
    """Restores a snapshot, this rank's own or its partner's. Discards the steps since."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        site.state.present = False
        site.copied = None
        if mine.sources:
            return  # `copy` receives it
        began = time.monotonic()
        events.emit("restore_begin", rank=site.rank, generation=site.generation)
        _load(site, _snapshots(site).of(site.rank, mine.from_version), mine, began)

    def copy(self, site: Site, entry: RankPlan) -> None:
        transfer = Transfer(joiner=entry.rank, sources=entry.sources, version=entry.from_version)
        wire = World(site.world, site.faults)
        check, copying = site.member.check, site.faults.copying
        if site.rank in entry.sources:
            kept = _snapshots(site).of(entry.rank, entry.from_version)
            send_state(transfer, site.rank, kept.state, check, copying, wire=wire)
        elif site.rank == entry.rank:
            began = time.monotonic()
            events.emit("restore_begin", rank=site.rank, generation=site.generation)
            try:
                received = receive_state(transfer, site.rank, {}, check, copying, wire=wire)
            except ReplicaDiffers as error:
                raise ReplayRefused(str(error)) from None
            copy = SnapshotCopy(state=received.state, digest=received.digest, bytes=received.bytes)
            # Keep it as this rank's own again: the partner that sent it may be lost before the next recovery.
            _snapshots(site).put(entry.rank, entry.from_version, copy)
            _load(site, copy, entry, began)


def _snapshots(site: Site) -> Snapshots:
    assert site.snapshots is not None, "a plan goes back to snapshots only if ranks report some"
    return site.snapshots


def _load(site: Site, copy: SnapshotCopy, mine: RankPlan, began: float) -> None:
    version = mine.from_version
    loaded = copy.apart()
    with _loading(f"the snapshot of version {version}"):
        site.state.load_state_dict(loaded)
    site.state.present = True
    where: dict[str, Any] = {"rank": site.rank, "generation": site.generation, "version": version}
    events.emit(
        "snapshot_restored",
        **where,
        source=mine.sources[0] if mine.sources else site.rank,
        bytes=copy.bytes,
        digest=copy.digest,
        seconds=time.monotonic() - began,
    )
    events.emit("restore_end", **where)


class Undo(Restore):
    """Reverts the applied buckets by the optimizers' journals, or a whole step by the copy taken before it."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        try:
            if site.staggering is not None and site.staggering.take_back(mine.from_version):
                _emit_undone(site, UndoResult(mode="copy", exact=True, buckets=0))
                return
            results = site.state.undo()
        except ServiceError as error:  # parameters are at no version now; the next plan does not use them
            site.state.present = False
            raise ReplayRefused(str(error)) from None
        for result in results:
            _emit_undone(site, result)


def _emit_undone(site: Site, result: UndoResult) -> None:
    events.emit(
        "undone",
        rank=site.rank,
        generation=site.generation,
        version=site.state.version,
        mode=result.mode,
        exact=result.exact,
        buckets=result.buckets,
    )


TABLE: Mapping[Strategy, Restore] = MappingProxyType(
    {
        Strategy.KEEP: Restore(),
        Strategy.ROLL_FORWARD: Restore(),  # the vote finishes the step, on the trainer's stack (`Engine.vote`)
        Strategy.LOSSY_FORWARD: Restore(),  # the reduction finishes the step (`swift_ft.train.lossy`)
        Strategy.UNDO: Undo(),
        Strategy.REPLICA: Replica(),
        Strategy.CATCH_UP: Restore(),
        Strategy.REPLAY: Load(),
        Strategy.SNAPSHOT: Snapshot(),
        Strategy.CHECKPOINT: Load(),
    }
)
assert set(TABLE) == set(Strategy), "every strategy can be carried out"
