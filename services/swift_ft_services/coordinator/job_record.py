"""The row of a job in parts, as the store keeps it, the detection of changed parts, and the job's history.

    jobs/NAME/row                    the number of this format, and the row's revision; written with any other part
    jobs/NAME/FIELD                  a field of the row
    jobs/NAME/FIELD/KEY              an entry of a field that is a `Table`
    history/NAME/GENERATION/STATE    written in the transaction that makes the state durable, and never changed

A part is its checksum followed by its JSON: the database has no checksums and would return a flipped digit unnoticed.
The checksum covers the key too. The store guarantees that all parts are present and from one transaction.
"""

import enum
import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import crc32c
from google.protobuf.message import Message

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_messages import as_json
from swift_ft.planner import Plan, Refusals, Report

# Table: a dict that records which of its entries have changed.

K = TypeVar("K")
V = TypeVar("V")


class Table(dict[K, V]):
    """A dict whose entries are replaced, never modified in place: values are immutable, or treated as immutable."""

    __slots__ = ("changed",)

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        super().__init__(entries)
        self.changed: set[K] = set(self)
        """Keys set or deleted since this set was last cleared."""

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


# JobRow: all durable state of one job (`Changes` defines how it is stored).
#
# A View is a function of this row, so it can show only durable state.


class State(enum.StrEnum):
    """The state of a job; ARCHITECTURE.md has the transitions."""

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
    """An illegal state transition: a bug of the core."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that holds (or held) a rank."""

    rank: int
    incarnation: str
    pid: int
    host: str
    since_generation: int
    member: int = 0
    """Id of this process, unique within the job."""
    gone: bool = False
    """True once it has exited with code 0 after Finish."""

    def is_process(self, incarnation: str, pid: int) -> bool:
        return self.incarnation == incarnation if incarnation else self.pid == pid


@dataclass(frozen=True, kw_only=True, slots=True)
class LogServer:
    """A log server. Its number, permanent, is its index in `JobRow.log_servers`."""

    address: str
    host: str = ""
    """Machine that it runs on."""
    lost: str = ""
    """Reason why it is no longer read or written; empty while in use."""
    fresh: bool = False
    """True if it is not in use yet: it is emptied before."""
    added: bool = False
    """True if an operator has named it while the job ran."""
    cold: str = ""
    """Where in the object store it has what it has moved of this job, since the log began; empty: nowhere."""
    below: int | None = None
    """(lost) Version at which training continued without it: it has nothing that counts from there on. None: the
    generation has not reached RUNNING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """The streams of one rank on one log server."""

    server: int
    whole_from: int | None = None
    """First step from which this copy has every record; None: the generation that started it has not reached
    RUNNING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLogs:
    """Locations of the streams that a rank writes."""

    host: str
    """Machine of the rank."""
    copies: tuple[Copy, ...] = ()
    lost: str = ""
    """Reason why older records are gone: every server that held them is lost."""
    moved: tuple[Copy, ...] = ()
    """Copies on lost servers of which a part may be in the object store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """A checkpoint from which this job begins: of another job, or its own, from before its coordinator was lost."""

    job: str
    version: int
    inexact: str = ""
    """Reason why it differs from a run without failures; empty if it does not."""
    older: tuple[int, ...] = ()
    """(its own) Older complete versions, ascending, for the case that this one cannot be loaded."""
    generation: int = 0
    """(its own) Generation before the first one with it: no earlier process has acted in a newer one."""
    place: str = ""
    """(its own) The directory that has it, for people."""


LACKS = -1

COUNT_MAX = 1 << 16


def count_of(config: Mapping[str, str], name: str, usual: int) -> int:
    """Returns a number of the job's configuration. Raises ValueError with a one-line message if it is invalid."""
    text = config.get(name, str(usual))
    if not (
        text.isascii() and text.isdigit() and len(text) <= len(str(COUNT_MAX)) and int(text) <= COUNT_MAX
    ):
        raise ValueError(f"{name} {text[:20]!r} is no number of 0 to {COUNT_MAX}")
    return int(text)


