"""The table of strategies: every way in which a rank gets to the version that all are to be at.

The planner goes through it (`swift.recovery.reach`, `swift.recovery.plan`), the coordinator and the drill ask it what a
strategy is, and ranks carry strategies out through `swift.runtime.strategies.TABLE`, which has the same keys.

**To add a strategy:**

1. `Strategy` in `swift/recovery/types.py`, and the same name with the next free number in the enum of
   `proto/swift/_pb/coordinator.proto`; then `scripts/gen_proto`.
2. A module here: a `Policy`. `reach` says which version a rank gets to by itself, from what it reports, and whether
   bit for bit; a strategy that copies has `share` instead. `reason` says why, for people. The class attributes say
   what follows for the rest of the recovery.
3. An entry in `TABLE`, at the place of its cost: among a rank's own ways to a version the first one is taken, and a
   recovery is counted as its costliest one.
4. A module in `swift/runtime/strategies/`: a `Restore`, and its entry in the table there. `restore` leaves the rank
   with the state of `RankPlan.from_version`; the replay up to the target, if there is one, comes by itself.
5. Tests: a case in `tests/unit/recovery/test_strategies.py`; its own rules in the brute-force checker
   (`tests/unit/recovery/situations.py`), which shares no code with the planner; a transcript in
   `tests/golden/coordinator`; a drill. Docs: `docs/protocol.md`, and `docs/faults.md` if it has new faults.

Neither `plan()`, nor the codec (`swift/control/plans.py`), nor the engine is touched by a strategy that gets a rank to
a version by itself, or by a copy. A strategy that needs a rank to say more than today adds a field to `Report` and to
its message as well. One in which all go back in another way is asked about in `plan()` (`Snapshot`), and one that
finishes a step in another way takes part in it (`LossyForward`, `swift/runtime/cut_step.py`).
"""

from collections.abc import Mapping
from types import MappingProxyType

from swift.recovery.strategies.catch_up import CatchUp
from swift.recovery.strategies.checkpoint import Checkpoint
from swift.recovery.strategies.keep import Keep
from swift.recovery.strategies.lossy_forward import LossyForward
from swift.recovery.strategies.policy import Begins, Policy, Way
from swift.recovery.strategies.replay import Replay
from swift.recovery.strategies.replica import Replica
from swift.recovery.strategies.roll_forward import RollForward
from swift.recovery.strategies.snapshot import Snapshot
from swift.recovery.strategies.undo import Undo
from swift.recovery.types import Strategy

__all__ = [
    "TABLE",
    "Begins",
    "Policy",
    "Way",
    "may_copy",
    "may_finish",
    "may_replay",
    "permitted",
    "refused_with",
    "replaying",
]

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
