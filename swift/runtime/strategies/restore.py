"""What a rank does for a strategy, and what it has to do it with."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from swift.checkpoint.store import CheckpointStore
from swift.recovery import RankPlan
from swift.runtime.channel import Channel
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.member import Member
from swift.runtime.snapshots import Snapshots
from swift.runtime.staggering import Staggering
from swift.runtime.state import TrainerState


class Copied(NamedTuple):
    """From whom this process has its state."""

    version: int
    witnesses: tuple[int, ...]
    """Ranks that hold the same, and have logged all that they have done."""


@dataclass(kw_only=True)
class Site:
    """One rank in RECOVERING."""

    rank: int
    member: Member
    channel: Channel
    state: TrainerState
    store: CheckpointStore
    faults: FaultInjector
    world: ReconfigurableGroup
    """All ranks."""
    snapshots: Snapshots
    staggering: Staggering
    generation: int = 0
    """Of the plan that is carried out."""
    copied: Copied | None = None
    """How this process got its state, until the log's gaps are declared."""
    flushed: bool = True
    """What this process has done was in the log when it reported."""

    def tell_drawn(self, version: int) -> None:
        if drew := self.state.loads.drew:
            self.state.loads.drew = []
            self.member.client.differs(
                version,
                f"load_state_dict of {', '.join(drew)} (rank {self.rank}) draws other random numbers from the default "
                "generators than the first time; give it a generator of its own, or put what was drawn into its state",
            )

    def tell_lost(self, state: dict[str, Any], version: int) -> None:
        """What the rank had and no state can hold."""
        self.tell_drawn(version)
        beside = state.get("beside", {})
        lost = [*beside.get("unknown", ()), *beside.get("apart", ()), *self.state.beside.lost]
        if lost := list(dict.fromkeys(lost)):
            self.member.client.differs(
                version,
                f"{', '.join(lost)} of rank {self.rank} cannot be given to another process, and was lost; if it need "
                f"not last: session.transient('{lost[0].rpartition('.')[2]}')",
            )


class Restore:
    """The rank's side of one strategy. Without state: there is one object of each class, in the table.

    This one is of strategies for which there is nothing to do: the rank holds the version already.
    """

    def restore(self, site: Site, mine: RankPlan) -> None:
        """(the rank whose strategy it is) Leaves its state at `mine.from_version`, without any other rank. Raises
        ReplayRefused if that cannot be done, with `site.state.present` False if no state is left."""

    def copy(self, site: Site, entry: RankPlan) -> None:
        """(every rank, for each entry whose policy copies, in one order for all; all have gone their own way by then)
        Takes part in it if it is the joiner's or one of the sources."""
