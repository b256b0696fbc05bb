"""Commands that the core takes, effects that it returns, and Refusal, raised for a command that it rejects."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass

from swift_ft.log.record import STEP_MAX
from swift_ft.planner import HeldSnapshot, RankMeasured, StreamSummary
from swift_ft_services.coordinator.job_record import Origin, State, VoteKind

# --- commands ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    """The process that sends a command; checked against the holder of its rank."""

    rank: int
    incarnation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A process asks to hold a rank."""

    rank: int
    incarnation: str
    pid: int
    host: str
    world_size: int
    config: Mapping[str, str]
    fingerprint: Mapping[str, str]
    run: str = ""
    """Launcher that started the process; empty if there is none."""
    from_job: str = ""
    """Job whose checkpoint this job is to begin with; empty: not specified."""
    from_version: int | None = None
    """Version of that checkpoint; None: the newest."""
    origin: Origin | None = None
    """The checkpoint that `from_job` and `from_version` resolve to; set by the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replaying:
    """Progress of a rank's replay."""

    version: int
    target: int
    seconds_left: float | None
    """None: not known yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unsaved:
    """A checkpoint that a rank could not write yet. The rank has given up older checkpoints that it had not written."""

    version: int
    generation: int
    """Generation in which it was saved."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    sender: Sender
    version: int
    replay: Replaying | None = None
    unsaved: Unsaved | None = None
    kept: bool = False
    """True if sent by a separate process on the rank's behalf: it reports only that the rank's process exists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberReport:
    """State that a rank holds when a recovery begins, and the versions that it can reach."""

    sender: Sender
    generation: int
    version: int | None
    """None: the rank holds no state."""
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
    """True: a repeated step gave a different result. False: a record is damaged or missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Differs:
    """A repeated step gave a different result."""

    sender: Sender
    version: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """A launcher's process has begun or completed a rehearsal: it repeats steps of a rank."""

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
    """0: not specified."""
    recorded: bool = False
    """True if the rank records its steps from this version on, for a rehearsal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskCheckpoint:
    sender: Sender | None
    """None: a launcher asks, for any version above those that ranks have reached."""
    generation: int
    after_version: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measure:
    """Measured durations of the rank's steps."""

    sender: Sender
    measured: RankMeasured


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberExited:
    """A process has exited, or a launcher reports on the place of a rank."""

    rank: int
    incarnation: str
    """Empty: the holder of the rank with this pid."""
    pid: int
    exit_code: int
    unfit: str = ""
    """Reason why the rank's place failed the launcher's health check; if set, no process has exited."""
    given_up: bool = False
    """True if no process will take the rank's place any more. Without an incarnation no process has exited now."""

    @property
    def is_of_process(self) -> bool:
        """Returns True for the exit of a process, False for a report on the rank's place."""
        return not self.unfit and not (self.given_up and not self.incarnation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    sender: Sender
    reason: str
    generation: int = 0
    """Generation in which the connection was lost; 0: not specified, and the suspicion is only shown."""
    again: bool = False
    """True if the trainer's step raised an error and is to be repeated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish:
    sender: Sender
    version: int
    num_steps: int = 0
    """Number of steps planned; 0: not specified."""
    called: bool | None = None
    """Whether its trainer ended the job in the last step it ran, before all planned steps; None: the rank did not run
    that step itself."""
    reason: str = ""
    """Reason that the trainer gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Revoke:
    """A group of a generation is revoked: it is not used any more."""

    sender: Sender
    generation: int
    reason: str
    label: str = ""
    """Name of the group; empty: all groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vote:
    """The vote of a member on a decision of its communicator."""

    sender: Sender
    generation: int
    number: int
    """Number of the decision, from 0 in every generation."""
    kind: VoteKind
    value: int = 0
    acknowledged: frozenset[int] = frozenset()
    """Slots whose loss the member has acknowledged."""
    reason: str = ""
    """Reason why groups could not be built (kind BUILT with value 0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A launcher was asked to stop, and its ranks have ended."""

    run: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fail:
    sender: Sender | None
    """None: sent by a launcher or an operator."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A clock tick: leases may have expired."""

    behind: bool = False
    """True if messages since the last tick may be unread: that time does not count against leases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsFenced:
    """Every log server holds `generation` durably."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsBlocked:
    """A log server does not answer and is asked again. An empty reason: it has answered."""

    generation: int
    address: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsRefused:
    """A log server will never grant this generation: it holds a higher one, or cannot serve the job."""

    generation: int
    reason: str
    address: str = ""
    unfit: bool = False
    """True if it cannot serve the job: the job continues without it if another one is left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InventoryTaken:
    generation: int
    servers: Mapping[str, Sequence[StreamSummary]]
    """Address -> its summary of each stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogHeard:
    """A log server has answered any call."""

    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeLogServers:
    """(operator) One log server is lost, another one is available; either may be empty."""

    lost: str = ""
    add: str = ""
    add_host: str = ""
    why: str = ""
    """Reason for the loss; empty: an operator reports it. With a reason, `lost` and `add` may be the same server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsPressed:
    """A log server needs a trim of this job soon."""

    address: str
    reason: str
    trimmed_below_step: int
    """Step below which the job is trimmed there."""


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
"""Fields of a Vote that are bit masks, not counters."""


def number_problem(said: object, name: str = "") -> str:
    """Returns why a number in a member's message, at any depth, is too large to count on from; empty if none is.
    (Messages also show the version after a reported one.)"""
    if isinstance(said, int):
        return f"{name} {said}: numbers go up to {STEP_MAX}" if abs(said) > STEP_MAX else ""
    parts: Iterable[tuple[str, object]] = ()
    if is_dataclass(said):
        parts = [(part.name, getattr(said, part.name)) for part in fields(said) if part.name not in _MASKS]
    elif isinstance(said, tuple):
        parts = [(name, part) for part in said]
    return next(filter(None, (number_problem(part, name) for name, part in parts)), "")


# --- effects: carried out in order, all idempotent ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Persist:
    """Make the row durable. The effects after it must wait until it is."""

    entered: State | None = None
    """The state that this row enters; None if state and generation are unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishView:
    at_once: bool = False
    """True if members act on new content of the View although state and generation are unchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceLogs:
    """Fence all log servers. Answered by LogsFenced, LogsBlocked or LogsRefused."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchInventory:
    """Fetch the stream summaries of all log servers. Answered by InventoryTaken."""

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

# --- refusals: the row is unchanged ---


class Refused(enum.Enum):
    """Kinds of refusal."""

    FENCED = "the sender does not hold its rank"
    MISMATCH = "configuration or fingerprint differs, or the job is over"
    TAKEN = "the rank has a live holder"
    INVALID = "the command makes no sense now"


class Refusal(Exception):
    """A command was rejected. The message is for the sender."""

    def __init__(self, kind: Refused, message: str) -> None:
        super().__init__(message)
        self.kind = kind
