"""What a report is made of, made once: what was asked for, what the drill left behind, and what follows from both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from swift.drill import loss, timeline
from swift.drill.config import DrillConfig
from swift.drill.timeline import Event, Recovery
from swift.drill.verdict_checks import TRAINED_FIELDS, Comparison, Digest, compare
from swift.plan.profile import Profile


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
