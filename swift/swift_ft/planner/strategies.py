"""The table of strategies: every way in which a rank gets to the common target version.

The planner iterates over it (`swift_ft.planner.plan`), the coordinator and the drill query its properties, and ranks
carry strategies out through `swift_ft.train.strategies.TABLE`, which has the same keys.

**To add a strategy:**

1. `Strategy` in `swift/swift_ft/planner/types.py` (`swift/swift_ft/planner/settings.py` names the settings that do not
   permit it), and the same name with the next free number in the enum of
   `proto/swift_ft/_pb/coordinator.proto`; then `scripts/gen_proto`.
2. A class here: a `Policy`. `reach` returns the version that a rank gets to by itself, given its report, and whether
   bit for bit; a strategy that copies has `share` instead. `reason` explains the choice to people. The class
   attributes define the consequences for the rest of the recovery.
3. An entry in `TABLE`, at the place of its cost: among a rank's own ways to a version the first one is taken, and a
   recovery is counted as its costliest one.
4. In `swift/swift_ft/train/strategies.py`: a `Restore`, and its entry in the table there. `restore` leaves the rank
   with the state of `RankPlan.from_version`; the replay up to the target, if there is one, follows automatically.
5. Tests: a case in `tests/unit/recovery/test_strategies.py`; its own rules in the brute-force checker
   (`tests/unit/recovery/situations.py`), which shares no code with the planner; transcripts in
   `tests/golden/planner` and `tests/golden/coordinator`; a drill. Docs: `docs/protocol.md`, and `docs/faults.md` if it
   has new faults.

A strategy that gets a rank to a version by itself, or by a copy, needs no change in `plan()`, in the codec
(`swift/swift_ft/coordinator_messages.py`) or in the engine. A strategy that needs more from a rank's report adds a
field to `Report` and to its message. One in which all go back in another way needs a case in `plan()` (see `Snapshot`),
and one that finishes a step in another way takes part in it (`LossyForward`, `swift/swift_ft/train/lossy.py`).
"""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from swift_ft.planner.settings import SETTINGS
from swift_ft.planner.types import Report, Strategy


class Begins(enum.Enum):
    """The origin of the state with which a rank goes on."""

    OWN = "own"
    COPY = "copy"
    """The state of other ranks, which have, or get to, the version that is copied."""
    CHECKPOINT = "checkpoint"
    SNAPSHOT = "snapshot"
    """A copy in host memory, its own or one that another rank keeps."""


class Policy:
    """The planner's side of one strategy. Stateless: the table has one object of each class.

    A subclass names its strategy and overrides the defaults that do not fit.
    """

    strategy: ClassVar[Strategy]
    begins: ClassVar[Begins] = Begins.OWN
    replays: ClassVar[bool] = False
    """It only replays. (The others are followed by a replay if they lead to an older version than the target.) A rank
    that refuses one such strategy refuses all of them."""
    rests: ClassVar[bool] = False
    """The rank holds the target: it only waits, and may help others meanwhile."""
    finishes_step: ClassVar[bool] = False
    """The step under way is finished, not dropped."""
    together: ClassVar[bool] = False
    """It is valid only if all ranks of the group finish their step to that version."""
    own_step: ClassVar[bool] = False
    """A refusal means only that this rank has lost the step under way; others may still use it, unless it happens
    again."""
    goes_back: ClassVar[bool] = False
    """Planned for all ranks or for none: the run goes back to an older version, and later records in the log are
    discarded (`swift_ft.planner.plan`)."""
    verb: ClassVar[str] = ""
    """Verb, in messages, for a rank that others copy from: "rank 1 <verb> version 7"."""

    noun: ClassVar[str] = ""
    """(only if it may not be bit-exact) Noun in messages: "<noun> of rank 1"."""

    def reach(self, report: Report) -> "Way | None":
        """Returns how the rank gets to a version by itself, given its report; None: not with this strategy."""
        return None

    def share(
        self, own: Mapping[int, "Way"], replicas: Sequence[int], distance: Callable[[int, int], object]
    ) -> "Mapping[int, Way]":
        """(Begins.COPY) Returns how each of the `replicas` gets to the version that the ranks of `own` reach by
        themselves; at least one does. `distance`: sort key of the ranks that another one can copy from, nearest
        first."""
        raise AssertionError(f"{self.strategy} copies nothing")

    @property
    def behind(self) -> "Policy":
        """The policy to plan where the version that this one leads to is older than the target."""
        return self

    def reason(self, report: Report, ways: "Mapping[int, Way]", target: int) -> str:
        """Returns why the rank uses this strategy, in words. `ways`: for all ranks of its stage group."""
        raise AssertionError(f"{self.strategy} is planned for all ranks at once, for one reason")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """How one rank gets to a version, from where it may have to replay."""

    by: Policy
    version: int
    exact: bool = True
    sources: tuple[int, ...] = ()
    """(Begins.COPY) The ranks to copy from, nearest first."""
    note: str = ""
    """A further clause for the reason."""


