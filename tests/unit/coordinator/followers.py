"""How simulated members do what a plan says, and what their states are then.

Every state has bits: a tag. Two states of one version and one shard are equal if their tags are. An inexact undo makes
a new tag; what was refused has the tag REFUSED, whatever its holder believes.
"""

from dataclasses import dataclass, field
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb

REFUSED = "refused"


@dataclass
class Process:
    """A rank's process, as the runtime behaves: it acts on the newest View, and repeats what was not acked."""

    rank: int
    incarnation: str
    version: int | None = None
    undo_to: int | None = None
    undo_exact: bool = True
    forward_to: int | None = None
    bits: str = ""
    """Two states of one version and one shard are equal if these are."""
    gives: tuple[int, int | None, str] = (0, None, "")
    """(generation, version, bits) that it got to by its own way, for replicas to copy."""
    followed: int = 0
    """The generation whose plan it has done."""
    refuses: int = 0
    """The generation whose plan it refuses: it says so until it is acknowledged."""
    unsaved: tuple[int, int, str] | None = None
    """(version, generation, bits) of a checkpoint that it could not write yet."""
    joined: bool = False
    alive: bool = True
    cut_off: bool = False
    """Its lease is not renewed and it sees no new View; what it says still arrives."""
    view: pb.View | None = None
    acked: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def sender(self) -> dict[str, Any]:
        return {"rank": self.rank, "incarnation": self.incarnation}

    @property
    def at(self) -> int | None:
        """The version held, or the one that the step under way began with."""
        return self.undo_to if self.version is None else self.version

    def become(self, version: int | None, undo_to: int | None = None, forward_to: int | None = None) -> None:
        self.version, self.undo_to, self.forward_to = version, undo_to, forward_to


class Followers:
    """The members' side of recoveries; the simulation adds the rest."""

    dp_size: int
    config: dict[str, str]
    processes: list[Process]
    trimmed_below: int
    saved: dict[tuple[int, int], str]
    """(rank, version) -> the bits of its checkpoint."""
    spoilt: dict[int, set[int]]
    """generation -> ranks whose state comes of what was refused in it."""
    undone: int
    """Inexact undos so far."""

    def holds(self, process: Process) -> bool:
        """Does it hold its rank?"""
        raise AssertionError("the simulation knows")

    def check_states(self) -> None:
        holders = {p.rank: p for p in self.processes if self.holds(p)}
        assert len({p.version for p in holders.values()}) <= 1, f"at different versions: {holders}"
        for process in holders.values():
            assert REFUSED not in process.bits, f"refused bits are kept: {process}"
            first = holders[process.rank - process.rank % self.dp_size]
            assert process.bits == first.bits, f"replicas differ: {first}, {process}"

    def spoil(self, process: Process, plan: pb.Plan) -> None:
        """It refuses, but believes to hold the target all the same, and so do others whom it has fed."""
        mine = plan.ranks[process.rank]
        group = process.rank // self.dp_size
        spoilt = {r.rank for r in plan.ranks if r.strategy == pb.REPLICA and r.rank // self.dp_size == group}
        if mine.strategy != pb.KEEP:
            spoilt.add(process.rank)
        if mine.strategy == pb.REPLAY or mine.from_version < plan.target_version:
            spoilt |= {r.rank for r in plan.ranks if r.from_version < plan.target_version}
        self.spoilt.setdefault(plan.generation, set()).update(spoilt)
        if process.rank in spoilt and self.holds(process):
            process.become(plan.target_version)
            process.bits = REFUSED
        for other in self.processes:
            if other.rank in spoilt and other.followed == plan.generation:
                other.bits = REFUSED

    def follow(self, process: Process, plan: pb.Plan, choice: int) -> bool:
        """True: the target is held. False: a copy waits for its sources."""
        mine, target = plan.ranks[process.rank], plan.target_version
        assert mine.rank == process.rank
        if process.followed == plan.generation:
            assert process.version == target or not self.holds(process)
            return True
        if not self.holds(process):
            process.become(target)
            return True  # a View from before it was fenced; its Ready will be refused
        if mine.strategy == pb.REPLICA:
            if not self.copy(process, mine, plan.generation, choice):
                return False
        else:
            self.go_own_way(process, mine, plan)
            process.gives = (plan.generation, mine.from_version, process.bits)
        assert mine.from_version <= target
        assert mine.from_version == target or mine.from_version >= self.trimmed_below
        assert mine.from_version == target or self.config.get("strategy") != "replica"
        process.become(target)
        process.followed = plan.generation
        if process.rank in self.spoilt.get(plan.generation, ()):
            process.bits = REFUSED
        return True

    def go_own_way(self, process: Process, mine: pb.RankPlan, plan: pb.Plan) -> None:
        if mine.strategy == pb.KEEP:
            assert process.version == mine.from_version == plan.target_version
        elif mine.strategy == pb.CATCH_UP:
            assert process.version == mine.from_version < plan.target_version
        elif mine.strategy == pb.ROLL_FORWARD:
            assert process.forward_to == mine.from_version
        elif mine.strategy == pb.UNDO:
            assert process.undo_to == mine.from_version
            if not process.undo_exact:
                assert not plan.exact
                assert self.config.get("undo") == "arithmetic"
                self.undone += 1
                process.bits = f"{process.bits} undo {self.undone}"
        else:
            assert mine.strategy in (pb.REPLAY, pb.CHECKPOINT)
            assert (process.rank, mine.from_version) in self.saved, "a checkpoint that was never saved"
            process.bits = self.saved[process.rank, mine.from_version]
            process.unsaved = None

    def prune(self, process: Process, view: pb.View) -> None:
        """It removes what is too old, and what is given up."""
        if not view.checkpoints:
            return
        below = max(min(view.checkpoints), view.checkpoints_from)
        for rank, version in list(self.saved):
            if rank == process.rank and version < below and version not in view.checkpoints:
                del self.saved[rank, version]

    def heartbeat(self, process: Process) -> pb.HeartbeatRequest:
        unsaved = None
        if process.unsaved is not None:
            version, generation, _ = process.unsaved
            unsaved = pb.UnsavedCheckpoint(version=version, generation=generation, reason="no space")
        return pb.HeartbeatRequest(**process.sender, version=process.at or 0, unsaved=unsaved)

    def copy(self, process: Process, mine: pb.RankPlan, generation: int, choice: int) -> bool:
        """False: not all sources have gone their way yet, or one is dead. The own state is overwritten meanwhile."""
        assert mine.sources
        assert self.config.get("strategy") != "replay"
        sources = [p for p in self.processes if p.rank in mine.sources and self.holds(p)]
        assert all(source.rank // self.dp_size == process.rank // self.dp_size for source in sources)
        assert process not in sources
        if choice % 2:
            process.become(None)
        if len(sources) < len(mine.sources) or any(source.gives[0] != generation for source in sources):
            return False
        assert {source.gives[1] for source in sources} == {mine.from_version}
        assert len({source.gives[2] for source in sources}) == 1, "sources with different bits"
        process.bits = sources[0].gives[2]
        return True
