"""The table of strategies: every way in which a rank gets to the version that all are to be at.

The planner goes through it (`swift_ft.planner.plan`), the coordinator and the drill ask it
what a strategy is, and ranks carry strategies out through `swift_ft.train.strategies.TABLE`, which has the same keys.

**To add a strategy:**

1. `Strategy` in `swift/swift_ft/planner/types.py`, and the same name with the next free number in the enum of
   `proto/swift_ft/_pb/coordinator.proto`; then `scripts/gen_proto`.
2. A class here: a `Policy`. `reach` says which version a rank gets to by itself, from what it reports, and whether
   bit for bit; a strategy that copies has `share` instead. `reason` says why, for people. The class attributes say
   what follows for the rest of the recovery.
3. An entry in `TABLE`, at the place of its cost: among a rank's own ways to a version the first one is taken, and a
   recovery is counted as its costliest one.
4. In `swift/swift_ft/train/strategies.py`: a `Restore`, and its entry in the table there. `restore` leaves the rank
   with the state of `RankPlan.from_version`; the replay up to the target, if there is one, comes by itself.
5. Tests: a case in `tests/unit/recovery/test_strategies.py`; its own rules in the brute-force checker
   (`tests/unit/recovery/situations.py`), which shares no code with the planner; a transcript in
   `tests/golden/coordinator`; a drill. Docs: `docs/protocol.md`, and `docs/faults.md` if it has new faults.

Neither `plan()`, nor the codec (`swift/swift_ft/rpc/codec.py`), nor the engine is touched by a strategy that gets a
rank to a version by itself, or by a copy. A strategy that needs a rank to say more than today adds a field to
`Report` and to its message as well. One in which all go back in another way is asked about in `plan()` (`Snapshot`),
and one that finishes a step in another way takes part in it (`LossyForward`, `swift/swift_ft/train/lossy.py`).
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from swift_ft.planner.types import FROM_CHECKPOINT, SHRINKING, SNAPSHOTTING, STRATEGIES, Report, Strategy

# What the planner asks of a strategy.


class Begins(enum.Enum):
    """With whose state a rank goes on."""

    OWN = "own"
    COPY = "copy"
    """Other ranks': they have, or get to, the version that is copied."""
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    """A copy in host memory, its own or one that another rank keeps."""


