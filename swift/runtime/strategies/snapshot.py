"""SNAPSHOT: the rank goes back to its own copy in host memory, or to the one that another rank keeps of it."""

import time
from typing import Any

from swift import events
from swift.errors import ReplayRefused, ReplicaDiffers, ServiceError
from swift.recovery import RankPlan
from swift.runtime.replica import Transfer, receive_state, send_state
from swift.runtime.snapshots import SnapshotCopy
from swift.runtime.strategies.replica import World
from swift.runtime.strategies.restore import Restore, Site


class Snapshot(Restore):
    """What was done since is forgotten."""

    def restore(self, site: Site, mine: RankPlan) -> None:
        site.state.present = False
        site.copied = None
        if mine.sources:
            return  # it is sent
        began = time.monotonic()
        events.emit("restore_begin", rank=site.rank, generation=site.generation)
        _load(site, site.snapshots.of(site.rank, mine.from_version), mine, began)

    def copy(self, site: Site, entry: RankPlan) -> None:
        transfer = Transfer(joiner=entry.rank, sources=entry.sources, version=entry.from_version)
        wire = World(site.world, site.faults)
        check, copying = site.member.check, site.faults.copying
        if site.rank in entry.sources:
            kept = site.snapshots.of(entry.rank, entry.from_version)
            send_state(transfer, site.rank, kept.state, check, copying, wire)
        elif site.rank == entry.rank:
            began = time.monotonic()
            events.emit("restore_begin", rank=site.rank, generation=site.generation)
            try:
                received = receive_state(transfer, site.rank, {}, check, copying, wire)
            except ReplicaDiffers as error:
                raise ReplayRefused(str(error)) from None
            copy = SnapshotCopy(state=received.state, digest=received.digest, bytes=received.bytes)
            # It holds its own again: if it is needed once more, the keeper may be lost.
            site.snapshots.put(entry.rank, entry.from_version, copy)
            _load(site, copy, entry, began)


def _load(site: Site, copy: SnapshotCopy, mine: RankPlan, began: float) -> None:
    version = mine.from_version
    loaded = copy.apart()
    try:
        site.state.load_state_dict(loaded)
    except ServiceError as error:
        raise ReplayRefused(str(error)) from None
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ReplayRefused(f"the snapshot of version {version} cannot be loaded: {why}") from error
    site.tell_lost(loaded, version)
    site.state.present = True
    site.channel.off_log = False
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
