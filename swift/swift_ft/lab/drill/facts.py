"""Where the runs of a command lie, and how a signal ends them."""

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
from swift_ft.lab.plan.profile import Profile
from swift_ft.text import tell

# What a report is made of, made once: what was asked for, what the drill left behind, and what follows from both.


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the drill looked at besides the trace."""

    cores: int | None = None
    """That all processes of the run share."""
    in_log: Mapping[str, Mapping[int, int]] | None = None
    """stream -> step -> raw bytes of the records that were in the log at the end; None: nobody looked."""
    checkpoint_bytes: Mapping[int, int] | None = None
    """rank -> bytes of its last checkpoint."""
    fetched: Profile | None = None
    """What `swift-ft plan` got of the job itself."""
    not_fetched: str = ""
    """Why there is none."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a drill leaves behind."""

    events: Sequence[Event]
    """Of the run with faults, by time."""
    digests: Mapping[str, Digest]
    """``rank0-v10-g2`` (at a recovery) and ``rank0-v30`` (at the end) -> digests."""
    twin_digests: Mapping[str, Digest]
    """``rank0-v10`` -> digests, for every version."""
    exit_code: int | None
    """Of the run's launcher; None: it did not end by itself."""
    stalled: bool = False
    """It was cut off because nothing happened any more."""
    twin_exit_code: int | None = None
    twin_recoveries: int = 0
    fired: frozenset[str] = frozenset()
    """Ids of the faults that were carried out."""
    corruption: Mapping[str, Any] | None = None
    """What the drill flipped in the live log."""
    log: Mapping[str, Any] | None = None
    """``records`` and ``bytes`` in the log."""
    negative_control: Mapping[str, Any] | None = None
    calculated: Mapping[int, Digest] = field(default_factory=dict)
    """version -> what an independent calculation has of a run that drops batches; empty: none was asked for."""
    twin_losses: loss.Losses = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Every part of the report takes this, and nothing else but the recovery that it is about."""

    asked: DrillConfig
    evidence: Evidence
    recoveries: Sequence[Recovery]
    """In order of time."""
    at_recovery: Sequence[Comparison]
    """With the failure-free run, where each recovery led."""
    at_end: Comparison

    @classmethod
    def of(cls, asked: DrillConfig, evidence: Evidence) -> Self:
        """Behind what was asked for and promises no bits, digests may differ."""
        recoveries = timeline.recoveries(evidence.events)
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
        """Of the run with faults, by time."""
        return self.evidence.events

    @property
    def measured(self) -> Measured:
        """Besides the trace."""
        return self.evidence.measured

    @property
    def comparisons(self) -> list[Comparison]:
        """At each recovery, and at the end."""
        return [*self.at_recovery, self.at_end]

    @property
    def fell_back(self) -> list[str]:
        """Why recoveries went back to a checkpoint, those that did."""
        return [recovery.fell_back for recovery in self.recoveries if recovery.fell_back]


def _as_calculated(theirs: Digest, evidence: Evidence, version: int) -> Digest:
    """Of a rank of the failure-free run: all but what is trained, which is the calculation's."""
    others = {name: value for name, value in theirs.items() if name not in TRAINED_FIELDS}
    return {**others, **evidence.calculated.get(version, {})}


class Stopped(BaseException):
    """A signal asked the command to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Signals:
    """Notes SIGINT, SIGTERM and SIGHUP; `check` acts on them where it is safe to."""

    def __init__(self) -> None:
        self.signum = 0
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signum = number

    def check(self) -> None:
        """Raises Stopped if one has come."""
        if self.signum:
            raise Stopped(self.signum)


def until_stopped(name: str, run: Callable[[Callable[[], None]], int]) -> int:
    """The exit code of a command. `run` gets a call that ends it where a signal has come, and gives the code. Whatever
    it raises is said."""
    signals = Signals()
    try:
        return run(signals.check)
    except SwiftError as error:
        first, *rest = str(error).splitlines()
        tell(first)
        print("\n".join(rest), end="\n" if rest else "", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        tell(f"{error.filename or f'the {name}'}: {error.strerror or error}")
        return ServiceError.exit_code
    except Stopped as stopped:
        word = signal.Signals(stopped.signum).name
        tell(f"{word}: the {name} was ended, nothing of it is left running")
        return 128 + stopped.signum


@contextlib.contextmanager
def work_directory(given: Path | None, *, keep: bool, name: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(where the runs lie, a call that keeps it). Without a `given` one it is temporary, and removed at the end unless
    it is kept; `name` is what it belongs to."""
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
    """Raises UsageError if it cannot be written."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{flag} {path}: give a file in a directory that exists")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def check_directory(flag: str, directory: Path | None, *, empty: bool) -> None:
    """Makes it. Raises UsageError if it cannot be used."""
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
