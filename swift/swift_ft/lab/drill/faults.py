"""Checks that the faults of ``--kill`` are possible in a drill. The grammar is `swift_ft.fault_grammar`.

`check` knows the topology, and raises `UsageError` with one line that names the allowed values.

The runtime inside a rank injects rank faults (`swift_ft.fault_grammar`). With "hold" it waits for the drill's release.
So the drill can flip its bit when the rank is certain to die and no record has been read back yet, and several victims
of one step die together.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from swift_ft import fault_grammar
from swift_ft.errors import UsageError
from swift_ft.fault_grammar import (
    PHASES,
    RECOVERY_PHASES,
    CoordinatorFault,
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    Fault,
    FillFault,
    LogLossFault,
    LogServerFault,
    RankFault,
    fault_id,
)
from swift_ft.lab.drill.topology import SPLITTING, Topology
from swift_ft.planner import shrinks
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.strategies import may_copy, may_finish, may_replay

# The faults that ranks inject themselves, as passed to them (`swift_ft.fault_grammar`).


def to_environment(
    faults: Sequence[Fault],
    pauses: Mapping[str, int] = MappingProxyType({}),
    topology: Topology | None = None,
    *,
    paused: int = 0,
    strategy: str = "auto",
    each_held: bool = False,
) -> str:
    """Returns the JSON list of faults for `ENV_FAULTS`. `pauses`: id -> the step before which rank `paused` waits for
    ``<id>.go``. `topology`: lets a victim that dies with half an update applied wait for its replicas, and so a victim
    in a reduction that the replicas are to finish. `each_held`: every victim waits for the drill's release."""
    waits = {"update", "reduce"} if may_finish(strategy) else {"update"}
    held = {index for group in fault_grammar.held_together(faults, each=each_held) for index in group}

    def beside(fault: Fault) -> list[int]:
        if topology is None or not isinstance(fault, RankFault) or fault.phase not in waits:
            return []
        if (
            fault.bucket is not None
        ):  # replicas report in the middle of the phase, where they may wait for what follows that bucket
            return []
        gone = _lost_before(fault, faults) if shrinks(strategy) else set()
        return [r for r in topology.replicas_of(fault.rank) if r not in {fault.rank, *gone}]

    told = [
        fault_grammar.item(fault, fault_id(index), hold=index in held, beside=beside(fault))
        for index, fault in enumerate(faults)
        if isinstance(fault, RankFault | CorruptCopyFault)
    ]
    return json.dumps(told + [fault_grammar.pause(name, paused, step) for name, step in pauses.items()])


def _lost_before(fault: RankFault, faults: Sequence[Fault]) -> set[int]:
    """Returns the ranks that are killed in an earlier step."""
    steps = {other.rank: other.step for other in faults if isinstance(other, RankFault)}
    return {rank for rank, step in steps.items() if step is not None and step < (fault.step or 0)}


SNAPSHOT = "snapshot"
"""Strategy under which a state is copied without a replica."""


def check(
    faults: Sequence[Fault],
    topology: Topology,
    *,
    strategy: str = "auto",
    updates: str = "after_backward",
    log_servers: int = 1,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
) -> None:
    """Raises `UsageError` for faults that this topology cannot have."""
    for fault in faults:
        _check_kind(fault)
        match fault:
            case RankFault():
                _check_rank_fault(fault, topology, updates, strategy)
                if fault.phase in RECOVERY_PHASES:
                    _check_recovery_fault(fault, faults, strategy, groups)
            case LogServerFault(step=int(step)):
                _check_step(fault, step, topology)
            case LogLossFault():
                _check_log_loss(fault, faults, topology, log_servers)
            case CorruptFault():
                _check_corrupt_fault(fault, faults, topology, strategy, groups)
            case CorruptCheckpointFault():
                _check_corrupt_checkpoint(fault, faults, topology, strategy)
            case CorruptCopyFault():
                _check_corrupt_copy(fault, faults, topology, strategy)
            case CoordinatorFault(state=state):
                if state != "running" and not any(isinstance(other, RankFault) for other in faults):
                    raise UsageError(
                        f"--kill {fault}: state {state} is only reached in a recovery, so kill a rank as well"
                    )


