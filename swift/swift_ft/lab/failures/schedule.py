"""Schedules of failures: SPEC and FILE, distributions, traces (``trace=FILE,per=0.5``); `swift-ft failures`.

A distribution is drawn by a seed. Every host is a renewal process of its own, new at the start, with a generator of its
own: a longer run, or one with more hosts, has the same failures and more. A trace is CSV (RFC 4180) in UTF-8, whose
first line names the columns. docs/drills.md lists the keys of both, and the columns.
"""

import csv
import heapq
import math
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swift_ft import fault_grammar
from swift_ft.cli_parser import Parser, command
from swift_ft.errors import UsageError
from swift_ft.fault_grammar import (
    FOR_GOOD,
    KINDS,
    MICROBATCH_PHASES,
    CorruptCheckpointFault,
    CorruptCopyFault,
    Fault,
    Fields,
    RankFault,
    lasting,
)
from swift_ft.files import read_given
from swift_ft.text import WORLD_SIZE_MAX, parse_json, show, whole_number

FAILURES_MAX = 500
"""Limit of one schedule: its failures are passed to ranks in an environment variable."""
LAWS = ("exponential", "weibull")
UNITS = ("steps", "seconds")
DRAWN_PHASES = ("forward", "backward", "optimizer", "idle")
"""Phases among which ``phase=any`` draws."""
_PHASES = (*DRAWN_PHASES, "any")
_SEED = 10**9