def replicas_of(config: Mapping[str, str]) -> int:
    return count_of(config, "replicas", 1)


@dataclass(kw_only=True, slots=True)
class JobRow:
    """All durable state of a job. Fields and table entries are replaced, never modified in place."""

    changed: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Fields, other than tables, set to another value since this set was last cleared."""
    job: str
    world_size: int
    config: dict[str, str]
    fingerprint: dict[str, str]
    log_servers: list[LogServer]
    """Every log server the job has ever had; the numbers (indices) never change."""
    copies: int = 1
    """Number of log servers that each stream is to be written to."""
    placement: dict[int, RankLogs] = field(default_factory=Table)
    """rank -> where its streams are; set once all ranks have joined."""

    state: State = State.FORMING
    generation: int = 1
    revision: int = 0
    """Increases with every write of the row."""
    reason: str = ""
    """Reason for this generation, or for the failure of the job."""

    holders: dict[int, Holder] = field(default_factory=Table)
    """rank -> its live holder. That of a vacant slot is a spare, and waits for the rest of its cell."""
    members: int = 0
    """Number of processes that have joined, which is the id of the latest one."""
    vacant: dict[int, int | None] = field(default_factory=Table)
    """Slots of cells that lack a holder and expect none -> version since which; None: since this recovery."""
    unlogged_below: int | None = None
    """Version below which the log lacks the steps run while a slot was vacant (LACKS: set on RUNNING); None: no such
    steps are missing."""
    given_up: list[int] = field(default_factory=list)
    """Slots that are not vacant yet, but for which no process is expected any more."""
    fenced: dict[int, Holder] = field(default_factory=Table)
    """Number -> incarnation that must not run any more, in the order in which they were fenced."""
    num_stages: int = 0
    stages: dict[int, list[int]] = field(default_factory=Table)
    stage_shards: dict[int, int] = field(default_factory=Table)
    """rank -> index of the shard of its stages' state that it holds."""
    granted: int = 0
    """Newest generation that every log server has granted. granted <= generation."""
    blocked: dict[str, str] = field(default_factory=Table)
    """Address of each log server that does not answer -> reason."""

    reports: dict[int, Report] = field(default_factory=Table)
    """(this generation) rank -> state that it holds and versions that it can reach."""
    ready: dict[int, int] = field(default_factory=Table)
    """(this generation) rank -> version at which it is ready."""
    finished: dict[int, int] = field(default_factory=Table)
    """(this generation) rank -> version at which it finished."""
    called: dict[int, bool] = field(default_factory=Table)
    """(this generation) rank that ran the last step -> whether its own trainer ended the job in that step."""
    end: pb.FinishRequest | None = None
    """The end before the last step, as the rank has told it whose trainer ended the job; None if none has."""
    plan: Plan | None = None
    """Plan of this generation; set from PLANNING on."""
    sources: dict[str, list[int]] = field(default_factory=dict)
    """(this generation's plan) stream -> numbers of the log servers to read it from, best first."""
    refused: Refusals = field(default_factory=Refusals)
    """Strategies and help excluded from this recovery; empty once RUNNING."""
    distrusted: list[int] = field(default_factory=list)
    """Ranks whose state depends on a refused strategy: they count as holding no state until RUNNING."""
    refusals: int = 0
    """Number of generations started without a death since a new version was reached."""
    setbacks: int = 0
    """Number of all generations since a new version was reached."""
    exits: dict[int, list[int]] = field(default_factory=Table)
    """rank -> exit codes of its processes that ended by themselves since a new version was reached."""
    reached: int = 0
    """Highest version of any rank when a generation was created: progress means that all ranks exceed it."""
    unloadable: list[int] = field(default_factory=list)
    """Complete checkpoints that some rank could not load in this recovery."""
    runs: list[str] = field(default_factory=list)
    """Launchers whose ranks have joined since the job began or was started again."""
    run_of: dict[int, str] = field(default_factory=Table)
    """rank -> launcher of its last process; launchers that were asked to stop are removed."""
    exit_code: int = 0
    """(FAILED) Exit code for its launchers if it is not 1."""
    final: int | None = None
    """(FINISHED) Last version, if its checkpoint is complete."""
    log_ends: bool = False
    """True if the log must be emptied before the job runs again, whatever it holds by then."""

    origin: Origin | None = None
    """Checkpoint of another job with which this one began; None: it began at version 0."""
    checkpoints: list[int] = field(default_factory=list)
    """The newest two complete versions, ascending."""
    shards: dict[int, frozenset[int]] = field(default_factory=Table)
    """Incomplete checkpoints: version -> ranks whose shard is durable."""
    shards_from: int = 0
    """Incomplete checkpoints below this version are given up: ranks may have removed their shards."""
    checkpoint_at: int | None = None
    """Version of an early checkpoint, which every rank saves regardless of the interval; None if there is none."""
    checkpoint_reason: str = ""
    rolled_back_in: int = 0
    """Last generation that restored a checkpoint or undid a step inexactly. Saves after that version, and saves of
    older generations, belong to a discarded history."""

    differed: str = ""
    """Difference found when a step was repeated in this recovery; empty once RUNNING."""
    inexact_since: int | None = None
    """Version from which the bits may differ from a run without failures; None: they do not."""
    inexact_reason: str = ""

    rehearsals: dict[int, pb.Rehearsal] = field(default_factory=Table)
    """rank -> its rehearsals."""

    groups: str = ""
    """The recovery groups; empty: each rank is its own group."""

    taking_part: dict[int, int] = field(default_factory=Table)
    """(jobs of a communicator, as `revoked` and `decisions`) Slot -> id of the member that takes part in this
    generation."""
    revoked: dict[str, str] = field(default_factory=dict)
    """(this generation) Label of each revoked group -> reason; the empty label stands for all groups."""
    decisions: dict[int, pb.Decision] = field(default_factory=Table)
    """Number -> decision of this generation; the last two are kept."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field, and records that it has changed. Wraps a dict in a Table, whose entries record that."""
        before = getattr(self, name, None)
        if name in TABLE_FIELDS:
            value = value if isinstance(value, Table) else Table(value)
            value.changed |= before.changed.union(before) if before is not None else set()
        elif name != "changed" and (not hasattr(self, name) or before != value):
            self.changed.add(name)
        object.__setattr__(self, name, value)

    def fence(self, holder: Holder) -> None:
        self.fenced[len(self.fenced)] = holder

    def slots(self) -> Iterator[int]:
        return (slot for slot in range(self.world_size) if slot not in self.vacant)

    def seated(self) -> dict[int, Holder]:
        """Returns rank -> its holder, of the slots that are not vacant."""
        return {rank: holder for rank, holder in self.holders.items() if rank not in self.vacant}

    def cell(self, slot: int) -> range:
        """Returns the slots that hold one replica of a stage together with this one."""
        parts = count_of(self.config, "shards", 1) * count_of(self.config, "tensor_parallel", 1)
        first = slot - slot % parts
        return range(first, first + parts)

    @property
    def wanted(self) -> int:
        """Number of processes of the job once all have joined."""
        return self.world_size - len(self.vacant)

    def lacks(self, said: Sized) -> bool:
        """Returns whether some rank is missing from `said`, which has one entry per rank that has reported."""
        return len(said) < self.wanted

    def living(self) -> list[int]:
        return [number for number, server in enumerate(self.log_servers) if not server.lost]

    def lacks_log_server(self) -> bool:
        return bool(self.log_servers) and not self.living()

    def addresses(self) -> list[str]:
        return [self.log_servers[number].address for number in self.living()]

    def reads_moved(self) -> str:
        """Returns the address of a server that reads what lost ones have moved to its object store, too; or none."""
        return next((self.log_servers[n].address for n in self.living() if self.log_servers[n].cold), "")

    def moved(self, floor: int) -> dict[int, str]:
        """Returns the lost servers that have moved records of steps from `floor` on -> where these are."""
        return {
            number: server.cold
            for number, server in enumerate(self.log_servers)
            if server.lost and server.cold and (server.below is None or server.below > floor)
        }


