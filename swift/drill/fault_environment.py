"""What ranks are told of the faults that they carry out themselves (`swift.failures.in_ranks`)."""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from swift.drill.topology import Topology
from swift.failures import in_ranks
from swift.failures.grammar import CorruptCopyFault, Fault, RankFault, fault_id
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
    held = {index for group in in_ranks.held_together(faults, each=each_held) for index in group}

    def beside(fault: Fault) -> list[int]:
        if topology is None or not isinstance(fault, RankFault) or fault.phase not in waits:
            return []
        if (
            fault.bucket is not None
        ):  # replicas come to the middle, which may wait for what is behind that bucket
            return []
        gone = _lost_before(fault, faults) if shrinks(strategy) else set()
        return [r for r in topology.replicas_of(fault.rank) if r not in {fault.rank, *gone}]

    told = [
        in_ranks.item(fault, fault_id(index), hold=index in held, beside=beside(fault))
        for index, fault in enumerate(faults)
        if isinstance(fault, RankFault | CorruptCopyFault)
    ]
    return json.dumps(told + [in_ranks.pause(name, paused, step) for name, step in pauses.items()])


def _lost_before(fault: RankFault, faults: Sequence[Fault]) -> set[int]:
    """The ranks that are killed in an earlier step."""
    steps = {other.rank: other.step for other in faults if isinstance(other, RankFault)}
    return {rank for rank, step in steps.items() if step is not None and step < (fault.step or 0)}
