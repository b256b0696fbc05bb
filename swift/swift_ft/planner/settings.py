"""The values of `SessionConfig.strategy`: what each one permits in a recovery, and how it treats a lost rank.

A setting permits strategies (`swift_ft.planner.strategies`), of which the planner takes the cheapest ones that fit the
ranks' reports. Everything else that depends on the setting follows from a field here; the rank's side is the list of
participants that it brings (`swift_ft.train.participants`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.types import Strategy

LOST_SHARDS = ("redistribute", "reroute", "drop")
"""Choices for the batches of a lost data-parallel rank: one other rank computes the whole batch, its peers share the
microbatches (pipelines), or the batch is dropped."""

QUICKEST = "quickest"
"""In place of a value of `LOST_SHARDS`: the one with the shortest steps while a rank is missing
(`swift_ft.planner.replay_cost.quickest`)."""

_EXACT = frozenset(Strategy) - {Strategy.LOSSY_FORWARD}
_REPLAYS = frozenset({Strategy.CATCH_UP, Strategy.REPLAY})
_WITHOUT_REPLAY = _EXACT - _REPLAYS - {Strategy.SNAPSHOT}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value of `SessionConfig.strategy`."""

    permits: frozenset[Strategy]
    """The strategies that the planner may use."""
    lost_shards: tuple[str, ...] = ()
    """Permitted values of `lost_shard`. With `shrinks`, the first one is the default."""
    not_lost_shards: str = (
        "a lost rank comes back, and computes its batches itself; leave it out, or use shrink, rollback or "
        "auto"
    )
    """Why no other value of `lost_shard` is permitted."""
    shrinks: bool = False
    """The others go on without a lost rank at once, in a smaller world, and never replay steps."""
    once_vacant: str = ""
    """The setting that takes this one's place once a slot is vacant (with a `lost_shard`)."""
    without_replicas: str = ""
    """(shrinks) The setting that the planner uses without replicas, where a lost rank's stages move to another rank;
    empty: the setting needs replicas."""
    staggers: bool = False
    """Steps may run ahead of their vote (`SessionConfig.staggered`)."""
    snapshot_every: int = 0
    """Steps between two snapshots if `SessionConfig.snapshot_every` is not set."""
    calls_again: bool = False
    """After a loss the training function is called again (`swift_ft.reinit`)."""

    @property
    def only_restores(self) -> bool:
        """True if all ranks always go back to the checkpoint."""
        return self.permits == {Strategy.CHECKPOINT}

    @property
    def reroutes(self) -> bool:
        """True if peers of a lost rank share its microbatches, whatever `lost_shard` is."""
        return self.shrinks and self.lost_shards[0] == "reroute"


SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        "auto": Setting(permits=_EXACT, lost_shards=(*LOST_SHARDS, QUICKEST), once_vacant="shrink"),
        "replica": Setting(permits=_WITHOUT_REPLAY),
        "replay": Setting(permits=_EXACT - {Strategy.REPLICA, Strategy.SNAPSHOT}),
        "checkpoint": Setting(permits=frozenset({Strategy.CHECKPOINT})),
        "shrink": Setting(
            permits=_WITHOUT_REPLAY,
            lost_shards=("redistribute", "drop"),
            not_lost_shards="one rank computes a lost one's batch; leave it out, or use adaptive",
            shrinks=True,
            without_replicas="auto",
        ),
        "adaptive": Setting(
            permits=_WITHOUT_REPLAY,
            lost_shards=("reroute", "redistribute"),
            not_lost_shards="the peers of a lost rank compute its microbatches; leave it out, or use shrink",
            shrinks=True,
            staggers=True,
        ),
        "rollback": Setting(
            permits=_WITHOUT_REPLAY - {Strategy.ROLL_FORWARD},
            lost_shards=("redistribute", "drop"),
            not_lost_shards="one rank computes a lost one's batch; leave it out, or use adaptive",
            shrinks=True,
        ),
        "lossy-forward": Setting(
            permits=_WITHOUT_REPLAY | {Strategy.LOSSY_FORWARD},
            lost_shards=("drop",),
            not_lost_shards=(
                "nobody computes the batches of a lost rank; leave it out, or use shrink or rollback"
            ),
            shrinks=True,
        ),
        "snapshot": Setting(permits=_EXACT - _REPLAYS - {Strategy.REPLICA}, snapshot_every=10),
        "reinit": Setting(permits=frozenset({Strategy.CHECKPOINT}), calls_again=True),
    }
)
STRATEGIES = tuple(SETTINGS)


def shrinks(strategy: str) -> bool:
    """Returns whether a job with this strategy goes on without a lost rank at once."""
    return strategy in SETTINGS and SETTINGS[strategy].shrinks


def reroutes(strategy: str, lost_shard: str) -> bool:
    """Returns whether the peers of a lost rank share its microbatches, within the common step."""
    return lost_shard == "reroute" or (strategy in SETTINGS and SETTINGS[strategy].reroutes)


def lost_shard_problem(strategy: str, lost_shard: str) -> str:
    """Returns why `lost_shard` is invalid with this strategy; empty if it is valid or not set."""
    setting = SETTINGS[strategy]
    if not lost_shard or lost_shard in setting.lost_shards:
        return ""
    if lost_shard == QUICKEST and setting.shrinks:
        return "only auto chooses; leave it out"
    return setting.not_lost_shards


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    strategy: str = "auto"
    """"auto": without replay if every stage reaches one version without, else by replay, or by snapshots if there are
    any and that takes less time, else the checkpoint; "replica": as "auto", but steps are never replayed; "replay":
    states are never copied, and a stage with a rank that holds no state is replayed; "checkpoint": always restore the
    checkpoint; "shrink": the others go on without a lost rank, and steps are never replayed; "adaptive": as "shrink",
    and its peers share its microbatches; "rollback": as "shrink", but the interrupted step is never finished;
    "lossy-forward": as "shrink", but that step is finished with the gradients of the remaining ranks; "snapshot": all
    go back to the newest copies in host memory, without replica copies or replay; "reinit": as "checkpoint", which
    ranks load where their training function begins again."""
    inexact_undo: bool = False
    """Permits an undo that is not bit-exact."""
    groups: RecoveryGroups = RecoveryGroups()  # noqa: RUF009  (frozen)
    """Stages that recover together."""
    helpers: int = 0
    """The most other ranks that share a replay with its owner."""

    def __post_init__(self) -> None:
        if self.strategy not in SETTINGS:
            raise ValueError(f"strategy {self.strategy!r} is not known: use one of {', '.join(SETTINGS)}")

    @property
    def setting(self) -> Setting:
        return SETTINGS[self.strategy]