TABLE_FIELDS = frozenset(field.name for field in fields(JobRow) if field.default_factory is Table)


FORMAT = 9
ROOT = "jobs/"
_FIELDS = tuple(
    field.name for field in fields(JobRow) if field.name not in {*TABLE_FIELDS, "revision", "changed"}
)


def key_of(job: str, *parts: object) -> str:
    return "/".join([f"{ROOT}{job}", *map(str, parts)])


def row_key(job: str) -> str:
    """Returns the key of the part that is written together with any other part."""
    return key_of(job, "row")


class Changes:
    """The changes of a row that are not durable yet."""

    def __init__(self, row: JobRow, *, stored: bool = False) -> None:
        """`stored`: True if the whole row is durable already, False if none of it is."""
        self._row = row
        self._dirty: set[tuple[Any, ...]] = set()
        """Parts that are not durable: a field's name, and with it the key of its entry if it is a table."""
        if stored:
            self.detect()
            self._dirty.clear()

    def detect(self) -> bool:
        """Takes over what has changed since the last call. Returns whether anything has."""
        row = self._row
        row.changed.discard("revision")
        found: set[tuple[Any, ...]] = {(name,) for name in row.changed}
        row.changed.clear()
        for name in TABLE_FIELDS:
            table: Table[Any, Any] = getattr(row, name)
            found |= {(name, entry) for entry in table.changed}
            table.changed.clear()
        self._dirty |= found
        return bool(found)

    def drain(self) -> tuple[dict[str, str], list[str]]:
        """Returns (parts to put, keys to delete): applied, they store the row as `detect` last saw it."""
        if not self._dirty:
            return {}, []
        row, puts, deletes = self._row, dict[str, str](), list[str]()
        for name, *entry in self._dirty:
            key, value = key_of(row.job, name, *entry), getattr(row, name)
            if not entry:
                puts[key] = sealed(key, value)
            elif entry[0] in value:
                puts[key] = sealed(key, value[entry[0]])
            else:
                deletes.append(key)
        key = row_key(row.job)
        puts[key] = sealed(key, {"format": FORMAT, "revision": row.revision})
        self._dirty.clear()
        return puts, deletes


