"""JobRow: all that is durable of one job (`parts` has how it is stored).

What a View shows is a function of this row, so nothing can be shown that is not durable.
"""

import enum
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields

from services.coordinator.tables import Table
from swift.recovery import Plan, Refusals, Report


class State(enum.StrEnum):
    """Where a job is; ARCHITECTURE.md has the transitions."""

    FORMING = "FORMING"
    RUNNING = "RUNNING"
    FENCING = "FENCING"
    PLANNING = "PLANNING"
    RECOVERING = "RECOVERING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    STOPPED = "STOPPED"

    @property
    def is_over(self) -> bool:
        return self in (State.FINISHED, State.FAILED, State.STOPPED)


LEGAL: Mapping[State, frozenset[State]] = {
    State.FORMING: frozenset({State.FORMING, State.RUNNING, State.FAILED, State.STOPPED}),
    State.RUNNING: frozenset({State.FENCING, State.FINISHED, State.FAILED}),
    State.FENCING: frozenset({State.FENCING, State.PLANNING, State.FAILED, State.STOPPED}),
    State.PLANNING: frozenset({State.FENCING, State.RECOVERING, State.FAILED, State.STOPPED}),
    State.RECOVERING: frozenset({State.FENCING, State.RUNNING, State.FAILED}),
    State.FINISHED: frozenset({State.FENCING, State.FORMING}),
    State.FAILED: frozenset({State.FENCING, State.FORMING}),
    State.STOPPED: frozenset({State.FENCING, State.FORMING}),
}


class IllegalTransition(AssertionError):
    """A bug of the core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds (or held) a rank."""

    rank: int
    incarnation: str
    pid: int
    host: str
    since_generation: int
    member: int = 0
    """The id of this process, which no other one of the job ever has."""
    gone: bool = False
    """Exited with code 0 after it said Finish."""

    def is_process(self, incarnation: str, pid: int) -> bool:
        return self.incarnation == incarnation if incarnation else self.pid == pid


@dataclass(frozen=True, kw_only=True, slots=True)
class LogServer:
    """A log server, for good: its number is its place in `JobRow.log_servers`."""

    address: str
    host: str = ""
    """Its machine."""
    lost: str = ""
    """Why nobody reads or writes it any more; empty: it is in use."""
    fresh: bool = False
    """It came while the job ran: it is emptied before it is used."""
    instead_of: int | None = None
    """The number of the lost one that it came to replace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The streams of one rank on one log server."""

    server: int
    whole_from: int | None = None
    """The step from which on it was written; None: the generation that began it has not got to RUNNING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLogs:
    """Where the streams that a rank writes are kept."""

    host: str
    """The rank's machine."""
    copies: tuple[Copy, ...] = ()
    lost: str = ""
    """Why older records are gone: all servers that had them are lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A checkpoint of another job, with which this one begins."""

    job: str
    version: int
    inexact: str = ""
    """Why it is not what a run that never failed has; empty: it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """Where a trainer has ended the job, before its last step."""

    version: int
    num_steps: int
    """So many there were to be."""
    rank: int
    reason: str


class VoteKind(enum.StrEnum):
    """What the members of a communicator decide together; `coordinator.proto` has what each means."""

    BUILT = "BUILT"
    AGREE = "AGREE"
    SHRINK = "SHRINK"
    GROW = "GROW"
    MISMATCH = "MISMATCH"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the members of a communicator have decided."""

    kind: VoteKind
    value: int = 0
    failed: tuple[int, ...] = ()
    """Slots that were lost, and that not all had acknowledged."""
    words: str = ""


LACKS = -1

COUNT_MAX = 1 << 16


def count_of(config: Mapping[str, str], name: str, usual: int) -> int:
    """A number of the job's configuration. ValueError, in one line: it is none."""
    text = config.get(name, str(usual))
    if not (
        text.isascii() and text.isdigit() and len(text) <= len(str(COUNT_MAX)) and int(text) <= COUNT_MAX
    ):
        raise ValueError(f"{name} {text[:20]!r} is no number of 0 to {COUNT_MAX}")
    return int(text)


def replicas_of(config: Mapping[str, str]) -> int:
    """Data-parallel ranks of the job, as it is configured."""
    return count_of(config, "replicas", 1)