class Policy:
    """The planner's side of one strategy. Without state: there is one object of each class, in the table.

    A subclass names its strategy and overrides what is not so by default.
    """

    strategy: ClassVar[Strategy]
    begins: ClassVar[Begins] = Begins.OWN
    replays: ClassVar[bool] = False
    """It does nothing but replay. (The others are followed by a replay if they lead to an older version than the
    target.) Whoever refuses one of these refuses all of them."""
    rests: ClassVar[bool] = False
    """The rank holds the target: it has nothing to do but wait, and may help others meanwhile."""
    finishes_step: ClassVar[bool] = False
    """The step under way is finished, not dropped."""
    together: ClassVar[bool] = False
    """It is a way to a version only if all ranks of the group finish their step to it."""
    own_step: ClassVar[bool] = False
    """A rank that refuses it has lost the step under way, which says nothing of the others, unless it happens again."""
    goes_back: ClassVar[bool] = False
    """Planned for all ranks or for none: the run goes back to an older version, and what the log has beyond is given
    up. (`swift_ft.planner.plan`)"""
    excluded_by: ClassVar[frozenset[str]] = FROM_CHECKPOINT
    """The settings of `PlanConfig.strategy` under which it is not used."""
    verb: ClassVar[str] = ""
    """Of a rank that others copy from, for people: "rank 1 <verb> version 7"."""

    noun: ClassVar[str] = ""
    """(of one that may not be bit for bit) For people: "<noun> of rank 1"."""

    def reach(self, report: Report) -> "Way | None":
        """How the rank gets to a version by itself, with what it reports; None: not in this way."""
        return None

    def share(
        self, own: Mapping[int, "Way"], replicas: Sequence[int], distance: Callable[[int, int], object]
    ) -> "Mapping[int, Way]":
        """(Begins.COPY) How each of the `replicas` gets to the version that the ranks of `own` reach by themselves; at
        least one does. `distance`: orders the ranks that another one can copy from, the nearest first."""
        raise AssertionError(f"{self.strategy} copies nothing")

    @property
    def behind(self) -> "Policy":
        """What it is called where the version that it leads to is older than the target."""
        return self

    def reason(self, report: Report, ways: "Mapping[int, Way]", target: int) -> str:
        """Why the rank does this, for people. `ways`: of all ranks of its stage group."""
        raise AssertionError(f"{self.strategy} is planned for all ranks at once, for one reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one rank gets to a version, from where it may have to replay."""

    by: Policy
    version: int
    exact: bool = True
    sources: tuple[int, ...] = ()
    """(Begins.COPY) The ranks to copy from, the nearest first."""
    note: str = ""
    """What else there is to say of it."""


def held(report: Report) -> str:
    """What a rank has, for people."""
    if report.version is not None:
        return f"holds version {report.version}"
    return "holds no state" if report.newest is None else "is between two versions"


# REPLAY: from the checkpoint, by replay.


class Replay(Policy):
    """Holds nothing of use: loads the newest checkpoint that is not newer than the target, and replays from there.

    Planned for whole recovery groups that reach no version otherwise, so it has no `reach` of its own.
    """

    strategy = Strategy.REPLAY
    begins = Begins.CHECKPOINT
    replays = True
    excluded_by = SHRINKING | FROM_CHECKPOINT | {"replica", "snapshot"}

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        way = ways[report.rank]
        return f"{held(report)}{way.note}; the newest complete checkpoint is of version {way.version}"


# CATCH_UP: from an older version, which the rank holds, by replay.


class CatchUp(Policy):
    """Holds an older version than the target whole, and replays from there. (It is reached as KEEP is.)"""

    strategy = Strategy.CATCH_UP
    replays = True
    excluded_by = SHRINKING | FROM_CHECKPOINT | {"replica", "snapshot"}

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        version = ways[report.rank].version
        return f"holds version {version}, {target - version} behind"


# KEEP: the rank holds the target already.


class Keep(Policy):
    """Holds the version whole. Whoever holds an older one than the target catches up."""

    strategy = Strategy.KEEP
    rests = True
    verb = "holds"

    def reach(self, report: Report) -> Way | None:
        return None if report.version is None else Way(by=self, version=report.version)

    @property
    def behind(self) -> Policy:
        return CatchUp()

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"holds version {target}"


# CHECKPOINT: everybody goes back to one.


class Checkpoint(Policy):
    """Loads the checkpoint of the target; nothing is replayed. The planner says why
    (`swift_ft.planner.plan`)."""

    strategy = Strategy.CHECKPOINT
    begins = Begins.CHECKPOINT
    goes_back = True
    excluded_by = frozenset()


# LOSSY_FORWARD: the step under way is finished with the gradients of those that are left.


class LossyForward(Policy):
    """Keeps what is averaged of the step that is under way, and averages the rest with those that are left.

    It takes the gradients of all of them. So it is a way only where each of them is in the step. Where one is not,
    nothing of the step was averaged, or whoever has all of it can finish it alone.
    """

    strategy = Strategy.LOSSY_FORWARD
    finishes_step = True
    own_step = True
    together = True
    excluded_by = frozenset(STRATEGIES) - {"lossy-forward"}
    verb = "finishes the step to"

    def reach(self, report: Report) -> Way | None:
        return None if report.finish_to is None else Way(by=self, version=report.finish_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"{held(report)}, and finishes step {target - 1} with the gradients of those that are left"


# REPLICA: a copy of the state that other ranks hold.


class Replica(Policy):
    """Receives the state from ranks that hold the same one. Moves all its bytes.

    A rank's own way beats a copy if it leads there bit for bit: it moves no bytes, and is not lost with the rank that
    gives them.

        some replica gets there exactly     those who do so by themselves do; the others copy it from them
        by an inexact way alone             one replica goes it, all others copy that: two undos of different buckets
                                            do not give the same bits, and replicas must
    """

    strategy = Strategy.REPLICA
    begins = Begins.COPY
    excluded_by = FROM_CHECKPOINT | {"replay", "snapshot"}

    def share(
        self, own: Mapping[int, Way], replicas: Sequence[int], distance: Callable[[int, int], object]
    ) -> Mapping[int, Way]:
        sources = [rank for rank, way in own.items() if way.exact] or list(own)[:1]
        version = own[sources[0]].version
        return {
            rank: own[rank]
            if rank in sources
            else Way(
                by=self,
                version=version,
                sources=tuple(sorted(sources, key=lambda source: distance(rank, source))),  # type: ignore[arg-type, return-value]
            )
            for rank in replicas
        }

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        sources = ways[report.rank].sources
        given = ", ".join(
            f"rank {rank} {ways[rank].by.verb} version {ways[rank].version}" for rank in sources
        )
        return f"{held(report)}; {given}"


# ROLL_FORWARD: the step under way is finished.


class RollForward(Policy):
    """Finishes the step that is under way: all its gradients are reduced. Moves no bytes."""

    strategy = Strategy.ROLL_FORWARD
    finishes_step = True
    own_step = True
    excluded_by = FROM_CHECKPOINT | {"rollback"}
    verb = "rolls forward to"

    def reach(self, report: Report) -> Way | None:
        return None if report.forward_to is None else Way(by=self, version=report.forward_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"{held(report)}, and has all gradients of step {ways[report.rank].version - 1} reduced"


# SNAPSHOT: everybody goes back to copies in host memory.


class Snapshot(Policy):
    """Takes the rank's own copy, or receives the one that another rank keeps of it; nothing is replayed."""

    strategy = Strategy.SNAPSHOT
    begins = Begins.SNAPSHOT
    goes_back = True
    excluded_by = frozenset(STRATEGIES) - SNAPSHOTTING


# UNDO: the step under way is taken back.


class Undo(Policy):
    """Takes the buckets back that are applied. Moves no bytes; exact if what the inverse loses was kept."""

    strategy = Strategy.UNDO
    own_step = True
    verb = "goes back to"
    noun = "the undo"

    def reach(self, report: Report) -> Way | None:
        if report.undo_to is None:
            return None
        return Way(by=self, version=report.undo_to, exact=report.undo_exact)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        way = ways[report.rank]
        exactly = "bit for bit" if way.exact else "not bit for bit"
        return f"{held(report)}, and takes step {way.version} back, {exactly}"


TABLE: Mapping[Strategy, Policy] = MappingProxyType(
    {
        policy.strategy: policy
        for policy in (
            Keep(),
            RollForward(),
            LossyForward(),
            Undo(),
            Replica(),
            CatchUp(),
            Replay(),
            Snapshot(),
            Checkpoint(),
        )
    }
)
"""From the cheapest to the costliest."""
assert set(TABLE) == set(Strategy), "every strategy has a policy"


def permitted(setting: str) -> frozenset[Strategy]:
    """What may be used under this `PlanConfig.strategy`."""
    return frozenset(policy.strategy for policy in TABLE.values() if setting not in policy.excluded_by)


def may_copy(setting: str) -> bool:
    """A rank may get another one's state."""
    return any(TABLE[strategy].begins is Begins.COPY for strategy in permitted(setting))


def may_replay(setting: str) -> bool:
    return not permitted(setting).isdisjoint(replaying())


def may_finish(setting: str) -> bool:
    """Those that are left may finish a step together that a loss has cut short."""
    return any(TABLE[strategy].together for strategy in permitted(setting))


def replaying() -> frozenset[Strategy]:
    """Those that do nothing but replay."""
    return frozenset(policy.strategy for policy in TABLE.values() if policy.replays)


def refused_with(strategy: Strategy) -> frozenset[Strategy]:
    """What is not to be planned again if this was refused, itself among them."""
    return replaying() if TABLE[strategy].replays else frozenset({strategy})