def hosts_of(ranks: int, per_host: int = 1) -> list[range]:
    """Returns the ranks of each host: `per_host` consecutive ones."""
    return [range(first, min(first + per_host, ranks)) for first in range(0, ranks, per_host)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Many:
    """An entry that stands for many failures: their number, and what each does to its host."""

    text: str
    """The entry as it was given."""
    until: float | None = None
    seed: int = 0
    per_host: int | None = None
    """None: the number of ranks on each machine of the job."""
    unit: str = "steps"
    kind: str = "kill"
    for_s: float | None = None
    factor: float = 1.0
    phase: str = "idle"
    microbatches: int = 1
    """Number of microbatches among which ``phase=any`` draws."""

    KEYS = ("until", "seed", "per_host", "unit", "kind", "for", "factor", "phase", "microbatches")

    @staticmethod
    def common(given: Fields, *, mixed: bool = False) -> dict[str, Any]:
        """Parses the keys that all have. `mixed`: see `lasting`. Raises UsageError."""
        if given.number_or_none("per_host") == 0:
            raise given.error("per_host must be at least 1")
        kind = given.one_of("kind", KINDS, "kill")
        for_s, factor = lasting(given, kind, mixed=mixed)
        return {
            "text": given.spec,
            "until": given.decimal("until", 0.0, 1e9),
            "seed": given.number_or_none("seed") or 0,
            "per_host": given.number_or_none("per_host"),
            "unit": given.one_of("unit", UNITS, "steps"),
            "kind": kind,
            "for_s": for_s,
            "factor": factor,
            "phase": given.one_of("phase", _PHASES, "idle"),
            "microbatches": given.number("microbatches") if "microbatches" in given else 1,
        }

    def hits(self, ranks: Sequence[int], at: float, generator: random.Random) -> Iterator[RankFault]:
        """Yields the failures of these ranks of one host at time `at`, in steps or seconds."""
        lasts = None if self.kind in FOR_GOOD else self.for_s
        fields_: dict[str, Any] = {"kind": self.kind, "for_s": lasts}
        if self.kind == "slow":
            fields_["factor"] = self.factor
        phase = generator.choice(DRAWN_PHASES) if self.phase == "any" else self.phase
        microbatch = generator.randrange(self.microbatches) if phase in MICROBATCH_PHASES else 0
        for rank in ranks:
            if self.unit == "seconds":
                yield RankFault(rank=rank, at_s=round(at, 3), **fields_)
            else:
                yield RankFault(rank=rank, step=int(at), phase=phase, microbatch=microbatch, **fields_)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn(Many):
    law: str
    mtbf: float
    """Mean time between two failures of one host, in steps or seconds."""
    shape: float = 1.0
    count: int | None = None
    lemons: int = 0
    lemon: float = 10.0
    together: float = 0.0

    @classmethod
    def of(cls, given: Fields) -> "Drawn":
        """Parses a distribution. Raises UsageError."""
        given.only("every", "mtbf", "shape", "count", "lemons", "lemon", "together", *Many.KEYS)
        law = given.one_of("every", LAWS, "")
        if (law == "weibull") != ("shape" in given):
            wrong = "weibull needs shape=K" if law == "weibull" else "shape needs every=weibull"
            raise given.error(f"{wrong} (below 1: failures come in bursts)")
        mtbf = given.decimal("mtbf", 0.001, 1e9)
        if mtbf is None:
            raise given.error("mtbf is missing: the mean time between two failures of one host")
        count = given.number_or_none("count")
        if "until" not in given and count is None:
            raise given.error("it has no end: give until=STEP, or count=N failures")
        if count is not None and not 1 <= count <= FAILURES_MAX:
            raise given.error(f"count must be 1 to {FAILURES_MAX}")
        lemons, lemon = given.number_or_none("lemons") or 0, given.decimal("lemon", 1.0, 1e6)
        if lemon is not None and not lemons:
            raise given.error("lemon needs lemons=K: so many hosts fail so much more often")
        return cls(
            law=law,
            mtbf=mtbf,
            shape=given.decimal("shape", 0.05, 20.0) or 1.0,
            count=count,
            lemons=lemons,
            lemon=10.0 if lemon is None else lemon,
            together=given.decimal("together", 0.0, 1.0) or 0.0,
            **cls.common(given),
        )

    def faults(self, hosts: Sequence[range], flag: str = "--failures") -> list[Fault]:
        """Returns the failures of a job with these hosts, in order of time. Raises UsageError for too many failures, or
        for more lemons than hosts."""
        if self.lemons > len(hosts):
            raise UsageError(f"{flag} {self}: lemons must be 0 to {len(hosts)}, the hosts of this job")
        numbers = range(len(hosts))
        lemons = random.Random(f"lemons {self.seed}").sample(numbers, self.lemons)
        found: list[Fault] = []
        merged = heapq.merge(*(self._times(host, host in lemons) for host in numbers))
        for number, (at, host) in enumerate(merged):
            if number == self.count:
                break
            if len(found) >= FAILURES_MAX:
                raise UsageError(
                    f"{flag} {self}: more than {FAILURES_MAX} failures: lower until, or raise mtbf"
                )
            generator = random.Random(f"hit {self.seed} {host} {at!r}")
            there = hosts[host]
            all_of_it = generator.random() < self.together
            found += self.hits(there if all_of_it else [generator.choice(there)], at, generator)
        return found

    def _times(self, host: int, is_lemon: bool) -> Iterator[tuple[float, int]]:
        """Yields (time, host number) of the host's failures; at most one more than the limit of a schedule."""
        generator = random.Random(f"host {self.seed} {host}")
        mtbf = self.mtbf / (self.lemon if is_lemon else 1.0)
        scale, at = mtbf / math.gamma(1.0 + 1.0 / self.shape), 0.0
        for _ in range(FAILURES_MAX + 1):
            at += scale * (-math.log(1.0 - generator.random())) ** (1.0 / self.shape)
            if at >= (math.inf if self.until is None else self.until) or at >= _SEED:
                return
            yield at, host


NEEDED = ("node", "start")
ROWS_MAX = 1_000_000
_PATH = re.compile(r"[^,;]+\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """One row of a trace. Times are in the file's unit."""

    node: str
    start: float
    end: float | None = None
    kind: str = ""


def text_of(path: Path, flag: str) -> str:
    """Reads a user's file as UTF-8. Raises UsageError, also for a JSON list, the form of a published trace."""
    try:
        text = read_given(path, f"{flag} {path}").decode()
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path}: not a text in UTF-8") from None
    if text.lstrip().startswith("["):
        raise UsageError(
            f"{flag} {path}: a JSON list is no schedule: write a trace as CSV (docs/drills.md#traces)"
        )
    return text


def is_trace(text: str) -> bool:
    """Returns whether a file is a trace rather than a list of failures: its first line names the columns."""
    first = text.lstrip("\ufeff").partition("\n")[0].strip().lower().split(",")
    return set(NEEDED) <= {name.strip() for name in first}


def read_trace(path: Path, flag: str = "--failures") -> list[Outage]:
    """Returns the rows of a trace, in order of time. Raises UsageError, which names the line."""
    lines = text_of(path, flag).lstrip("\ufeff").splitlines()
    if not lines or not is_trace(lines[0]):
        raise UsageError(
            f"{flag} {path}: no trace: its first line must name the columns, with {' and '.join(NEEDED)} among them"
        )
    if len(lines) > ROWS_MAX:
        raise UsageError(f"{flag} {path}: more than {ROWS_MAX} lines: take a part of it")
    rows = csv.DictReader(lines, strict=True)
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
        raise UsageError(f"{where}: unknown kind {kind[:40]!r}: one of {', '.join(KINDS)}")
    start = _time(cell("start"), f"{where}: start")
    end = _time(cell("end"), f"{where}: end") if cell("end") else None
    if end is not None and end < start:
        raise UsageError(f"{where}: end {end:g} is before start {start:g}")
    return Outage(node=node, start=start, end=end, kind=kind)


def _time(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise UsageError(f"{where} must be a number of 0 or more, not {text[:40]!r}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced(Many):
    """A trace file, with the mapping of its times and nodes to those of a job."""

    path: str
    per: float = 1.0
    begin: float = 0.0
    nodes: int | None = None

    @classmethod
    def of(cls, given: Fields) -> "Traced":
        """Parses the keys of a trace. Raises UsageError."""
        given.only("trace", "per", "from", "nodes", *Many.KEYS)
        return cls(
            path=given.text("trace", _PATH, "a file whose name has no comma or semicolon"),
            per=given.decimal("per", 1e-6, 1e9) or 1.0,
            begin=given.decimal("from", 0.0, 1e9) or 0.0,
            nodes=given.number_or_none("nodes"),
            **cls.common(given, mixed=True),
        )

    def faults(self, hosts: Sequence[range], flag: str = "--failures") -> list[Fault]:
        """Returns the failures of a job with these hosts, in order of time. Raises UsageError if the file is no trace,
        names a host that does not exist, or has too many failures or none in the selected part."""
        outages = read_trace(Path(self.path), flag)
        host_of = self._host_numbers(outages, len(hosts), flag)
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
            found += self._of(outage, flag).hits(hosts[host], at, generator)
        if not found:
            raise UsageError(f"{flag} {self}: none of its failures is of this job: give from, until or seed")
        return found

    def _of(self, outage: Outage, flag: str) -> "Traced":
        """Returns this schedule with what the row says of its failure. Raises UsageError for a missing key."""
        kind, for_s = outage.kind or self.kind, self.for_s
        if for_s is None and self.unit == "seconds" and outage.end is not None:
            for_s = round((outage.end - outage.start) / self.per, 3)
        if kind == "slow" and for_s is None:
            raise UsageError(f"{flag} {self}: kind=slow needs for=SECONDS, as steps have no length")
        if kind == "slow" and self.factor == 1.0:
            raise UsageError(f"{flag} {self}: kind=slow needs factor=F, more than 1")
        return replace(self, kind=kind, for_s=for_s)

    def _host_numbers(self, outages: Sequence[Outage], hosts: int, flag: str) -> dict[str, int]:
        names = list(dict.fromkeys(outage.node for outage in outages))
        numbers = {name: number for name in names if (number := whole_number(name)) is not None}
        if len(numbers) == len(names):
            if missing := [number for number in numbers.values() if number >= hosts]:
                raise UsageError(
                    f"{flag} {self.path}: there is no host {missing[0]}: hosts are 0 to {hosts - 1}"
                )
            return numbers
        count = len(names) if self.nodes is None else self.nodes
        if count < len(names):
            raise UsageError(f"{flag} {self}: nodes must be at least {len(names)}, those that have failed")
        drawn = random.Random(f"nodes {self.seed}").sample(range(count), min(hosts, count))
        return {names[node]: host for host, node in enumerate(drawn) if node < len(names)}


# FILE or SPEC of ``swift-ft run --failures`` -> the failures of one run, each with its coordinates.
#
# SPEC is one entry, or several separated by semicolons. In a FILE each line is an entry; ``#`` begins a comment. An
# entry is a failure (`swift_ft.fault_grammar`), a distribution (``every=…``) or a trace (``trace=…``). A FILE may also
# be a trace itself, or the ``failures.json`` of an earlier run, whose failures are repeated.
#
# The result is a list of single failures, in order of time. It depends only on the input and on the number of ranks.
# Its text is a valid FILE, which repeats the same failures.

Entry = Fault | Drawn | Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    given: str
    """Entries as text."""
    faults: tuple[Fault, ...]
    """First those with a step, in its order; then those with a time, in its order; then those with neither."""


def parse_entry(text: str, flag: str = "--failures") -> Entry:
    """Parses one entry. Raises UsageError."""
    fields = Fields(text, flag)
    if "every" in fields:
        return Drawn.of(fields)
    if "trace" in fields:
        return Traced.of(fields)
    return fault_grammar.parse(text, flag)


def parse_schedule(text: str, flag: str = "--failures") -> list[Entry]:
    """Parses entries separated by semicolons or line ends. Raises UsageError."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    entries = [part.strip() for line in lines for part in line.split(";")]
    return _parsed([entry for entry in entries if entry], flag)


def _parsed(entries: Sequence[str], flag: str) -> list[Entry]:
    if len(entries) > FAILURES_MAX:
        raise UsageError(f"{flag} {len(entries)} failures: {FAILURES_MAX} are the most that one run may have")
    return [parse_entry(entry, flag) for entry in entries]


def read_schedule(given: str, flag: str = "--failures") -> list[Entry]:
    """Parses the entries of FILE or SPEC. Raises UsageError."""
    is_there = os.path.exists(given)  # False also for an invalid name
    if "=" in given and not is_there:
        entries = parse_schedule(given, flag)
    elif not is_there:
        raise UsageError(
            f"{flag} {given}: there is no such file, and it is no failure such as rank=2,step=17 (docs/drills.md)"
        )
    else:
        entries = _of_file(Path(given), flag)
    if not entries:
        raise UsageError(f"{flag} {given}: there is no failure in it")
    return entries


def _of_file(path: Path, flag: str) -> list[Entry]:
    text = text_of(path, flag)
    if is_trace(text):
        return [Traced(text=f"trace={path}", path=str(path))]
    if text.lstrip().startswith("{"):
        schedule = parse_json(text, f"{flag} {path}").get("schedule")
        if not isinstance(schedule, list) or not all(isinstance(entry, str) for entry in schedule):
            raise UsageError(f"{flag} {path}: not the failures.json of a run: it has no schedule")
        return _parsed(schedule, f"{flag} {path}:")
    return parse_schedule(text, f"{flag} {path}:")


def schedule_of(given: str, ranks: int, per_host: int = 1, flag: str = "--failures") -> Schedule:
    """Returns the failures of a job with `ranks` ranks, `per_host` on each machine unless an entry says otherwise.
    Raises UsageError if the input is malformed, or names a rank that does not exist."""
    if not 1 <= ranks <= WORLD_SIZE_MAX:
        raise UsageError(f"{flag} a job has 1 to {WORLD_SIZE_MAX} ranks, not {ranks}")
    entries = read_schedule(given, flag)
    found: list[Fault] = []
    for entry in entries:
        if isinstance(entry, Many):
            found += entry.faults(hosts_of(ranks, entry.per_host or per_host), flag)
        else:
            found.append(entry)
    check_ranks(found, ranks, flag)
    unique = list(dict.fromkeys(_in_order(found)))
    if len(unique) > FAILURES_MAX:
        raise UsageError(f"{flag}: {len(unique)} failures: {FAILURES_MAX} are the most that one run may have")
    return Schedule(given="\n".join(map(str, entries)), faults=tuple(unique))


def check_ranks(faults: Iterable[Fault], ranks: int, flag: str) -> None:
    """Raises UsageError if a failure names a rank that does not exist."""
    for fault in faults:
        if isinstance(fault, RankFault | CorruptCopyFault | CorruptCheckpointFault) and fault.rank >= ranks:
            raise UsageError(f"{flag} {fault}: rank must be 0 to {ranks - 1}")


def _in_order(faults: Sequence[Fault]) -> list[Fault]:
    def place(fault: Fault) -> tuple[int, float]:
        step, at_s = getattr(fault, "step", None), getattr(fault, "at_s", None)
        if step is not None:
            return 0, float(step)
        return (1, float(at_s)) if at_s is not None else (2, 0.0)

    return sorted(faults, key=place)


# `swift-ft failures`


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft failures",
        description="Prints the failures of a swift-ft run --failures, one a line: a FILE that makes them again.",
    )
    parser.add_argument("failures", metavar="FILE|SPEC", help="as swift-ft run --failures takes it")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many ranks the job has")
    hosts = "how many of them are on a host (default %(default)s)"
    parser.add_argument("--per-host", type=int, default=1, metavar="N", help=hosts)
    return parser


@command
def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(argv)
    if given.per_host < 1:
        raise UsageError("failures: --per-host must be at least 1")
    show(schedule_of(given.failures, given.ranks, given.per_host, "failures:").faults)
    return 0