@dataclass(kw_only=True, slots=True)
class JobRow:
    """All durable state of a job. Its fields, and entries of its tables, are replaced; nothing in them is changed."""

    job: str
    world_size: int
    config: dict[str, str]
    fingerprint: dict[str, str]
    log_servers: list[LogServer]
    """All there ever were; their numbers do not change."""
    copies: int = 1
    """On how many of them each stream is wanted."""
    placement: dict[int, RankLogs] = field(default_factory=Table)
    """rank -> where its streams are; from the moment that all have joined."""

    state: State = State.FORMING
    generation: int = 1
    revision: int = 0
    """Grows with every write of the row."""
    reason: str = ""
    """Why this generation was made, or why the job failed."""

    holders: dict[int, Holder] = field(default_factory=Table)
    """The live holder of each rank."""
    members: int = 0
    """How many processes have joined: the id of the latest one."""
    vacant: dict[int, int | None] = field(default_factory=Table)
    """Slots that nobody holds, nor is to hold -> the version since when; None: since the recovery under way."""
    move: list[int] = field(default_factory=list)
    """The rank that is to give its place to one that was lost, and that one; empty: none is."""
    unlogged_below: int | None = None
    """Below this version the log lacks what was done while a slot was vacant (LACKS: RUNNING tells which); None: it
    lacks nothing of that."""
    given_up: list[int] = field(default_factory=list)
    """Slots that are not vacant yet, and for which no process comes any more."""
    fenced: list[Holder] = field(default_factory=list)
    """Incarnations that must not run."""
    num_stages: int = 0
    stages: dict[int, list[int]] = field(default_factory=Table)
    stage_shards: dict[int, int] = field(default_factory=Table)
    """Which shard of the state of its stages each rank holds."""
    granted: int = 0
    """The newest generation that every log server holds. granted <= generation."""
    blocked: dict[str, str] = field(default_factory=Table)
    """Log servers that do not answer, with the reason."""

    reports: dict[int, Report] = field(default_factory=Table)
    """Of this generation: what each rank holds and can get to."""
    ready: dict[int, int] = field(default_factory=Table)
    """Of this generation: the version each rank is ready at."""
    off_log: list[int] = field(default_factory=list)
    """Of this generation: those that are ready, but not with what the log leads to."""
    finished: dict[int, int] = field(default_factory=Table)
    """Of this generation: the version each rank finished at."""
    called: dict[int, bool] = field(default_factory=Table)
    """Of those that have done the last step: whether it was ended there by their own trainer's word."""
    end: End | None = None
    """Before the last step; None: nobody has ended it."""
    plan: Plan | None = None
    """Of this generation, since PLANNING."""
    sources: dict[str, list[int]] = field(default_factory=dict)
    """Of this generation's plan: stream -> the log servers to read it from, the best first."""
    refused: Refusals = field(default_factory=Refusals)
    """What this recovery does without; nothing once RUNNING."""
    distrusted: list[int] = field(default_factory=list)
    """Ranks whose state came of what was refused: they count as holding none, until RUNNING."""
    refusals: int = 0
    """Generations for which nobody had died, since a new version was reached."""
    setbacks: int = 0
    """All generations since then."""
    exits: dict[int, list[int]] = field(default_factory=Table)
    """rank -> the codes with which its processes have ended by themselves since then."""
    reached: int = 0
    """The highest version that a rank had when a generation was made: a higher one, on all ranks, is a new one."""
    unloadable: list[int] = field(default_factory=list)
    """Complete checkpoints that some rank could not load in this recovery."""
    runs: list[str] = field(default_factory=list)
    """The launchers whose ranks have joined since the job began, or was started again."""
    run_of: dict[int, str] = field(default_factory=Table)
    """rank -> the launcher of its last process; without those of launchers that were told to stop."""
    exit_code: int = 0
    """Of a job that has failed: what its launchers end with, if it is not 1."""
    final: int | None = None
    """Of a job that has finished: its last version, if the checkpoint of it is complete."""
    log_ends: bool = False
    """The checkpoint behind which the log begins anew is complete, or the log is empty already: it goes, with
    whatever it holds by then, before the job runs."""

    origin: Origin | None = None
    """What the job has begun with; None: with version 0 of its own."""
    checkpoints: list[int] = field(default_factory=list)
    """Complete versions, ascending; the newest two."""
    shards: dict[int, frozenset[int]] = field(default_factory=Table)
    """Incomplete checkpoints: version -> the ranks whose shard is durable."""
    shards_from: int = 0
    """Incomplete checkpoints below are given up: ranks may have removed their shards."""
    checkpoint_at: int | None = None
    """The version of an early checkpoint: every rank saves it, whatever the interval says."""
    checkpoint_reason: str = ""
    rolled_back_in: int = 0
    """The last generation that restored a checkpoint, or undid a step inexactly: what was saved after that version,
    and what is saved in older generations, belongs to a history that was given up."""

    differed: str = ""
    """What came out different when it was done again, in this recovery; nothing once RUNNING."""
    inexact_since: int | None = None
    """Since that version the bits are not those of a run that never failed; None: they are."""
    inexact_reason: str = ""

    groups: str = ""
    """The recovery groups in force; empty: every rank by itself."""
    groups_since: int = 0
    """The version since when the log has what crosses these."""
    groups_next: str = ""
    """Those that are wanted; empty: none are."""
    groups_number: int = 0
    """Of the last wish."""
    groups_from: dict[int, int] = field(default_factory=Table)
    """rank -> the version since when it logs by the wanted ones."""

    taking_part: dict[int, int] = field(default_factory=Table)
    """(of a communicator's job, as the two that follow) Slot -> the id of the member that is in this generation."""
    revoked: dict[str, str] = field(default_factory=dict)
    """Groups of this generation that nobody uses any more, by their label (all of them: empty), and why."""
    decisions: dict[int, Decision] = field(default_factory=Table)
    """Number -> what was decided in this generation; the last two."""

    def __setattr__(self, name: str, value: object) -> None:
        """A dict becomes a Table, so that what changes in it is known."""
        if type(value) is dict and name in TABLE_FIELDS:
            value = Table(value)
        object.__setattr__(self, name, value)

    def slots(self) -> Iterator[int]:
        """Those that a process holds, or is to hold, by number."""
        return (slot for slot in range(self.world_size) if slot not in self.vacant)

    @property
    def wanted(self) -> int:
        """So many processes the job has, once all have joined."""
        return self.world_size - len(self.vacant)

    def lacks(self, said: Sized) -> bool:
        """Not all of them have said so yet. `said`: by rank, of those alone."""
        return len(said) < self.wanted

    def living(self) -> list[int]:
        """The log servers that are in use."""
        return [number for number, server in enumerate(self.log_servers) if not server.lost]

    def lacks_log_server(self) -> bool:
        """All are lost."""
        return bool(self.log_servers) and not self.living()

    def addresses(self) -> list[str]:
        return [self.log_servers[number].address for number in self.living()]


TABLE_FIELDS = frozenset(field.name for field in fields(JobRow) if field.default_factory is Table)
