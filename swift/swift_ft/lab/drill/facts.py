"""The input of a report, built once: the configuration, the evidence of both runs, and the facts derived from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from swift_ft.lab.drill import timeline
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import TRAINED_FIELDS, Comparison, Digest, Losses, compare


@dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """What the failure-free run left."""

    digests: Mapping[str, Digest]
    """``rank0-v10`` -> digests, for every version."""
    exit_code: int | None
    recoveries: int = 0
    output: str = ""
    """The last lines of every process's output, if it failed."""
    losses: Losses = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    events: Sequence[Event]
    """Events of the run with faults, by time."""
    digests: Mapping[str, Digest]
    """``rank0-v10-g2`` (at a recovery) and ``rank0-v30`` (at the end) -> digests."""
    twin: Twin
    exit_code: int | None
    """Exit code of the run's launcher; None: it was cut off, because its trace showed no progress."""
    negative_control: Mapping[str, Any] | None = None
    calculated: Mapping[int, Digest] = field(default_factory=dict)
    """version -> digests of an independent calculation of a run that drops batches; empty: not calculated."""


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
            ours, twin = evidence.digests, evidence.twin.digests
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

    def named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["event"] == name]

    @property
    def fired(self) -> dict[str, float]:
        """Returns id of a fault -> when it was injected."""
        injected = ("fault", "service_killed", "corrupted")
        return {event["id"]: event["t"] for event in self.events if event["event"] in injected}

    @property
    def flipped(self) -> Event | None:
        """Returns what is told of the bit that the drill flipped in the live log or in a checkpoint."""
        return next((event for event in self.named("corrupted") if event["who"] == "drill"), None)

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