def _check_kind(fault: Fault) -> None:
    """Raises `UsageError` unless the fault is a kill or a bit flip at coordinates: a drill supports no others."""
    others = isinstance(fault, FillFault) or (isinstance(fault, RankFault) and fault.kind != "kill")
    timed = getattr(fault, "at_s", None) is not None or getattr(fault, "for_s", None) is not None
    if others or timed or (isinstance(fault, CoordinatorFault) and not fault.state):
        raise UsageError(
            f"--kill {fault}: a drill kills at coordinates; swift-ft run --failures does this (docs/failures.md)"
        )


def phases_of(topology: Topology, updates: str, strategy: str = "auto") -> tuple[str, ...]:
    """Returns the phases in which a rank can be killed here."""
    absent = {"reduce", "update", "copy", "finish"} if topology.replicas == 1 else set()
    if topology.schedule not in SPLITTING:
        absent |= {"weights"}
    absent = absent - {"copy"} if strategy == SNAPSHOT else absent | {"snapshot"}
    if updates != "wait_free":
        absent |= {"update"}
    return tuple(phase for phase in PHASES if phase not in absent)


def _check_step(fault: Fault, step: int, topology: Topology) -> None:
    if step >= topology.steps:
        raise UsageError(f"--kill {fault}: step must be 0 to {topology.steps - 1} (--steps {topology.steps})")


def _check_rank_fault(fault: RankFault, topology: Topology, updates: str, strategy: str) -> None:
    if fault.rank >= topology.ranks:
        raise UsageError(f"--kill {fault}: rank must be 0 to {topology.ranks - 1}")
    if fault.step is not None:
        _check_step(fault, fault.step, topology)
    if fault.microbatch >= topology.microbatches:
        raise UsageError(f"--kill {fault}: microbatch must be 0 to {topology.microbatches - 1}")
    phases = phases_of(topology, updates, strategy)
    if fault.phase == "save" and fault.step is not None and (fault.step + 1) % topology.checkpoint_every:
        raise UsageError(
            f"--kill {fault}: no checkpoint is written behind that step; take one before a multiple of "
            f"{topology.checkpoint_every}, such as {topology.checkpoint_every - 1}"
        )
    if fault.phase in phases:
        return
    why = {
        "reduce": "nothing is reduced without replicas",
        "update": "no update begins before the backward pass is over without --updates wait_free",
        "copy": "there is nothing to copy without replicas",
        "finish": "no step is finished by others without replicas",
        "snapshot": "--strategy snapshot takes them",
    }
    raise UsageError(f"--kill {fault}: {why[fault.phase]}; phases here: {', '.join(phases)}")


def _check_log_loss(
    fault: LogLossFault, faults: Sequence[Fault], topology: Topology, log_servers: int
) -> None:
    if fault.server >= log_servers:
        raise UsageError(f"--kill {fault}: log must be 0 to {log_servers - 1} (--log-servers {log_servers})")
    lost = {other.server for other in faults if isinstance(other, LogLossFault)}
    if len(lost) >= log_servers:
        raise UsageError(f"--kill {fault}: no log server would be left: add --log-servers {len(lost) + 1}")
    if fault.step is not None:
        _check_step(fault, fault.step, topology)
    elif not any(isinstance(other, RankFault) for other in faults):
        raise UsageError(f"--kill {fault}: nothing replays unless another --kill makes a rank fail first")


def _check_recovery_fault(
    fault: RankFault, faults: Sequence[Fault], strategy: str, groups: RecoveryGroups
) -> None:
    if fault.phase == "finish" and not may_finish(strategy):
        raise UsageError(f"--kill {fault}: nobody finishes a step for others: add --strategy lossy-forward")
    does = {"replay": "replays", "copy": "copies", "finish": "is finished"}[fault.phase]
    if not {"replay": may_replay, "copy": _may_copy, "finish": may_finish}[fault.phase](strategy):
        raise UsageError(f"--kill {fault}: --strategy {strategy} {does} nothing")
    if fault.phase == "replay" and not groups.logs:
        raise UsageError(f"--kill {fault}: one group of all (--groups {groups}) replays nothing")
    if not any(isinstance(other, RankFault) and other.phase not in RECOVERY_PHASES for other in faults):
        raise UsageError(f"--kill {fault}: nothing {does} unless another --kill makes a rank fail first")


