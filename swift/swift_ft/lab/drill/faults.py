"""Checks that the faults of ``--kill`` are possible in a drill. The grammar is `swift_ft.fault_grammar`.

`problems` knows the topology, and yields lines that name the allowed values.

The runtime inside a rank injects rank faults (`swift_ft.fault_grammar`). With "hold" it waits for the drill's release.
So the drill can flip its bit when the rank is certain to die and no record has been read back yet, and several victims
of one step die together.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from swift_ft import fault_grammar
from swift_ft.fault_grammar import (
    FOR_GOOD,
    PHASES,
    RECOVERY_PHASES,
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    LogLossFault,
    RankFault,
    fault_id,
)
from swift_ft.lab.drill import shrinking
from swift_ft.lab.drill.topology import SPLITTING, Topology
from swift_ft.planner.strategies import may_copy, may_finish, may_replay

if TYPE_CHECKING:
    from swift_ft.lab.drill.config import DrillConfig

SNAPSHOT = "snapshot"
"""Strategy under which a state is copied without a replica."""

# The faults that ranks inject themselves, as passed to them (`swift_ft.fault_grammar`).


def to_environment(asked: "DrillConfig") -> str:
    """Returns the JSON list of faults for `ENV_FAULTS`. A victim that dies with half an update applied waits for its
    replicas, and so does a victim in a reduction that the replicas are to finish."""
    waits = {"update", "reduce"} if asked.finishes_cut_steps else {"update"}
    held = {index for group in fault_grammar.held_together(asked.faults) for index in group}

    def beside(fault: Fault) -> list[int]:
        # Behind a bucket, replicas may wait for what follows it before they come to the middle, where they report.
        if not isinstance(fault, RankFault) or fault.phase not in waits or fault.bucket is not None:
            return []
        gone = _lost_before(fault, asked.faults) if asked.shrinks else set()
        return [r for r in asked.topology.replicas_of(fault.rank) if r not in {fault.rank, *gone}]

    told = [
        fault_grammar.item(fault, fault_id(index), hold=index in held, beside=beside(fault))
        for index, fault in enumerate(asked.faults)
        if isinstance(fault, RankFault | CorruptCopyFault)
    ]
    return json.dumps(told + shrinking.pauses(asked))


def _lost_before(fault: RankFault, faults: Sequence[Fault]) -> set[int]:
    steps = {other.rank: other.step for other in faults if isinstance(other, RankFault)}
    return {rank for rank, step in steps.items() if step is not None and step < (fault.step or 0)}


def problems(asked: "DrillConfig") -> Iterator[str]:
    for fault in asked.faults:
        for problem in _problems(fault, asked):
            yield f"--kill {fault}: {problem}"


def _problems(fault: Fault, asked: "DrillConfig") -> Iterator[str]:
    """Yields why the drill cannot have this fault, the coordinates' problems first."""
    if not _is_kill_or_flip(fault):
        yield "a drill kills at coordinates; swift-ft run --failures does this (docs/drills.md)"
    shape, rank, step = asked.topology, getattr(fault, "rank", None), getattr(fault, "step", None)
    if isinstance(fault, LogLossFault) and fault.server >= asked.log_servers:
        yield f"log must be 0 to {asked.log_servers - 1} (--log-servers {asked.log_servers})"
    if rank is not None and rank >= shape.ranks:
        yield f"rank must be 0 to {shape.ranks - 1}"
    if step is not None and step >= shape.steps:
        yield f"step must be 0 to {shape.steps - 1} (--steps {shape.steps})"
    match fault:
        case RankFault():
            yield from _rank(fault, asked)
        case LogLossFault():
            lost = {other.server for other in asked.faults if isinstance(other, LogLossFault)}
            if len(lost) >= asked.log_servers:
                yield f"no log server would be left: add --log-servers {len(lost) + 1}"
            if fault.step is None and not _kills(asked):
                yield "nothing replays unless another --kill makes a rank fail first"
        case CorruptFault():
            yield from _corrupt_log(fault, asked)
        case CorruptCheckpointFault():
            every = shape.checkpoint_every
            if asked.checkpoint_dir:
                yield "a bit is flipped in a file: leave --checkpoint-dir out"
            if asked.strategy != "checkpoint":
                yield "only with --strategy checkpoint do all ranks load theirs"
            if victim_of(fault, asked.faults) is None:
                yield "nobody loads a checkpoint: no rank is killed at that step"
            if fault.step < every or fault.step % every == 0:
                yield f"take a step above {every}, no multiple of it: there must be a checkpoint, and one before it"
        case CorruptCopyFault():
            if not copies(asked):
                yield f"nothing is copied with --strategy {asked.strategy} and {shape.replicas} replicas"
            if all(other.rank != fault.rank for other in _kills(asked)):
                yield f"rank {fault.rank} is given no state unless another --kill takes its own"
        case CoordinatorFault(state=state) if state != "running" and not _kills(asked):
            yield f"state {state} is only reached in a recovery, so kill a rank as well"


