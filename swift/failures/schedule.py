"""FILE or SPEC of ``swift-ft run --failures`` -> the failures of one run, each with its coordinates.

SPEC is one entry, or several between semicolons. In a FILE each line is an entry; ``#`` begins a comment. An entry is a
failure (`swift.failures.grammar`), a distribution (``every=…``, `swift.failures.distributions`) or a trace
(``trace=…``, `swift.failures.traces`). A FILE may also be a trace itself, or the ``failures.json`` of an earlier run,
whose failures are made again.

The outcome is a list of failures alone, by time. It depends on what was given and on the number of ranks, on nothing
else; as text it is a FILE, with which the same failures are made again.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift.errors import UsageError
from swift.failures import grammar
from swift.failures.distributions import FAILURES_MAX, Drawn, Hosts
from swift.failures.grammar import (
    CorruptCheckpointFault,
    CorruptCopyFault,
    Fault,
    Fields,
    RankFault,
)
from swift.failures.traces import Traced, is_trace, text_of

Entry = Fault | Drawn | Traced


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What is to happen in one run."""

    given: str
    """The entries, as text."""
    faults: tuple[Fault, ...]
    """By step, then those that have a time, by time; those without either last."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


def parse_entry(text: str, flag: str = "--failures") -> Entry:
    """One entry. Raises UsageError."""
    fields = Fields(text, flag)
    if "every" in fields:
        return Drawn.of(fields)
    if "trace" in fields:
        return Traced.of(fields)
    return grammar.parse(text, flag)


def parse(text: str, flag: str = "--failures") -> list[Entry]:
    """Entries between semicolons or line ends. Raises UsageError."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    entries = [part.strip() for line in lines for part in line.split(";")]
    return [parse_entry(entry, flag) for entry in entries if entry]


def read(given: str, flag: str = "--failures") -> list[Entry]:
    """The entries of FILE or SPEC. Raises UsageError."""
    is_file = os.path.isfile(given)  # False, too, of what cannot be a name
    if "=" in given and not is_file:
        entries = parse(given, flag)
    elif not is_file:
        raise UsageError(
            f"{flag} {given}: there is no such file, and it is no failure such as rank=2,step=17 (docs/failures.md)"
        )
    else:
        entries = _of_file(Path(given), flag)
    if not entries:
        raise UsageError(f"{flag} {given}: there is no failure in it")
    return entries


def _of_file(path: Path, flag: str) -> list[Entry]:
    text = text_of(path, flag)
    if is_trace(text):
        return [Traced(path=str(path))]
    if text.lstrip().startswith("["):
        raise UsageError(f"{flag} {path}: JSON of somebody else's: convert it with swift-ft failures convert")
    if text.lstrip().startswith("{"):
        try:
            schedule = json.loads(text)["schedule"]
            return [parse_entry(str(entry), flag) for entry in schedule]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{flag} {path}: not the failures.json of a run: it has no schedule") from None
    return parse(text, f"{flag} {path}:")


def schedule_of(given: str, ranks: int, per_host: int = 1, flag: str = "--failures") -> Schedule:
    """The failures of a job with so many ranks, `per_host` on each machine unless an entry says otherwise. Raises
    UsageError: what was given makes no sense, or names a rank that is not there."""
    entries = read(given, flag)
    found: list[Fault] = []
    for entry in entries:
        if isinstance(entry, Drawn | Traced):
            hosts = Hosts(ranks=ranks, per_host=entry.per_host or per_host)
            found += entry.faults(hosts, flag)
        else:
            found.append(entry)
    check_ranks(found, ranks, flag)
    unique = list(dict.fromkeys(_in_order(found)))
    if len(unique) > FAILURES_MAX:
        raise UsageError(f"{flag}: {len(unique)} failures: {FAILURES_MAX} are the most that one run may have")
    return Schedule(given="\n".join(map(str, entries)), faults=tuple(unique))


def check_ranks(faults: Iterable[Fault], ranks: int, flag: str) -> None:
    """Raises UsageError: a failure is of a rank that is not there."""
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
