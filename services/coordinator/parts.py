"""A job's row in parts, as the store keeps it, and which of them have changed.

    jobs/NAME/row           what is one value of the row, by its field; with a digest over all other parts
    jobs/NAME/FIELD         a large value, that seldom changes (`WHOLE`)
    jobs/NAME/FIELD/KEY     an entry of a table (`TABLES`), or of the list that only grows (`fenced`)

A part is its checksum and its JSON: a database has none, and would give a flipped digit as it is. The checksum is over
its key as well, and the digest tells of parts that are missing, or of another moment.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import crc32c
import xxhash

from services.coordinator.row import (
    Copy,
    Decision,
    End,
    Holder,
    JobRow,
    LogServer,
    Origin,
    RankLogs,
    State,
    VoteKind,
)
from services.coordinator.store import Stored
from services.coordinator.tables import Table
from swift.recovery import HeldSnapshot, Help, Plan, Prediction, RankPlan, Refusals, Report, Strategy

FORMAT = 4
ROOT = "jobs/"
_DIGEST = 1 << 64


def key_of(job: str, *parts: object) -> str:
    return "/".join([f"{ROOT}{job}", *map(str, parts)])


def row_key(job: str) -> str:
    """Of the part that is written with every other one."""
    return key_of(job, "row")


class Changes:
    """What of a row is not durable yet. It looks at what has changed since it has looked last, not at the whole row."""

    def __init__(self, row: JobRow, stored: Mapping[str, str] | None = None) -> None:
        """`stored`: the parts that the row was read from; None: nothing of it is durable."""
        self._row = row
        self._tables: dict[str, Table[Any, Any]] = {}
        self._seen: dict[str, Any] = {}
        self._fenced = 0
        self._tables_dirty: dict[str, set[Any]] = {name: set() for name in TABLES}
        self._whole_dirty: set[str] = set()
        self._row_dirty = False
        self._digests: dict[str, int] = {}
        self._digest = 0
        self._fenced_from = 0
        if stored is not None:
            self.look()
            self._forget_dirty()
            for key, text in stored.items():
                if key != row_key(row.job):
                    self._count(key, text)

    def look(self) -> bool:
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

    def take(self) -> tuple[dict[str, str], list[str]]:
        """(parts to put, keys to delete) since the last time: with them what is stored is what `look` has seen."""
        if not self._row_dirty:
            return {}, []
        row, puts, deletes = self._row, dict[str, str](), list[str]()
        for name, dirty in self._tables_dirty.items():
            table = self._tables[name]
            for entry in dirty:
                key = key_of(row.job, name, entry)
                if entry in table:
                    puts[key] = _sealed(key, table[entry])
                elif key in self._digests:
                    deletes.append(key)
        for name in self._whole_dirty:
            key = key_of(row.job, name)
            puts[key] = _sealed(key, getattr(row, name))
        for number in range(self._fenced_from, len(row.fenced)):
            key = key_of(row.job, "fenced", number)
            puts[key] = _sealed(key, row.fenced[number])
        for key in deletes:
            self._digest -= self._digests.pop(key)
        for key, text in puts.items():
            self._count(key, text)
        key = row_key(row.job)
        puts[key] = _sealed(key, self._values())
        self._forget_dirty()
        return puts, deletes

    def _values(self) -> dict[str, Any]:
        values = {name: getattr(self._row, name) for name in _VALUES}
        return {"format": FORMAT, "digest": f"{self._digest % _DIGEST:016x}", **values}

    def _count(self, key: str, text: str) -> None:
        digest = _digest(key, text)
        self._digest += digest - self._digests.get(key, 0)
        self._digests[key] = digest

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
    changes.look()
    return changes.take()[0]


def decode(job: str, parts: Mapping[str, str]) -> JobRow:
    """The row that these are all parts of. ValueError, or whatever Python says of parts that are none."""
    prefix = key_of(job, "")
    said = {key: _opened(key, text) for key, text in parts.items()}
    if row_key(job) not in said:
        raise ValueError("the part that holds it together is missing")
    values: dict[str, Any] = said.pop(row_key(job))
    if values.pop("format") != FORMAT:
        raise ValueError("it was written by another version of the coordinator")
    digest = sum(_digest(key, parts[key]) for key in said) % _DIGEST
    if values.pop("digest") != f"{digest:016x}":
        raise ValueError("its parts are not all there, or not of one moment")
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


def _digest(key: str, text: str) -> int:
    return xxhash.xxh3_64_intdigest(f"{key} {text}".encode(errors="replace"))


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
    "groups_from": (int, _same),
    "vacant": (int, _same),
    "taking_part": (int, _same),
    "decisions": (int, _decision),
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
