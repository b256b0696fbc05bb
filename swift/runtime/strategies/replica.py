"""REPLICA: a state on its way from those who hold it to the one who needs it."""

from typing import Any

import torch

from swift import events
from swift.errors import ReplayRefused, ReplicaDiffers, ServiceError
from swift.recovery import RankPlan
from swift.runtime.backends.base import Pending
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.replica import Transfer, receive_state, send_state
from swift.runtime.strategies.restore import Copied, Restore, Site
from swift.runtime.tags import REPLICA_CHUNK


class Replica(Restore):
    """Receives the state from its sources (`swift.runtime.replica`)."""

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
    sent = send_state(
        transfer,
        site.rank,
        site.state.shared_dict(),
        site.member.check,
        site.faults.copying,
        wire=World(site.world, site.faults),
        logged=site.flushed and site.copied is None,
    )
    events.emit(
        "copy_end",
        rank=site.rank,
        generation=site.generation,
        role="source",
        peers=[transfer.joiner],
        bytes=sent.bytes,
        digest=sent.digest,
        seconds=sent.seconds,
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
    except Exception as error:  # there may be another way
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"the state of ranks {list(transfer.sources)} cannot be loaded: {why}") from error
    site.tell_lost(received.state, transfer.version)
    site.state.present = True
    site.copied = Copied(transfer.version, received.witnesses)
    events.emit(
        "copy_end",
        **where,
        role="joiner",
        peers=list(transfer.sources),
        bytes=received.bytes,
        seconds=received.seconds,
    )
    events.emit(
        "replica_received",
        **where,
        version=transfer.version,
        digest=received.digest,
        sources=[{"rank": rank, "digest": received.digest} for rank in transfer.sources],
        bytes=received.bytes,
    )
    events.emit("restore_end", **where, version=transfer.version)


class World:
    """A replica's copy goes over the group of all ranks, whose waits a notice ends. A `Wire`."""

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
    """A chunk on its way, into which a drill may flip a bit."""

    def __init__(self, pending: Pending, data: torch.Tensor, faults: FaultInjector):
        self._pending = pending
        self._data = data
        self._faults = faults

    def wait(self) -> Any:
        result = self._pending.wait()
        self._faults.flip_in_copy(self._data)
        return result