def copies(asked: "DrillConfig") -> bool:
    if asked.strategy == SNAPSHOT:
        return True
    return asked.topology.replicas > 1 and may_copy(asked.strategy)


def _kills(asked: "DrillConfig") -> list[RankFault]:
    return [fault for fault in asked.faults if isinstance(fault, RankFault)]


def _phases_of(asked: "DrillConfig") -> list[str]:
    alone, snapshots = asked.topology.replicas == 1, asked.strategy == SNAPSHOT
    absent = {
        "reduce": alone and asked.topology.shards == 1,
        "finish": alone,
        "update": alone or asked.updates != "wait_free",
        "weights": asked.topology.schedule not in SPLITTING,
        "copy": alone and not snapshots,
        "snapshot": not snapshots,
    }
    return [phase for phase in PHASES if not absent.get(phase)]


def _rank(fault: RankFault, asked: "DrillConfig") -> Iterator[str]:
    every = asked.topology.checkpoint_every
    if fault.microbatch >= asked.topology.microbatches:
        yield f"microbatch must be 0 to {asked.topology.microbatches - 1}"
    if fault.phase == "save" and fault.step is not None and (fault.step + 1) % every:
        yield f"no checkpoint is written behind that step; take one before a multiple of {every}, such as {every - 1}"
    phases = _phases_of(asked)
    if fault.phase not in phases:
        yield f"there is no phase {fault.phase} (docs/drills.md says what it needs); phases here: {', '.join(phases)}"
    if fault.phase not in RECOVERY_PHASES:
        return
    may_do, does = {
        "replay": (may_replay(asked.strategy) and asked.groups.logs, "replays"),
        "copy": (copies(asked), "copies"),
        "finish": (may_finish(asked.strategy), "finishes"),
    }[fault.phase]
    if not may_do:
        groups = "" if asked.groups.logs else f" with one group of all (--groups {asked.groups})"
        yield f"--strategy {asked.strategy}{groups} {does} nothing"
    if all(other.phase in RECOVERY_PHASES for other in _kills(asked)):
        yield f"nothing {does} unless another --kill makes a rank fail first"


def _corrupt_log(fault: CorruptFault, asked: "DrillConfig") -> Iterator[str]:
    shape, victim = asked.topology, victim_of(fault, asked.faults)
    if victim is None:
        yield "nothing reads the log: no rank is killed at that step"
        return
    if not may_replay(asked.strategy):
        yield f"--strategy {asked.strategy} never reads the log"
    if shape.replicas > 1 and asked.strategy != "replay":
        yield "with replicas nothing reads the log unless it is told to: add --strategy replay"
    if fault.step % shape.checkpoint_every == 0:
        yield (
            "the checkpoint may be of that very step and leave nothing to replay; take a step that is no multiple "
            f"of {shape.checkpoint_every}"
        )
    streams = shape.replay_streams(victim.rank, asked.groups)
    if not streams:
        yield f"a replay of rank {victim.rank} reads no stream: it has no neighbour in another group"
    if fault.stream and fault.stream not in streams:
        yield f"a replay of rank {victim.rank} reads only the streams {', '.join(streams)}"
    if asked.copies > 1:
        yield f"with --copies {asked.copies} a replay reads another copy: leave --copies out"


def _is_kill_or_flip(fault: Fault) -> bool:
    """Returns whether the fault is a kill or a bit flip at coordinates: a drill supports no others."""
    others = isinstance(fault, RankFault) and fault.kind not in FOR_GOOD
    timed = getattr(fault, "at_s", None) is not None or getattr(fault, "for_s", None) is not None
    return not (others or timed or (isinstance(fault, CoordinatorFault) and not fault.state))


def victim_of(fault: CorruptFault | CorruptCheckpointFault, faults: Sequence[Fault]) -> RankFault | None:
    """Returns the fault of the rank that dies in the step whose log or checkpoint is corrupted; None: there is none."""
    for other in faults:
        if isinstance(other, RankFault) and other.step == fault.step and other.phase not in RECOVERY_PHASES:
            return other
    return None


def corrupted_stream(fault: CorruptFault, asked: "DrillConfig") -> str:
    """Returns the named stream, or the first one that the victim's replay reads."""
    victim = victim_of(fault, asked.faults)
    assert victim is not None, "checked before"
    return fault.stream or asked.topology.replay_streams(victim.rank, asked.groups)[0]


def all_get_there(group: Sequence[Fault], topology: Topology) -> bool:
    """Returns whether no victim of this step depends on another that is held where it dies.

    Victims in different pipelines are independent while no gradients are reduced, and so are victims that have all
    ended the step before. A victim may wait for a neighbour in the same pipeline; that case is not analysed and returns
    False.
    """
    ranks = [fault.rank for fault in group if isinstance(fault, RankFault)]
    phases = {fault.phase for fault in group if isinstance(fault, RankFault)}
    apart = len({topology.place(rank) // topology.parts for rank in ranks}) == len(ranks)
    return phases == {"idle"} or (apart and phases <= {"forward", "backward", "idle"})