def _may_copy(strategy: str) -> bool:
    return strategy == SNAPSHOT or may_copy(strategy)


def _check_corrupt_fault(
    fault: CorruptFault, faults: Sequence[Fault], topology: Topology, strategy: str, groups: RecoveryGroups
) -> None:
    _check_step(fault, fault.step, topology)
    victim = victim_of(fault, faults)
    if victim is None:
        raise UsageError(f"--kill {fault}: nothing reads the log: no rank is killed at that step")
    if not may_replay(strategy):
        raise UsageError(f"--kill {fault}: --strategy {strategy} never reads the log")
    if topology.replicas > 1 and strategy != "replay":
        raise UsageError(
            f"--kill {fault}: with replicas nothing reads the log unless it is told to: add --strategy replay"
        )
    if fault.step % topology.checkpoint_every == 0:
        raise UsageError(
            f"--kill {fault}: the checkpoint may be of that very step and leave nothing to replay; "
            f"take a step that is no multiple of {topology.checkpoint_every}"
        )
    streams = topology.replay_streams(victim.rank, groups)
    if not streams:
        raise UsageError(
            f"--kill {fault}: a replay of rank {victim.rank} reads no stream: it has no neighbour in another group"
        )
    if fault.stream and fault.stream not in streams:
        raise UsageError(
            f"--kill {fault}: a replay of rank {victim.rank} reads only the streams {', '.join(streams)}"
        )


def _check_corrupt_copy(
    fault: CorruptCopyFault, faults: Sequence[Fault], topology: Topology, strategy: str
) -> None:
    if strategy != SNAPSHOT and (topology.replicas == 1 or not may_copy(strategy)):
        why = "without replicas" if topology.replicas == 1 else f"with --strategy {strategy}"
        raise UsageError(f"--kill {fault}: nothing is copied {why}")
    if not any(isinstance(other, RankFault) and other.rank == fault.rank for other in faults):
        raise UsageError(
            f"--kill {fault}: rank {fault.rank} is given no state unless another --kill takes its own"
        )


def _check_corrupt_checkpoint(
    fault: CorruptCheckpointFault, faults: Sequence[Fault], topology: Topology, strategy: str
) -> None:
    _check_step(fault, fault.step, topology)
    every = topology.checkpoint_every
    if fault.rank >= topology.ranks:
        raise UsageError(f"--kill {fault}: rank must be 0 to {topology.ranks - 1}")
    if strategy != "checkpoint":
        raise UsageError(f"--kill {fault}: only with --strategy checkpoint do all ranks load theirs")
    if victim_of(fault, faults) is None:
        raise UsageError(f"--kill {fault}: nobody loads a checkpoint: no rank is killed at that step")
    if fault.step < every or fault.step % every == 0:
        raise UsageError(
            f"--kill {fault}: take a step above {every} that is no multiple of it: there must be a checkpoint, and "
            "one before it"
        )


def victim_of(fault: CorruptFault | CorruptCheckpointFault, faults: Sequence[Fault]) -> RankFault | None:
    """Returns the fault of the rank that dies in the step whose log or checkpoint is corrupted; None: there is none."""
    for other in faults:
        if isinstance(other, RankFault) and other.step == fault.step and other.phase not in RECOVERY_PHASES:
            return other
    return None


def corrupted_stream(
    fault: CorruptFault,
    faults: Sequence[Fault],
    topology: Topology,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
) -> str:
    """Returns the named stream, or the first one that the victim's replay reads."""
    victim = victim_of(fault, faults)
    assert victim is not None, "check() ran first"
    return fault.stream or topology.replay_streams(victim.rank, groups)[0]


def all_get_there(group: Sequence[Fault], topology: Topology) -> bool:
    """Returns whether no victim of this step depends on another that is held where it dies.

    Victims in different pipelines are independent while no gradients are reduced, and so are victims that have all
    ended the step before. A victim may wait for a neighbour in the same pipeline; that case is not analysed and returns
    False.
    """
    ranks = [fault.rank for fault in group if isinstance(fault, RankFault)]
    phases = {fault.phase for fault in group if isinstance(fault, RankFault)}
    apart = len({topology.dp_rank(rank) for rank in ranks}) == len(ranks)
    return phases == {"idle"} or (apart and phases <= {"forward", "backward", "idle"})
