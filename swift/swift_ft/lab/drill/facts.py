"""The evidence of a drill, the facts derived from it, and the helpers of a command: work directory, signals, paths."""

import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.files import make_directory
from swift_ft.lab.drill import loss, timeline
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import TRAINED_FIELDS, Comparison, Digest, compare
from swift_ft.text import tell

# The input of a report, built once: the configuration, the evidence of both runs, and the facts derived from them.


@dataclass(frozen=True, kw_only=True)
class Evidence:
    events: Sequence[Event]
    """Events of the run with faults, by time."""
    digests: Mapping[str, Digest]
    """``rank0-v10-g2`` (at a recovery) and ``rank0-v30`` (at the end) -> digests."""
    twin_digests: Mapping[str, Digest]
    """``rank0-v10`` -> digests, for every version."""
    exit_code: int | None
    """Exit code of the run's launcher; None: it did not exit by itself."""
    stalled: bool = False
    """The run was cut off because its trace showed no progress."""
    twin_exit_code: int | None = None
    twin_recoveries: int = 0
    fired: frozenset[str] = frozenset()
    """Ids of the faults that were injected."""
    corruption: Mapping[str, Any] | None = None
    """The bit that the drill flipped in the live log or in a checkpoint."""
    log: Mapping[str, Any] | None = None
    """``records`` and ``bytes`` that were logged."""
    negative_control: Mapping[str, Any] | None = None
    calculated: Mapping[int, Digest] = field(default_factory=dict)
    """version -> digests of an independent calculation of a run that drops batches; empty: not calculated."""
    twin_losses: loss.Losses = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Common input of all parts of the report."""

    asked: DrillConfig
    evidence: Evidence
    recoveries: Sequence[Recovery]
    """Recoveries, by time."""
    at_recovery: Sequence[Comparison]
    """Comparison with the failure-free run at the version that each recovery reached."""
    at_end: Comparison

    @classmethod
    def of(cls, asked: DrillConfig, evidence: Evidence) -> Self:
        """Compares digests at each recovery and at the end. After a requested inexact operation digests may differ."""
        recoveries = timeline.recoveries(evidence.events, asked.topology.parts)
        at_recovery: list[Comparison] = []
        inexact = False
        vacant: frozenset[int] = frozenset()

        def at(version: int, generation: int | None) -> Comparison:
            ours, twin = evidence.digests, evidence.twin_digests
            if asked.drops:
                twin = {name: _as_calculated(theirs, evidence, version) for name, theirs in twin.items()}
            ranks = set(range(asked.topology.ranks)) - vacant
            return compare(version, generation, sorted(ranks), ours, twin, inexact=inexact)

        for recovery in recoveries:
            vacant = recovery.vacant
            inexact = inexact or (recovery.inexact and asked.undo == "arithmetic")
            inexact = inexact or (bool(vacant) and asked.exact_gradients == "off")
            if recovery.target_version is not None:
                at_recovery.append(at(int(recovery.target_version), recovery.generation))
        return cls(
            asked=asked,
            evidence=evidence,
            recoveries=recoveries,
            at_recovery=at_recovery,
            at_end=at(asked.topology.steps, None),
        )

    @property
    def events(self) -> Sequence[Event]:
        return self.evidence.events

    @property
    def comparisons(self) -> list[Comparison]:
        return [*self.at_recovery, self.at_end]

    @property
    def fell_back(self) -> list[str]:
        return [recovery.fell_back for recovery in self.recoveries if recovery.fell_back]


def _as_calculated(theirs: Digest, evidence: Evidence, version: int) -> Digest:
    """Returns a failure-free rank's digest with the trained fields replaced by those of the calculation."""
    others = {name: value for name, value in theirs.items() if name not in TRAINED_FIELDS}
    return {**others, **evidence.calculated.get(version, {})}


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Raised by the first signal that asks the command to end. Later ones are ignored while it ends its processes."""


def _stop(number: int, _frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


def until_stopped(name: str, run: Callable[[], int]) -> int:
    """Returns the exit code of a command, which `run` returns. A signal raises Stopped in it. Errors that it raises are
    printed and turned into exit codes."""
    for number in _SIGNALS:
        signal.signal(number, _stop)
    try:
        return run()
    except SwiftError as error:
        first, *rest = str(error).splitlines()
        tell(first)
        print("\n".join(rest), end="\n" if rest else "", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        raise  # for `end_quietly`
    except OSError as error:
        tell(f"{error.filename or f'the {name}'}: {error.strerror or error}")
        return ServiceError.exit_code
    except Stopped as stopped:
        (number,) = stopped.args
        tell(f"{signal.Signals(number).name}: the {name} was ended, nothing of it is left running")
        return 128 + int(number)


@contextlib.contextmanager
def work_directory(given: Path | None, *, keep: bool, name: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yields (directory of the runs, a call that keeps it). Without `given` the directory is temporary and removed at
    the end unless kept. `name`: the command that it belongs to."""
    if given is not None:
        yield given.resolve(), lambda: None
        return
    place = Path(tempfile.mkdtemp(prefix=f"swift-{name}-"))
    kept = keep
    try:

        def keep_it() -> None:
            nonlocal kept
            kept = True

        yield place, keep_it
    finally:
        if kept:
            print(f"everything of this {name} is in {place}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)


def check_file(flag: str, path: Path | None) -> None:
    """Raises UsageError if the file cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: give a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def check_directory(flag: str, directory: Path | None, *, empty: bool) -> None:
    """Creates the directory. Raises UsageError if it cannot be used."""
    if directory is None:
        return
    try:
        make_directory(directory)
        if empty and any(directory.iterdir()):
            raise UsageError(f"{flag} {directory}: not empty; give a new one")
    except OSError as error:
        raise UsageError(f"{flag} {directory}: {error.strerror}") from None
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise UsageError(f"{flag} {directory}: no permission to read and write there")
