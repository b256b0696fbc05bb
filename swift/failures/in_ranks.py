"""What ranks are told of the failures that they make happen themselves: the value of ``SWIFT_FAULTS``, a JSON list.

`swift.runtime.faults` reads it. At the coordinates it creates ``$SWIFT_FAULTS_DIR/<id>.fired`` exclusively, emits the
event "fault" and does what the item's ``kind`` says. With "hold" it first creates ``<id>.reached`` and waits for
``<id>.go``: whoever started the ranks flips a bit, cuts a cable or kills a service at that very place of the step, and
lets several victims of one step die at once.
"""

from collections.abc import Collection, Sequence
from typing import Any

from swift.failures.grammar import (
    RECOVERY_PHASES,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    RankFault,
)

ENV_FAULTS = "SWIFT_FAULTS"
ENV_FAULTS_DIR = "SWIFT_FAULTS_DIR"
IN_THE_RANK = ("kill", "stop", "hang")
"""Kinds that a rank does to itself. Of all others it only makes known that it is there, and waits."""


BEFORE_A_LOSS = CorruptFault | CorruptCheckpointFault | LogLossFault
"""What is done to a log or a checkpoint before the victims of that step die."""


def item(
    fault: RankFault | CorruptCopyFault, name: str, *, hold: bool = False, beside: Collection[int] = ()
) -> dict[str, Any]:
    """One failure of the list. `name`: its id. `beside`: ranks that it waits for, until they have come as far."""
    if isinstance(fault, CorruptCopyFault):
        return {"id": name, "rank": fault.rank, "phase": "flip"}
    told: dict[str, Any] = {
        "id": name,
        "rank": fault.rank,
        "step": fault.step,
        "microbatch": fault.microbatch,
        "phase": fault.phase,
    }
    if fault.kind != "kill":
        told["kind"] = fault.kind if fault.kind in IN_THE_RANK else "pause"
    if fault.kind == "hang" and fault.for_s is not None:
        told["for_s"] = fault.for_s
    if fault.layer:
        told["layer"] = fault.layer
    if fault.bucket is not None:
        told["bucket"] = fault.bucket
    if hold or fault.kind not in IN_THE_RANK:
        told["hold"] = True
    if beside:
        told["beside"] = sorted(beside)
    return told


def pause(name: str, rank: int, step: int) -> dict[str, Any]:
    """A rank that waits before this step for ``<name>.go``."""
    return {"id": name, "rank": rank, "step": step, "phase": "idle", "kind": "pause", "hold": True}


def held_together(faults: Sequence[Fault], *, each: bool = False) -> list[list[int]]:
    """Indices of rank faults that wait for a word, those that get it at the same moment together: the
    victims of one step, if they are several, or if their log is corrupted or a log server lost before. `each`: in any
    case."""
    by_step: dict[int, list[int]] = {}
    for index, fault in enumerate(faults):
        if not isinstance(fault, RankFault) or fault.kind != "kill" or fault.phase in RECOVERY_PHASES:
            continue
        if fault.step is not None:
            by_step.setdefault(fault.step, []).append(index)
    beside = {fault.step for fault in faults if isinstance(fault, BEFORE_A_LOSS)}
    return [group for step, group in by_step.items() if each or len(group) > 1 or step in beside]