def state_words(report: Report) -> str:
    if report.version is not None:
        return f"holds version {report.version}"
    return "holds no state" if report.newest is None else "is between two versions"


class Replay(Policy):
    """Holds no usable state: loads the newest checkpoint that is not newer than the target, and replays from there.

    Planned for whole recovery groups that reach no version otherwise, so it has no `reach` of its own.
    """

    strategy = Strategy.REPLAY
    begins = Begins.CHECKPOINT
    replays = True

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        way = ways[report.rank]
        return f"{state_words(report)}{way.note}; the newest complete checkpoint is of version {way.version}"


class CatchUp(Policy):
    """Holds an older version than the target completely, and replays from there. (Planned as KEEP's `behind`.)"""

    strategy = Strategy.CATCH_UP
    replays = True

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        version = ways[report.rank].version
        return f"holds version {version}, {target - version} behind"


class Keep(Policy):
    """Holds the version completely. A rank with an older version than the target catches up."""

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


class Checkpoint(Policy):
    """Loads the checkpoint of the target; no step is replayed. The planner supplies the reason
    (`swift_ft.planner.plan`)."""

    strategy = Strategy.CHECKPOINT
    begins = Begins.CHECKPOINT
    goes_back = True


class LossyForward(Policy):
    """Keeps the gradients already averaged in the step under way, and averages the rest among the remaining ranks.

    It needs the gradients of all of them, so it is valid only if each of them is in the step. If one is not, no
    gradient of the step was averaged, or a rank that has all of them can finish it alone.
    """

    strategy = Strategy.LOSSY_FORWARD
    finishes_step = True
    own_step = True
    together = True
    verb = "finishes the step to"

    def reach(self, report: Report) -> Way | None:
        return None if report.finish_to is None else Way(by=self, version=report.finish_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return (
            f"{state_words(report)}, and finishes step {target - 1} with the gradients of those that are left"
        )


class Replica(Policy):
    """Receives the state from ranks that hold the same one. Transfers the whole state.

    A rank's own way is preferred to a copy if it is bit-exact: it transfers no bytes, and does not depend on the source
    staying alive.

        a replica gets there exactly        such replicas do so by themselves; the others copy from them
        only inexact ways exist             one replica takes its own, all others copy from it: two undos of different
                                            buckets give different bits, and replicas must be equal
    """

    strategy = Strategy.REPLICA
    begins = Begins.COPY

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
        return f"{state_words(report)}; {given}"


class RollForward(Policy):
    """Finishes the step under way, whose gradients are all reduced. Transfers no bytes."""

    strategy = Strategy.ROLL_FORWARD
    finishes_step = True
    own_step = True
    verb = "rolls forward to"

    def reach(self, report: Report) -> Way | None:
        return None if report.forward_to is None else Way(by=self, version=report.forward_to)

    def reason(self, report: Report, ways: Mapping[int, Way], target: int) -> str:
        return f"{state_words(report)}, and has all gradients of step {ways[report.rank].version - 1} reduced"


class Snapshot(Policy):
    """Takes the rank's own copy, or receives the one that another rank keeps of it; no step is replayed."""

    strategy = Strategy.SNAPSHOT
    begins = Begins.SNAPSHOT
    goes_back = True


class Undo(Policy):
    """Reverts the update of the applied buckets. Transfers no bytes; exact if the bits that the inverse loses were
    kept."""

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
        return f"{state_words(report)}, and takes step {way.version} back, {exactly}"


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
"""In order of cost, the cheapest first."""
assert set(TABLE) == set(Strategy), "every strategy has a policy"


def may_copy(setting: str) -> bool:
    """Returns whether a rank may receive another one's state."""
    return any(TABLE[strategy].begins is Begins.COPY for strategy in SETTINGS[setting].permits)


def may_replay(setting: str) -> bool:
    return not SETTINGS[setting].permits.isdisjoint(replaying())


def may_finish(setting: str) -> bool:
    """Returns whether the remaining ranks may together finish a step that a loss has interrupted."""
    return any(TABLE[strategy].together for strategy in SETTINGS[setting].permits)


def replaying() -> frozenset[Strategy]:
    return frozenset(policy.strategy for policy in TABLE.values() if policy.replays)


def refused_with(strategy: Strategy) -> frozenset[Strategy]:
    """Returns the strategies not to be planned again after a refusal of this one, itself included."""
    return replaying() if TABLE[strategy].replays else frozenset({strategy})
