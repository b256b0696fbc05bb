"""Commands that the core takes, effects that it returns, and Refusal, raised for a command that it rejects.

A command of a member, a launcher or an operator is the request itself (`Request`), once the gate (`service.py`)
has accepted it. The classes here are those that are no request: the driver's, and the log servers' answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import CALLS
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator.job_record import Origin, State

# --- commands ---


class FromMember(Protocol):
    """A message of a process, which is checked against the holder of its rank."""

    @property
    def rank(self) -> int: ...
    @property
    def incarnation(self) -> str: ...


class OfGeneration(FromMember, Protocol):
    """A message of a process that holds for one generation."""

    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Join:
    """A process asks to hold a rank."""

    request: pb.JoinRequest
    origin: Origin | None = None
    """The checkpoint that the request's `from_job` and `from_version`, or `found`, resolve to; set by the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A clock tick: leases may have expired."""

    behind: bool = False
    """True if messages since the last tick may be unread: that time does not count against leases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsFenced:
    """Every log server holds `generation` durably."""

    generation: int
    cold: Mapping[str, str] = field(default_factory=dict)
    """Address -> where in the object store it has what it moves of the job; empty: it moves nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogsBlocked:
    """A log server does not answer and is asked again. An empty reason: it has answered. `given_up`: another job has
    given this server up, and it has not answered since."""

    generation: int
    address: str
    reason: str
    given_up: bool = False


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
    moved: Mapping[int, Sequence[StreamSummary]] = field(default_factory=dict)
    """Number of a lost server -> summary of what it has moved to the object store, of each stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogHeard:
    """A log server has answered any call."""

    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLost:
    """A log server that held this generation or an older one has lost the job: its disk is another one, or empty."""

    generation: int
    address: str


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
    cold: Mapping[str, str] = field(default_factory=dict)
    """As in LogsFenced: from now on they move to other places."""


Request = (
    pb.HeartbeatRequest
    | pb.ReportRequest
    | pb.ReadyRequest
    | pb.RefuseRequest
    | pb.CheckpointRequest
    | pb.AskCheckpointRequest
    | pb.ExitRequest
    | pb.SuspectRequest
    | pb.DiffersRequest
    | pb.RehearsedRequest
    | pb.FinishRequest
    | pb.FailRequest
    | pb.RevokeRequest
    | pb.VoteRequest
    | pb.StopRequest
    | pb.MeasureRequest
    | pb.ChangeLogServersRequest
)
"""Requests that are commands as they are."""

Command = (
    Request
    | Join
    | Tick
    | LogsFenced
    | LogsBlocked
    | LogsRefused
    | InventoryTaken
    | LogsReset
    | LogsPressed
    | LogHeard
    | LogLost
)


def name_of(command: Command) -> str:
    name = type(command).__name__
    return CALLS.get(name, name)


def is_of_process(exited: pb.ExitRequest) -> bool:
    """Returns True for the exit of a process, False for a report on the rank's place."""
    return not exited.unfit and not (exited.given_up and not exited.incarnation)


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
    """Drop what no recovery of this generation needs."""

    generation: int
    below_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Emit:
    """An event for the trace."""

    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


Effect = Persist | PublishView | FenceLogs | FetchInventory | ResetLogs | TrimLogs | Emit

# --- refusals: the row is unchanged ---


class Refusal(Exception):
    """A command was rejected. The message is for the sender."""


class Fenced(Refusal):
    """The sender does not hold its rank."""


class Mismatch(Refusal):
    """Configuration or fingerprint differs, or the job is over."""


class Taken(Refusal):
    """The rank has a live holder."""


class Invalid(Refusal):
    """The command makes no sense now."""
