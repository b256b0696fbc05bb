"""What ranks are told of the faults that they carry out themselves: the value of ``SWIFT_FAULTS``.

The runtime's side is `swift.runtime.faults`.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from swift.drill.faults import CorruptCopyFault, Fault, RankFault, fault_id, held_together
from swift.drill.topology import Topology
from swift.recovery import shrinks
from swift.recovery.strategies import may_finish


def to_environment(
    faults: Sequence[Fault],
    pauses: Mapping[str, int] = MappingProxyType({}),
    topology: Topology | None = None,
    *,
    paused: int = 0,
    strategy: str = "auto",
    each_held: bool = False,
) -> str:
    """`pauses`: id -> the step before which rank `paused` waits for ``<id>.go``. `topology`: who dies with half an
    update applied waits for its replicas; so does who dies in a reduction that these are to finish. `each_held`: every
    victim waits for the drill's word."""
    waits = {"update", "reduce"} if may_finish(strategy) else {"update"}
    held = {index for group in held_together(faults, each=each_held) for index in group}

    def beside(fault: RankFault) -> dict[str, list[int]]:
        if topology is None or fault.phase not in waits:
            return {}
        gone = _lost_before(fault, faults) if shrinks(strategy) else set()
        return {"beside": [r for r in topology.replicas_of(fault.rank) if r not in {fault.rank, *gone}]}

    return json.dumps(
        [
            {
                "id": fault_id(index),
                "rank": fault.rank,
                "step": fault.step,
                "microbatch": fault.microbatch,
                "phase": fault.phase,
                **({"hold": True} if index in held else {}),
                **beside(fault),
            }
            for index, fault in enumerate(faults)
            if isinstance(fault, RankFault)
        ]
        + [
            {"id": fault_id(index), "rank": fault.rank, "phase": "flip"}
            for index, fault in enumerate(faults)
            if isinstance(fault, CorruptCopyFault)
        ]
        + [
            {"id": pause, "rank": paused, "step": step, "phase": "pause", "hold": True}
            for pause, step in pauses.items()
        ]
    )


def _lost_before(fault: RankFault, faults: Sequence[Fault]) -> set[int]:
    """The ranks that are killed in an earlier step."""
    steps = {other.rank: other.step for other in faults if isinstance(other, RankFault)}
    return {rank for rank, step in steps.items() if step is not None and step < (fault.step or 0)}
