"""Checks that the faults of ``--kill`` are possible in a drill. The grammar is `swift_ft.fault_grammar`.

`problems` knows the topology, and yields lines that name the allowed values.

The runtime inside a rank injects rank faults (`swift_ft.fault_grammar`). With "hold" it waits for the drill's release.
So the drill can flip its bit when the rank is certain to die and no record has been read back yet, and several victims
of one step die together.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from swift_ft import fault_grammar
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
) -> str:
    """Returns the JSON list of faults for `ENV_FAULTS`. `pauses`: id -> the step before which rank `paused` waits for
    ``<id>.go``. `topology`: lets a victim that dies with half an update applied wait for its replicas, and so a victim
    in a reduction that the replicas are to finish."""
    waits = {"update", "reduce"} if may_finish(strategy) else {"update"}
    held = {index for group in fault_grammar.held_together(faults) for index in group}

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


def problems(
    faults: Sequence[Fault],
    topology: Topology,
    *,
    strategy: str = "auto",
    updates: str = "after_backward",
    log_servers: int = 1,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
) -> Iterator[str]:
    """Yields why this topology cannot have these faults."""
    drill = _Drill(faults, topology, strategy, updates, log_servers, groups)
    for fault in faults:
        for problem in drill.problems(fault):
            yield f"--kill {fault}: {problem}"


def phases_of(topology: Topology, updates: str, strategy: str = "auto") -> tuple[str, ...]:
    """Returns the phases in which a rank can be killed here."""
    absent = {"reduce", "update", "copy", "finish"} if topology.replicas == 1 else set()
    if topology.schedule not in SPLITTING:
        absent |= {"weights"}
    absent = absent - {"copy"} if strategy == SNAPSHOT else absent | {"snapshot"}
    if updates != "wait_free":
        absent |= {"update"}
    return tuple(phase for phase in PHASES if phase not in absent)


_WHY_ABSENT = {
    "reduce": "nothing is reduced without replicas",
    "update": "no update begins before the backward pass is over without --updates wait_free",
    "copy": "there is nothing to copy without replicas",
    "finish": "no step is finished by others without replicas",
    "snapshot": "--strategy snapshot takes them",
}


@dataclass(frozen=True, slots=True)
class _Drill:
    """What decides whether a fault is possible."""

    faults: Sequence[Fault]
    topology: Topology
    strategy: str
    updates: str
    log_servers: int
    groups: RecoveryGroups

    def problems(self, fault: Fault) -> Iterator[str]:
        """Yields why the drill cannot have this fault, the coordinates' problems first."""
        if not _is_kill_or_flip(fault):
            yield "a drill kills at coordinates; swift-ft run --failures does this (docs/failures.md)"
        shape, rank, step = self.topology, getattr(fault, "rank", None), getattr(fault, "step", None)
        if isinstance(fault, LogLossFault):
            yield from self._log_loss(fault)
        if rank is not None and rank >= shape.ranks:
            yield f"rank must be 0 to {shape.ranks - 1}"
        if step is not None and step >= shape.steps:
            yield f"step must be 0 to {shape.steps - 1} (--steps {shape.steps})"
        match fault:
            case RankFault():
                yield from self._rank(fault)
                if fault.phase in RECOVERY_PHASES:
                    yield from self._in_recovery(fault)
            case CorruptFault():
                yield from self._corrupt_log(fault)
            case CorruptCheckpointFault():
                yield from self._corrupt_checkpoint(fault)
            case CorruptCopyFault():
                yield from self._corrupt_copy(fault)
            case CoordinatorFault(state=state):
                if state != "running" and not self._kills():
                    yield f"state {state} is only reached in a recovery, so kill a rank as well"

    def _kills(self) -> list[RankFault]:
        return [fault for fault in self.faults if isinstance(fault, RankFault)]

    def _rank(self, fault: RankFault) -> Iterator[str]:
        every = self.topology.checkpoint_every
        if fault.microbatch >= self.topology.microbatches:
            yield f"microbatch must be 0 to {self.topology.microbatches - 1}"
        if fault.phase == "save" and fault.step is not None and (fault.step + 1) % every:
            yield (
                f"no checkpoint is written behind that step; take one before a multiple of {every}, such as {every - 1}"
            )
        phases = phases_of(self.topology, self.updates, self.strategy)
        if fault.phase not in phases:
            yield f"{_WHY_ABSENT[fault.phase]}; phases here: {', '.join(phases)}"

    def _log_loss(self, fault: LogLossFault) -> Iterator[str]:
        if fault.server >= self.log_servers:
            yield f"log must be 0 to {self.log_servers - 1} (--log-servers {self.log_servers})"
        lost = {other.server for other in self.faults if isinstance(other, LogLossFault)}
        if len(lost) >= self.log_servers:
            yield f"no log server would be left: add --log-servers {len(lost) + 1}"
        if fault.step is None and not self._kills():
            yield "nothing replays unless another --kill makes a rank fail first"

    def _in_recovery(self, fault: RankFault) -> Iterator[str]:
        may_do, does = {
            "replay": (may_replay(self.strategy), "replays"),
            "copy": (self.strategy == SNAPSHOT or may_copy(self.strategy), "copies"),
            "finish": (may_finish(self.strategy), "is finished"),
        }[fault.phase]
        if fault.phase == "finish" and not may_do:
            yield "nobody finishes a step for others: add --strategy lossy-forward"
        if not may_do:
            yield f"--strategy {self.strategy} {does} nothing"
        if fault.phase == "replay" and not self.groups.logs:
            yield f"one group of all (--groups {self.groups}) replays nothing"
        if all(other.phase in RECOVERY_PHASES for other in self._kills()):
            yield f"nothing {does} unless another --kill makes a rank fail first"

    def _corrupt_log(self, fault: CorruptFault) -> Iterator[str]:
        every = self.topology.checkpoint_every
        victim = victim_of(fault, self.faults)
        if victim is None:
            yield "nothing reads the log: no rank is killed at that step"
            return
        if not may_replay(self.strategy):
            yield f"--strategy {self.strategy} never reads the log"
        if self.topology.replicas > 1 and self.strategy != "replay":
            yield "with replicas nothing reads the log unless it is told to: add --strategy replay"
        if fault.step % every == 0:
            yield (
                "the checkpoint may be of that very step and leave nothing to replay; take a step that is no multiple "
                f"of {every}"
            )
        streams = self.topology.replay_streams(victim.rank, self.groups)
        if not streams:
            yield f"a replay of rank {victim.rank} reads no stream: it has no neighbour in another group"
        if fault.stream and fault.stream not in streams:
            yield f"a replay of rank {victim.rank} reads only the streams {', '.join(streams)}"

    def _corrupt_copy(self, fault: CorruptCopyFault) -> Iterator[str]:
        if self.strategy != SNAPSHOT and (self.topology.replicas == 1 or not may_copy(self.strategy)):
            why = "without replicas" if self.topology.replicas == 1 else f"with --strategy {self.strategy}"
            yield f"nothing is copied {why}"
        if all(other.rank != fault.rank for other in self._kills()):
            yield f"rank {fault.rank} is given no state unless another --kill takes its own"

    def _corrupt_checkpoint(self, fault: CorruptCheckpointFault) -> Iterator[str]:
        every = self.topology.checkpoint_every
        if self.strategy != "checkpoint":
            yield "only with --strategy checkpoint do all ranks load theirs"
        if victim_of(fault, self.faults) is None:
            yield "nobody loads a checkpoint: no rank is killed at that step"
        if fault.step < every or fault.step % every == 0:
            yield (
                f"take a step above {every} that is no multiple of it: there must be a checkpoint, and one before it"
            )


def _is_kill_or_flip(fault: Fault) -> bool:
    """Returns whether the fault is a kill or a bit flip at coordinates: a drill supports no others."""
    others = isinstance(fault, FillFault) or (isinstance(fault, RankFault) and fault.kind != "kill")
    timed = getattr(fault, "at_s", None) is not None or getattr(fault, "for_s", None) is not None
    return not (others or timed or (isinstance(fault, CoordinatorFault) and not fault.state))


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
    assert victim is not None, "checked before"
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
