"""What goes into the core (commands), what comes out (effects), and how it says no (Refusal)."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass

from swift_ft.log.record import STEP_MAX
from swift_ft.planner import HeldSnapshot, RankMeasured, StreamSummary
from swift_ft_services.coordinator.job_record import Origin, State, VoteKind

# --- commands ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    """The process that speaks: checked against the holder of its rank."""

    rank: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A process wants to be a rank."""

    rank: int
    incarnation: str
    pid: int
    host: str
    world_size: int
    config: Mapping[str, str]
    fingerprint: Mapping[str, str]
    run: str = ""
    """The launcher that started the process; empty: there is none."""
    from_job: str = ""
    """The job with whose checkpoint this one is to begin; empty: nothing was said of it."""
    from_version: int | None = None
    """Of which version; None: the newest."""
    origin: Origin | None = None
    """(driver) What that is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaying:
    """How far a rank's replay is."""

    version: int
    target: int
    seconds_left: float | None
    """None: nobody knows yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A checkpoint that a rank could not write yet. What it had not written before that one, it has given up."""

    version: int
    generation: int
    """In which it was saved."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    sender: Sender
    version: int
    replay: Replaying | None = None
    unsaved: Unsaved | None = None
    kept: bool = False
    """By the process beside the rank's: that one is there. It tells nothing else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """What a rank holds when a recovery begins, and where it can go from there."""

    sender: Sender
    generation: int
    version: int | None
    """None: holds no state."""
    undo_to: int | None = None
    undo_exact: bool = False
    forward_to: int | None = None
    forward_by_all: bool = False
    finish_to: int | None = None
    can_help: bool = False
    off_log: bool = False
    snapshots: tuple[HeldSnapshot, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    sender: Sender
    generation: int
    version: int
    stages: tuple[int, ...]
    num_stages: int
    shard: int = 0
    off_log: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Refuse:
    sender: Sender
    generation: int
    reason: str
    differs: bool = False
    """What was done again came out different; not: a record is damaged or missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    """A step that was done again came out different."""

    sender: Sender
    version: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A launcher's process does steps of a rank again, or has done so."""

    rank: int
    version: int
    under_way: bool = False
    steps: int = 0
    difference: str = ""
    why_not: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDurable:
    """A rank's shard of the checkpoint of `version` is durable."""

    sender: Sender
    version: int
    generation: int
    """0: not said."""
    recorded: bool = False
    """The rank records its steps from this version on, for a rehearsal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskCheckpoint:
    sender: Sender | None
    """None: a launcher, of whatever is above what the ranks have done."""
    generation: int
    after_version: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """What the rank's steps take."""

    sender: Sender
    measured: RankMeasured


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberExited:
    """A process has exited, or something is said of its rank's place."""

    rank: int
    incarnation: str
    """Empty: whoever holds the rank with this pid."""
    pid: int
    exit_code: int
    unfit: str = ""
    """Nobody has exited: why the rank's place has failed the launcher's health check."""
    given_up: bool = False
    """No process takes the rank's place any more. Without an incarnation nobody has exited now."""

    @property
    def is_of_process(self) -> bool:
        """A process has exited; else it is of the rank's place."""
        return not self.unfit and not (self.given_up and not self.incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    sender: Sender
    reason: str
    generation: int = 0
    """In which the connection was lost; 0: not said, and then it is only shown."""
    again: bool = False
    """The trainer's step has raised an error, and is to be done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    sender: Sender
    version: int
    num_steps: int = 0
    """So many were to be done; 0: not said."""
    called: bool | None = None
    """Its trainer has ended the job in the last step, before all were done; None: it has not done that step itself."""
    reason: str = ""
    """The trainer's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoke:
    """A group of a generation is not used any more."""

    sender: Sender
    generation: int
    reason: str
    label: str = ""
    """Its name; empty: all groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """What a member brings to a decision of its communicator."""

    sender: Sender
    generation: int
    number: int
    """Of the decision, from 0 in every generation."""
    kind: VoteKind
    value: int = 0
    acknowledged: frozenset[int] = frozenset()
    """Slots whose loss it knows of."""
    reason: str = ""
    """BUILT, 0: why they could not be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A launcher was told to stop, and its ranks have ended."""

    run: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    sender: Sender | None
    """None: a launcher or an operator."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time has passed: leases may have expired."""

    behind: bool = False
    """What has come since the last one may not have been read: that time counts for no lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsFenced:
    """Every log server holds `generation` durably."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsBlocked:
    """A log server does not answer; it is asked again. An empty reason: it has answered."""

    generation: int
    address: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsRefused:
    """A log server will never grant this generation: it knows a higher one, or can do nothing for the job."""

    generation: int
    reason: str
    address: str = ""
    unfit: bool = False
    """The second: where another one is left, the job goes on without this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryTaken:
    generation: int
    servers: Mapping[str, Sequence[StreamSummary]]
    """Address -> what it has of each stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogHeard:
    """A log server has answered, whatever it was asked."""

    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeLogServers:
    """(operator) One is lost, another one is there; either may be empty."""

    lost: str = ""
    add: str = ""
    add_host: str = ""
    why: str = ""
    """It is lost; empty: an operator says so. Else it may be the one that has come, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsPressed:
    """A log server needs a trim of this job soon."""

    address: str
    reason: str
    trimmed_below_step: int
    """How far it is trimmed there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsReset:
    """Every log server has dropped the job's records."""

    generation: int


Command = (
    Join
    | Heartbeat
    | MemberReport
    | Ready
    | Refuse
    | CheckpointDurable
    | AskCheckpoint
    | Measure
    | MemberExited
    | Suspect
    | Differs
    | Rehearsed
    | Finish
    | Fail
    | Revoke
    | Vote
    | Stop
    | Tick
    | LogsFenced
    | LogsBlocked
    | LogsRefused
    | InventoryTaken
    | LogsReset
    | LogsPressed
    | LogHeard
    | ChangeLogServers
)


_MASKS = {"value"}
"""Of a Vote: bits, from which nobody counts on."""


def number_problem(said: object, name: str = "") -> str:
    """Of what a member says, down to its parts: a number that leaves no room to count on from it. Empty: there is none.
    The version above one that was told is shown in messages as well."""
    if isinstance(said, int):
        return f"{name} {said}: numbers go up to {STEP_MAX}" if abs(said) > STEP_MAX else ""
    parts: Iterable[tuple[str, object]] = ()
    if is_dataclass(said):
        parts = [(part.name, getattr(said, part.name)) for part in fields(said) if part.name not in _MASKS]
    elif isinstance(said, tuple):
        parts = [(name, part) for part in said]
    return next(filter(None, (number_problem(part, name) for name, part in parts)), "")


# --- effects, to be carried out in their order; all idempotent ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Persist:
    """Make the row durable. Nothing after it may happen before it is."""

    entered: State | None = None
    """The state that this row is the first of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishView:
    at_once: bool = False
    """Members act on what is new in it, though state and generation are as before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceLogs:
    """Answered by LogsFenced, LogsBlocked or LogsRefused."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchInventory:
    """Answered by InventoryTaken."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetLogs:
    """Drop every record of the job, under this generation. Answered by LogsReset."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrimLogs:
    below_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """An event for the trace."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


Effect = Persist | PublishView | FenceLogs | FetchInventory | ResetLogs | TrimLogs | Emit

# --- refusals: nothing was changed ---


class Refused(enum.Enum):
    """Why the core says no."""

    FENCED = "the sender does not hold its rank"
    MISMATCH = "configuration or fingerprint differs, or the job is over"
    TAKEN = "the rank has a live holder"
    INVALID = "the command makes no sense now"


class Refusal(Exception):
    """The core will not take a command. The message is for the sender."""

    def __init__(self, kind: Refused, message: str) -> None:
        super().__init__(message)
        self.kind = kind
