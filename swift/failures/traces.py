"""Failures that a file tells of: ``trace=FILE,per=0.5``, and the converter of the InfiniteHBD trace.

A trace is CSV (RFC 4180) in UTF-8. Its first line names the columns, in any order; others are passed over:

    node     who failed: a name; or, if all of them are numbers, the number of a host of the job
    start    when, a number of 0 or more in a unit of the file's own
    end      when it was well again, in the same unit; empty: never
    kind     kill, stop, hang, slow or network; empty or no such column: as the schedule says, else kill
    class    what it was, for people

``per`` says how many units of the file one step stands for (with ``unit=seconds``: one second). A lost process is
replaced at once, however long its node was away. ``from`` and ``until`` take a part of the file, in its unit. Names
become hosts by the seed: so many of the file's nodes as the job has hosts are drawn. ``nodes`` says how many nodes
there were, those that never failed included, so that the rate per host is the real one.
"""

import csv
import json
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swift.errors import UsageError
from swift.failures.distributions import FAILURES_MAX, Hosts, What
from swift.failures.grammar import KINDS, Fault, Fields, seconds_text

COLUMNS = ("node", "start", "end", "kind", "class")
NEEDED = ("node", "start")
FILE_BYTES_MAX = 64 << 20
_PATH = re.compile(r"[^,;]+\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """One row. Times are in the file's unit."""

    node: str
    start: float
    end: float | None = None
    kind: str = ""
    reason: str = ""
    """The column `class`."""


def text_of(path: Path, flag: str) -> str:
    """A file of the user's. Raises UsageError."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise UsageError(f"{flag} {path}: larger than {FILE_BYTES_MAX >> 20} MiB: take a part of it")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: name a file that can be read") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path}: not a text in UTF-8") from None


def is_trace(text: str) -> bool:
    """Whether a file is a trace and no list of failures: its first line names the columns."""
    first = text.lstrip("\ufeff").partition("\n")[0].strip().lower().split(",")
    return set(NEEDED) <= {name.strip() for name in first}


def read(path: Path, flag: str = "--failures") -> list[Outage]:
    """The rows, by time. Raises UsageError, which names the line."""
    lines = text_of(path, flag).lstrip("\ufeff").splitlines()
    if not lines or not is_trace(lines[0]):
        raise UsageError(
            f"{flag} {path}: no trace: its first line must name the columns, with {' and '.join(NEEDED)} among them"
        )
    rows = csv.DictReader(lines)
    rows.fieldnames = [name.strip().lower() for name in rows.fieldnames or ()]
    try:
        found = [_outage(row, f"{flag} {path}: line {rows.line_num}") for row in rows if any(row.values())]
    except csv.Error as error:
        raise UsageError(f"{flag} {path}: line {rows.line_num}: {error}") from None
    if not found:
        raise UsageError(f"{flag} {path}: there is no failure in it")
    return sorted(found, key=lambda outage: outage.start)


def _outage(row: dict[str | None, Any], where: str) -> Outage:
    def cell(name: str) -> str:
        return str(row.get(name) or "").strip()

    node, kind = cell("node"), cell("kind").lower()
    if not node:
        raise UsageError(f"{where}: node is empty")
    if kind and kind not in KINDS:
        raise UsageError(f"{where}: unknown kind {kind!r}: one of {', '.join(KINDS)}")
    start = _time(cell("start"), f"{where}: start")
    end = _time(cell("end"), f"{where}: end") if cell("end") else None
    if end is not None and end < start:
        raise UsageError(f"{where}: end {end:g} is before start {start:g}")
    return Outage(node=node, start=start, end=end, kind=kind, reason=cell("class"))


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise UsageError(f"{where} must be a number of 0 or more, not {text!r}")
    return value


def write(outages: Iterable[Outage], path: Path, flag: str = "--out") -> int:
    """As `read` reads them; how many. Raises UsageError."""
    count = 0
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(COLUMNS)
            for outage in outages:
                end = "" if outage.end is None else f"{outage.end!r}"
                rows.writerow([outage.node, f"{outage.start!r}", end, outage.kind, outage.reason])
                count += 1
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}: name a file that can be written") from None
    return count


def from_infinitehbd(path: Path, without: Sequence[str] = (), flag: str = "convert") -> list[Outage]:
    """The public fault trace of InfiniteHBD (github.com/stepfun-ai/InfiniteHBD-Trace, ``fault_trace.json``): starts and
    ends of faults, in days. A start that has no end stays open. `without`: classes that are left out, such as "Stress
    Test Failure", which is no failure of a training job. Raises UsageError."""
    try:
        events = json.loads(text_of(path, flag))
    except ValueError as error:
        raise UsageError(f"{flag} {path}: not the JSON of an InfiniteHBD trace: {error}") from None
    if not isinstance(events, list):
        raise UsageError(f"{flag} {path}: not an InfiniteHBD trace: a list of events is expected")
    open_: dict[tuple[str, str], list[int]] = defaultdict(list)
    found: list[Outage] = []
    for number, event in enumerate(events):
        try:
            node, at, kind = str(event["node_id"]), float(event["event_time"]), event["event_type"]
            about = event["fault_type"]
            reason, key = str(about["Class"]), (node, json.dumps(about, sort_keys=True))
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"{flag} {path}: event {number}: it needs node_id, event_time, event_type and fault_type with a Class"
            ) from None
        if reason in without:
            continue
        if kind == "fault_start":
            open_[key].append(len(found))
            found.append(Outage(node=node, start=at, reason=reason))
        elif kind == "fault_end":
            if open_[key]:
                index = open_[key].pop(0)
                found[index] = Outage(node=node, start=found[index].start, end=at, reason=reason)
        else:
            raise UsageError(f"{flag} {path}: event {number}: unknown event_type {str(kind)[:40]!r}")
    return sorted(found, key=lambda outage: (outage.start, outage.node))


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """A trace file, and how its times and nodes become those of a job."""

    path: str
    per: float = 1.0
    begin: float = 0.0
    until: float | None = None
    seed: int = 0
    nodes: int | None = None
    per_host: int | None = None
    what: What = field(default_factory=What)

    KEYS = ("trace", "per", "from", "until", "seed", "nodes", "per_host")

    @classmethod
    def of(cls, given: Fields) -> "Traced":
        """Raises UsageError."""
        given.only(*cls.KEYS, *What.KEYS)
        if given.number_or_none("per_host") == 0:
            raise given.error("per_host must be at least 1")
        return cls(
            path=given.text("trace", _PATH, "a file whose name has no comma or semicolon"),
            per=given.decimal("per", 1e-6, 1e9) or 1.0,
            begin=given.decimal("from", 0.0, 1e9) or 0.0,
            until=given.decimal("until", 0.0, 1e9),
            seed=given.number_or_none("seed") or 0,
            nodes=given.number_or_none("nodes"),
            per_host=given.number_or_none("per_host"),
            what=What.of(given, mixed=True),
        )

    def __str__(self) -> str:
        words = [f"trace={self.path}"]
        for name, value, unsaid in (
            ("per", self.per, 1.0),
            ("from", self.begin, 0.0),
            ("until", self.until, None),
            ("seed", self.seed, 0),
            ("nodes", self.nodes, None),
            ("per_host", self.per_host, None),
        ):
            if value is not None and value != unsaid:
                words.append(f"{name}={seconds_text(value)}")
        return ",".join([*words, *self.what.words()])

    def faults(self, hosts: Hosts, flag: str = "--failures") -> list[Fault]:
        """The failures of a job with these hosts, by time. UsageError: the file is no trace, names a host that is not
        there, or has too many."""
        outages = read(Path(self.path), flag)
        host_of = self._hosts_of(outages, hosts, flag)
        found: list[Fault] = []
        for outage in outages:
            inside = self.begin <= outage.start < (math.inf if self.until is None else self.until)
            host = host_of.get(outage.node)
            if host is None or not inside:
                continue
            if len(found) >= FAILURES_MAX:
                raise UsageError(
                    f"{flag} {self}: more than {FAILURES_MAX} failures: give until, or raise per"
                )
            generator = random.Random(f"hit {self.seed} {host} {outage.start!r}")
            at = (outage.start - self.begin) / self.per
            found += self._what(outage, flag).hits(hosts.ranks_of(host), at, generator)
        if not found:
            raise UsageError(f"{flag} {self}: none of its failures is of this job: give from, until or seed")
        return found

    def _what(self, outage: Outage, flag: str) -> What:
        """With what the row itself says of its failure."""
        kind, for_s = outage.kind or self.what.kind, self.what.for_s
        if for_s is None and self.what.unit == "seconds" and outage.end is not None:
            for_s = round((outage.end - outage.start) / self.per, 3)
        if kind in ("slow", "network") and for_s is None:
            raise UsageError(f"{flag} {self}: kind={kind} needs for=SECONDS, as steps have no length")
        if kind == "slow" and self.what.factor == 1.0:
            raise UsageError(f"{flag} {self}: kind=slow needs factor=F, more than 1")
        if kind == "network" and not self.what.link:
            raise UsageError(f"{flag} {self}: kind=network needs link=DEVICE")
        return replace(self.what, kind=kind, for_s=for_s)

    def _hosts_of(self, outages: Sequence[Outage], hosts: Hosts, flag: str) -> dict[str, int]:
        names = list(dict.fromkeys(outage.node for outage in outages))
        if all(name.isdecimal() for name in names):
            if missing := [name for name in names if int(name) >= hosts.count]:
                raise UsageError(
                    f"{flag} {self.path}: there is no host {missing[0]}: hosts are 0 to {hosts.count - 1}"
                )
            return {name: int(name) for name in names}
        count = len(names) if self.nodes is None else self.nodes
        if count < len(names):
            raise UsageError(f"{flag} {self}: nodes must be at least {len(names)}, those that have failed")
        drawn = random.Random(f"nodes {self.seed}").sample(range(count), min(hosts.count, count))
        return {names[node]: host for host, node in enumerate(drawn) if node < len(names)}