def by_job(stored: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Groups stored parts by job: name -> its parts."""
    found: dict[str, dict[str, str]] = {}
    for key, part in stored.items():
        found.setdefault(key.removeprefix(ROOT).partition("/")[0], {})[key] = part
    return found


def decode(job: str, parts: Mapping[str, str]) -> JobRow:
    """Returns the row that these parts make up. Raises ValueError, or any Python error on malformed parts."""
    prefix = key_of(job, "")
    said = {key: opened(key, text) for key, text in parts.items()}
    if row_key(job) not in said:
        raise ValueError("the part that holds it together is missing")
    head = said.pop(row_key(job))
    if head["format"] != FORMAT:
        raise ValueError("it was written by another version of the coordinator")
    kinds, tables = _kinds(JobRow), {name: dict[Any, Any]() for name in TABLE_FIELDS}
    values: dict[str, Any] = {"revision": head["revision"]}
    for key, value in said.items():
        name, _, entry = key.removeprefix(prefix).partition("/")
        if name in tables:
            key_kind, kind = get_args(kinds[name])
            tables[name][key_kind(entry)] = _typed(kind, value)
        else:
            values[name] = _typed(kinds[name], value)
    if missing := set(_FIELDS) - set(values):
        raise ValueError(f"parts of it are missing: {', '.join(sorted(missing))}")
    values |= {name: Table(sorted(table.items())) for name, table in tables.items()}
    return JobRow(**values)


def sealed(key: str, value: object) -> str:
    """Returns the text that stores a value: a checksum over key and value, and the value as JSON."""
    text = json.dumps(value, separators=(",", ":"), default=_plain)
    return f"{_checksum(key, text)} {text}"


def opened(key: str, stored: str) -> Any:
    """Inverse of `sealed`. Raises ValueError if the checksum does not match."""
    checksum, _, text = stored.partition(" ")
    if checksum != _checksum(key, text):
        raise ValueError(f"the checksum of {key} does not match")
    return json.loads(text)


def _checksum(key: str, text: str) -> str:
    return f"{crc32c.crc32c(f'{key} {text}'.encode(errors='replace')):08x}"


def _plain(value: Any) -> Any:
    """Converts a value that JSON cannot represent. Inverse: `_typed`."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, Message):
        return as_json(value)
    assert is_dataclass(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


_kinds = cache(get_type_hints)


def _typed(kind: Any, value: Any) -> Any:
    """Returns the value of this type that `value`, its JSON, stands for."""
    arguments = get_args(kind)
    if isinstance(kind, UnionType):  # X | None
        return None if value is None else _typed(arguments[0], value)
    if arguments and get_origin(kind) is not dict:
        return get_origin(kind)(_typed(arguments[0], one) for one in value)
    if is_dataclass(kind):
        kinds: dict[str, Any] = _kinds(kind)  # type: ignore[arg-type]
        return kind(**{name: _typed(kinds[name], of) for name, of in value.items()})  # type: ignore[operator]
    if arguments or kind in (str, int, bool, float):
        return value
    if issubclass(kind, Message):
        return kind(**value)
    return kind(*value) if issubclass(kind, tuple) else kind(value)


# A job's history: the states that its newest generations have entered, with their times.
#
# A generation enters a state once (`LEGAL`: what leads back to FORMING or FENCING raises the generation). The history
# is for people: no decision reads it, and a damaged entry is left out.

GENERATIONS_MAX = 256
"""Number of generations that are kept of a job."""
WORDS_MAX = 1000
"""Limit of a reason and of a plan, in characters: a whole history fits into one message."""
_STATE_ORDER = (
    *(pb.FORMING, pb.FENCING, pb.PLANNING, pb.RECOVERING, pb.RUNNING),
    *(pb.FINISHED, pb.FAILED, pb.STOPPED),
)
"""Order in which a generation enters its states."""


def history_prefix(job: str) -> str:
    return f"history/{job}/"


def _history_key(job: str, generation: int, state: State) -> str:
    return f"{history_prefix(job)}{generation:012d}/{state}"


def history_entry(row: JobRow, at: float) -> dict[str, str]:
    """Returns the entry of the state that the row has entered, by its key. `at`: seconds since 1970."""
    key = _history_key(row.job, row.generation, row.state)
    told: dict[str, object] = {"at": at}
    if row.state in (State.FORMING, State.FENCING) or row.state.is_over:
        told |= {"reason": row.reason[:WORDS_MAX]}
    if row.state is State.RECOVERING and row.plan is not None:
        told |= {"plan": row.plan.reason[:WORDS_MAX]}
    return {key: sealed(key, told)}


def forgotten_history(row: JobRow) -> list[str]:
    """Returns the keys to delete when the row's generation is put."""
    oldest = row.generation - GENERATIONS_MAX
    return [_history_key(row.job, oldest, state) for state in State] if oldest > 0 else []


def read_history(job: str, stored: Mapping[str, str]) -> list[pb.Generation]:
    """Returns the generations, ascending, of what is stored under `history_prefix(job)`."""
    found: dict[int, pb.Generation] = {}
    for key, entry in stored.items():
        number, _, state = key.removeprefix(history_prefix(job)).partition("/")
        try:
            told = opened(key, entry)
        except ValueError as error:
            events.emit("history_damaged", job=job, reason=str(error))
            continue
        generation = found.setdefault(int(number), pb.Generation(number=int(number)))
        generation.plan = generation.plan or told.get("plan", "")
        generation.entries.add(state=pb.State.Value(state), at=told["at"], reason=told.get("reason", ""))
    for generation in found.values():
        generation.entries.sort(key=lambda entry: _STATE_ORDER.index(entry.state))
    return [found[number] for number in sorted(found)]
