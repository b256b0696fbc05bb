"""A job's row in parts, as the store keeps it, and which of them have changed.

    jobs/NAME/row           what is one value of the row, by its field
    jobs/NAME/FIELD         a large value, that seldom changes (`WHOLE`)
    jobs/NAME/FIELD/KEY     an entry of a table (`TABLES`), or of the list that only grows (`fenced`)

A part is its checksum and its JSON: a database has none, and would give a flipped digit as it is. The checksum is over
its key as well. That all parts are there, and of one moment, is the store's to see.
"""

import enum
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn, TypeVar

import crc32c

from swift_ft.planner import HeldSnapshot, Help, Plan, Prediction, RankPlan, Refusals, Report, Strategy
from swift_ft_services.coordinator.store import Stored

# Table: a dict that knows which of its entries have changed.

K = TypeVar("K")
V = TypeVar("V")


class Table(dict[K, V]):
    """Entries are replaced, never changed in place: what is in here is immutable, or treated so."""

    __slots__ = ("changed",)

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        super().__init__(entries)
        self.changed: set[K] = set(self)
        """Keys that were set or deleted since somebody has last emptied this set."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.changed.add(key)

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        self.changed.add(key)

    def pop(self, key: K, *default: V) -> V:  # type: ignore[override]
        value = super().pop(key, *default)
        self.changed.add(key)
        return value

    def setdefault(self, key: K, default: V) -> V:
        if key not in self:
            self[key] = default
        return self[key]

    def _unsupported(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("set and delete entries one by one, or put another Table in the place of this one")

    clear = update = popitem = __ior__ = _unsupported


# JobRow: all that is durable of one job (`Changes` has how it is stored).
#
# What a View shows is a function of this row, so nothing can be shown that is not durable.


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What is known of the rehearsals of one rank."""

    recorded: int | None = None
    """The rank records its steps from this version on; None: of none that a rehearsal could begin with."""
    under_way: int | None = None
    """The version of the checkpoint that one under way began with."""
    done: int = 0
    """How many were done. The three that follow tell of the last one."""
    version: int = 0
    steps: int = 0
    difference: str = ""
    """The first one; empty: there is none."""
    why_not: str = ""
    """Why the last attempt could not be done; empty: it was."""


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

    rehearsals: dict[int, Rehearsal] = field(default_factory=Table)
    """By rank."""

    groups: str = ""
    """The recovery groups; empty: every rank by itself."""

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


FORMAT = 6
ROOT = "jobs/"


def key_of(job: str, *parts: object) -> str:
    return "/".join([f"{ROOT}{job}", *map(str, parts)])


def row_key(job: str) -> str:
    """Of the part that is written with every other one."""
    return key_of(job, "row")


class Changes:
    """What of a row is not durable yet. It looks at what has changed since it has looked last, not at the whole row."""

    def __init__(self, row: JobRow, *, stored: bool = False) -> None:
        """`stored`: all of the row is durable; not: nothing of it is."""
        self._row = row
        self._tables: dict[str, Table[Any, Any]] = {}
        self._seen: dict[str, Any] = {}
        self._fenced = 0
        self._tables_dirty: dict[str, set[Any]] = {name: set() for name in TABLES}
        self._whole_dirty: set[str] = set()
        self._row_dirty = False
        self._fenced_from = 0
        if stored:
            self.detect()
            self._forget_dirty()

    def detect(self) -> bool:
        """Whether anything has changed since the last time."""
        row, news = self._row, False
        for name in TABLES:
            table: Table[Any, Any] = getattr(row, name)
            known = self._tables.get(name)
            if table is not known:
                self._tables_dirty[name] |= {*table, *(known or ()), *(known.changed if known else ())}
                news |= bool(table) or bool(known)
                self._tables[name] = table
            elif table.changed:
                self._tables_dirty[name] |= table.changed
                news = True
            if table.changed:
                table.changed.clear()
        for name in _COMPARED:
            value = getattr(row, name)
            if name not in self._seen or (value is not self._seen[name] and value != self._seen[name]):
                news = True
                if name in WHOLE:
                    self._whole_dirty.add(name)
            self._seen[name] = list(value) if isinstance(value, list) else value
        if len(row.fenced) != self._fenced:
            self._fenced, news = len(row.fenced), True
        self._row_dirty |= news
        return news

    def drain(self) -> tuple[dict[str, str], list[str]]:
        """(parts to put, keys to delete) since the last time: with them what is stored is what `detect` has seen."""
        if not self._row_dirty:
            return {}, []
        row, puts, deletes = self._row, dict[str, str](), list[str]()
        for name, dirty in self._tables_dirty.items():
            table = self._tables[name]
            for entry in dirty:
                key = key_of(row.job, name, entry)
                if entry in table:
                    puts[key] = _sealed(key, table[entry])
                else:
                    deletes.append(key)
        for name in self._whole_dirty:
            key = key_of(row.job, name)
            puts[key] = _sealed(key, getattr(row, name))
        for number in range(self._fenced_from, len(row.fenced)):
            key = key_of(row.job, "fenced", number)
            puts[key] = _sealed(key, row.fenced[number])
        key = row_key(row.job)
        puts[key] = _sealed(key, self._values())
        self._forget_dirty()
        return puts, deletes

    def _values(self) -> dict[str, Any]:
        return {"format": FORMAT, **{name: getattr(self._row, name) for name in _VALUES}}

    def _forget_dirty(self) -> None:
        for dirty in self._tables_dirty.values():
            dirty.clear()
        self._whole_dirty.clear()
        self._fenced_from = len(self._row.fenced)
        self._row_dirty = False


def by_job(stored: Mapping[str, Stored]) -> dict[str, dict[str, Stored]]:
    """name -> the parts of that job."""
    found: dict[str, dict[str, Stored]] = {}
    for key, part in stored.items():
        found.setdefault(key.removeprefix(ROOT).partition("/")[0], {})[key] = part
    return found


def encode(row: JobRow) -> dict[str, str]:
    """All parts of it."""
    copy = JobRow(**{field.name: getattr(row, field.name) for field in fields(row)})
    for name in TABLES:  # what has changed in the row itself is for its own `Changes` to see
        setattr(copy, name, Table(getattr(row, name)))
    changes = Changes(copy)
    changes.detect()
    return changes.drain()[0]


def decode(job: str, parts: Mapping[str, str]) -> JobRow:
    """The row that these are all parts of. ValueError, or whatever Python says of parts that are none."""
    prefix = key_of(job, "")
    said = {key: _opened(key, text) for key, text in parts.items()}
    if row_key(job) not in said:
        raise ValueError("the part that holds it together is missing")
    values: dict[str, Any] = said.pop(row_key(job))
    if values.pop("format") != FORMAT:
        raise ValueError("it was written by another version of the coordinator")
    for name in TABLES:
        values[name] = Table[Any, Any]()
    fenced: dict[int, Holder] = {}
    for key, value in said.items():
        name, _, entry = key.removeprefix(prefix).partition("/")
        if name == "fenced":
            fenced[int(entry)] = Holder(**value)
        elif name in TABLES:
            key_from, value_from = TABLES[name]
            values[name][key_from(entry)] = value_from(value)
        else:
            values[name] = WHOLE[name](value)
    values["fenced"] = [fenced[number] for number in range(len(fenced))]
    for name, from_json in _FROM_JSON.items():
        values[name] = from_json(values[name])
    return JobRow(**{**values, **{name: Table(sorted(values[name].items())) for name in TABLES}})


def _sealed(key: str, value: object) -> str:
    text = json.dumps(value, separators=(",", ":"), default=_plain)
    return f"{_checksum(key, text)} {text}"


def _opened(key: str, sealed: str) -> Any:
    checksum, _, text = sealed.partition(" ")
    if checksum != _checksum(key, text):
        raise ValueError(f"the checksum of {key} does not match")
    return json.loads(text)


def _checksum(key: str, text: str) -> str:
    return f"{crc32c.crc32c(f'{key} {text}'.encode(errors='replace')):08x}"


def _plain(value: Any) -> Any:
    """What JSON has no word for."""
    if isinstance(value, frozenset):
        return sorted(value)
    assert is_dataclass(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _same(value: Any) -> Any:
    return value


def _rank_logs(value: dict[str, Any]) -> RankLogs:
    return RankLogs(**{**value, "copies": tuple(Copy(**copy) for copy in value["copies"])})


def _report(value: dict[str, Any]) -> Report:
    snapshots = tuple(HeldSnapshot(*held) for held in value.get("snapshots", ()))
    return Report(**{**value, "snapshots": snapshots})


def _decision(value: dict[str, Any]) -> Decision:
    return Decision(**{**value, "kind": VoteKind(value["kind"]), "failed": tuple(value["failed"])})


def _refusals(value: dict[str, Any]) -> Refusals:
    return Refusals(**{**value, "strategies": tuple(map(Strategy, value["strategies"]))})


def _plan(value: dict[str, Any] | None) -> Plan | None:
    if value is None:
        return None
    ranks = tuple(
        RankPlan(**{**r, "strategy": Strategy(r["strategy"]), "sources": tuple(r["sources"])})
        for r in value["ranks"]
    )
    help = tuple(
        Help(**{**h, "helpers": tuple(h["helpers"]), "together": tuple(h["together"])}) for h in value["help"]
    )
    predictions = tuple(Prediction(**one) for one in value["predictions"])
    return Plan(**{**value, "ranks": ranks, "help": help, "predictions": predictions})


FromJson = Callable[[Any], Any]

TABLES: Mapping[str, tuple[Callable[[str], Any], FromJson]] = {
    "holders": (int, lambda value: Holder(**value)),
    "placement": (int, _rank_logs),
    "stages": (int, _same),
    "stage_shards": (int, _same),
    "blocked": (str, _same),
    "reports": (int, _report),
    "ready": (int, _same),
    "finished": (int, _same),
    "called": (int, _same),
    "exits": (int, _same),
    "run_of": (int, _same),
    "shards": (int, frozenset),
    "vacant": (int, _same),
    "taking_part": (int, _same),
    "decisions": (int, _decision),
    "rehearsals": (int, lambda value: Rehearsal(**value)),
}
"""Field -> how its keys and its values are read."""

WHOLE: Mapping[str, FromJson] = {
    "config": _same,
    "fingerprint": _same,
    "log_servers": lambda value: [LogServer(**server) for server in value],
    "runs": _same,
    "plan": _plan,
    "sources": _same,
    "revoked": _same,
}

_FROM_JSON: Mapping[str, FromJson] = {
    "state": State,
    "refused": _refusals,
    "end": lambda value: None if value is None else End(**value),
    "origin": lambda value: None if value is None else Origin(**value),
}
"""Of the values of `row`: those that JSON has no words for."""

_VALUES = tuple(
    field.name
    for field in fields(JobRow)
    if field.name not in TABLES and field.name not in WHOLE and field.name != "fenced"
)
_COMPARED = tuple(name for name in (*_VALUES, *WHOLE) if name != "revision")
