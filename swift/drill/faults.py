"""Faults have coordinates: the grammar of ``--kill``, and what each fault needs to be possible.

    rank=2,step=17,microbatch=3,phase=backward     that rank kills itself there (SIGKILL)
    rank=2,step=9,phase=save                       while rank 2 writes the checkpoint behind that step
    rank=2,phase=replay                            at the first replay that runs while rank 2 lives
    rank=2,phase=copy                              while rank 2 sends or receives a replica's state for the first time
    rank=2,step=8,phase=snapshot                   while rank 2 sends its snapshot of version 8 (--strategy snapshot)
    service=logserver,step=12                      the log server is killed when training reaches that step
    log=0,step=17                                  that log server is killed for good
    log=0,phase=replay                             at the first replay there is
    service=coordinator,state=recovering           the coordinator kills itself when it enters that state
    corrupt=log,step=17,stream=s1.F                a bit of that stream is flipped before that kill
    corrupt=checkpoint,rank=2,step=17              a bit of rank 2's newest checkpoint is flipped before that kill
    corrupt=copy,rank=2                            a bit of the first state that rank 2 is given by a replica is flipped

Parsing knows the words, `check` knows the topology; both raise `UsageError` with one line that names what
would be allowed. A fault round-trips through ``str``.

The runtime inside a rank fires rank faults: it gets them as JSON in ``SWIFT_FAULTS``
(`swift.drill.fault_environment`) and, at the coordinates, creates ``$SWIFT_FAULTS_DIR/<id>.fired`` exclusively,
emits the event "fault" and kills itself. With "hold" it first creates ``<id>.reached`` and waits for ``<id>.go``, so
that the drill can flip its bit at a moment when the rank is certain to die and nothing has been read back yet, and so
that several victims of one step die at once.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from swift.drill.topology import Topology
from swift.errors import UsageError
from swift.recovery.groups import RecoveryGroups
from swift.recovery.strategies import may_copy, may_finish, may_replay

ENV_FAULTS = "SWIFT_FAULTS"
ENV_FAULTS_DIR = "SWIFT_FAULTS_DIR"

PHASES = (
    "forward",
    "backward",
    "reduce",
    "update",
    "optimizer",
    "idle",
    "save",
    "replay",
    "copy",
    "finish",
    "snapshot",
)
"""`reduce`: in the middle of the reduction of a step's gradients. `update`: some buckets of a wait-free step are
applied while others are still being reduced. `optimizer`: some are applied, all are reduced. `save`: half of the
checkpoint behind the step is written. `finish`: in a step that is finished after another loss: what is averaged is
given, what is not is not averaged yet. `snapshot`: half of this rank's snapshot has left for the rank that keeps it;
`step` is the version that it is of."""
MICROBATCH_PHASES = ("forward", "backward", "replay")
RECOVERY_PHASES = ("replay", "copy", "finish")
"""Those that come in a recovery: another rank must fail first."""
SNAPSHOT = "snapshot"
"""The strategy under which a state is copied without a replica."""
STATES = ("running", "fencing", "planning", "recovering")

_NUMBER = re.compile(r"[0-9]{1,9}\Z")
_STREAM = re.compile(r"s[0-9]{1,4}(c[0-9]{1,4})?\.[FB]\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFault:
    """SIGKILL of a rank by itself at (step, microbatch, phase)."""

    rank: int
    phase: str = "backward"
    step: int | None = None
    """None only in the phases of a recovery: the first replay, or the first copy, there is."""
    microbatch: int = 0

    def __str__(self) -> str:
        parts = [f"rank={self.rank}"]
        if self.step is not None:
            parts.append(f"step={self.step}")
        if self.phase in MICROBATCH_PHASES and (self.microbatch or self.phase != "replay"):
            parts.append(f"microbatch={self.microbatch}")
        return ",".join([*parts, f"phase={self.phase}"])


@dataclass(frozen=True, kw_only=True, slots=True)
class LogServerFault:
    """SIGKILL of the log server once some rank has begun this step; it is started again on the same port."""

    step: int

    def __str__(self) -> str:
        return f"service=logserver,step={self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLossFault:
    """SIGKILL of a log server that is not started again: at a step, together with the ranks that are killed in it;
    or, without a step, when the first replay begins."""

    server: int
    step: int | None = None

    def __str__(self) -> str:
        return f"log={self.server}," + ("phase=replay" if self.step is None else f"step={self.step}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorFault:
    """The coordinator kills itself when it has made this state durable; it is started again."""

    state: str

    def __str__(self) -> str:
        return f"service=coordinator,state={self.state}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptFault:
    """One bit flipped in a stream that the replay of the rank killed at this step will read."""

    step: int
    stream: str = ""
    """Empty: the first stream that the victim's replay reads."""

    def __str__(self) -> str:
        return f"corrupt=log,step={self.step}" + (f",stream={self.stream}" if self.stream else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptCopyFault:
    """One bit flipped in the first state that this rank receives from a replica, as it arrives."""

    rank: int

    def __str__(self) -> str:
        return f"corrupt=copy,rank={self.rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CorruptCheckpointFault:
    """One bit flipped in this rank's newest checkpoint, before the rank killed at this step dies."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"corrupt=checkpoint,rank={self.rank},step={self.step}"


Fault = (
    RankFault
    | LogServerFault
    | LogLossFault
    | CoordinatorFault
    | CorruptFault
    | CorruptCheckpointFault
    | CorruptCopyFault
)


BEFORE_A_LOSS = CorruptFault | CorruptCheckpointFault | LogLossFault
"""What the drill does to a log or a checkpoint before the victims of that step die."""


def parse(spec: str) -> Fault:
    """One ``--kill``. Raises `UsageError`."""
    fields: dict[str, str] = {}
    for part in spec.split(","):
        key, equals, value = part.strip().partition("=")
        key, value = key.strip().lower(), value.strip()
        if not equals or not key or not value:
            raise UsageError(f"--kill {spec!r}: {part!r} is not key=value (such as rank=2,step=17)")
        if key in fields:
            raise UsageError(f"--kill {spec!r}: {key} is given twice")
        fields[key] = value
    if "corrupt" in fields:
        return _corrupt_fault(spec, fields)
    if "rank" in fields:
        return _rank_fault(spec, fields)
    if "log" in fields:
        return _log_loss(spec, fields)
    if "service" in fields:
        return _service_fault(spec, fields)
    raise UsageError(
        f"--kill {spec!r} names no victim: rank=N, log=N, service=logserver, service=coordinator, corrupt=log, "
        "corrupt=checkpoint or corrupt=copy"
    )


def _rank_fault(spec: str, fields: dict[str, str]) -> RankFault:
    _only(spec, fields, "rank", "step", "microbatch", "phase")
    phase = fields.get("phase", "backward").lower()
    if phase not in PHASES:
        raise UsageError(f"--kill {spec!r}: unknown phase {phase!r}: one of {', '.join(PHASES)}")
    if "step" not in fields and phase not in RECOVERY_PHASES:
        raise UsageError(f"--kill {spec!r}: step is missing (only phase=replay and phase=copy need none)")
    if "step" in fields and phase == "copy":
        raise UsageError(
            f"--kill {spec!r}: phase=copy takes no step: it is the first copy that the rank is in"
        )
    microbatch = _number(spec, fields, "microbatch") if "microbatch" in fields else 0
    return RankFault(
        rank=_number(spec, fields, "rank"),
        step=_number(spec, fields, "step") if "step" in fields else None,
        # The other phases come once a step: a microbatch given there has no meaning, and does no harm.
        microbatch=microbatch if phase in MICROBATCH_PHASES else 0,
        phase=phase,
    )


def _log_loss(spec: str, fields: dict[str, str]) -> LogLossFault:
    _only(spec, fields, "log", "step", "phase")
    phase = fields.get("phase", "").lower()
    if ("step" in fields) == bool(phase) or phase not in ("", "replay"):
        raise UsageError(f"--kill {spec!r}: give a step, or phase=replay")
    step = None if phase else _number(spec, fields, "step")
    return LogLossFault(server=_number(spec, fields, "log"), step=step)


def _service_fault(spec: str, fields: dict[str, str]) -> Fault:
    service = fields["service"].lower()
    if service == "logserver":
        _only(spec, fields, "service", "step")
        return LogServerFault(step=_number(spec, fields, "step"))
    if service == "coordinator":
        _only(spec, fields, "service", "state")
        state = fields.get("state", "").lower()
        if state not in STATES:
            raise UsageError(f"--kill {spec!r}: state must be one of {', '.join(STATES)}")
        return CoordinatorFault(state=state)
    raise UsageError(f"--kill {spec!r}: unknown service {service!r}: logserver or coordinator")


def _corrupt_fault(
    spec: str, fields: dict[str, str]
) -> CorruptFault | CorruptCheckpointFault | CorruptCopyFault:
    if fields["corrupt"].lower() == "checkpoint":
        _only(spec, fields, "corrupt", "rank", "step")
        return CorruptCheckpointFault(rank=_number(spec, fields, "rank"), step=_number(spec, fields, "step"))
    if fields["corrupt"].lower() == "copy":
        _only(spec, fields, "corrupt", "rank")
        return CorruptCopyFault(rank=_number(spec, fields, "rank"))
    if fields["corrupt"].lower() != "log":
        raise UsageError(f"--kill {spec!r}: corrupt must be log, checkpoint or copy")
    _only(spec, fields, "corrupt", "step", "stream")
    stream = fields.get("stream", "")
    stream = stream[:-1].lower() + stream[-1:].upper()
    if stream and not _STREAM.match(stream):
        raise UsageError(
            f"--kill {spec!r}: a stream is s<stage>.F or s<stage>.B (such as s1.F; s1c0.F with replicas)"
        )
    return CorruptFault(step=_number(spec, fields, "step"), stream=stream)


def _only(spec: str, fields: dict[str, str], *allowed: str) -> None:
    for key in fields:
        if key not in allowed:
            raise UsageError(f"--kill {spec!r}: unknown key {key!r}: allowed here are {', '.join(allowed)}")


def _number(spec: str, fields: dict[str, str], key: str) -> int:
    value = fields.get(key)
    if value is None:
        raise UsageError(f"--kill {spec!r}: {key} is missing")
    if not _NUMBER.match(value):
        raise UsageError(f"--kill {spec!r}: {key} must be a number, not {value!r}")
    return int(value)


def check(
    faults: Sequence[Fault],
    topology: Topology,
    *,
    strategy: str = "auto",
    updates: str = "after_backward",
    log_servers: int = 1,
    groups: RecoveryGroups = RecoveryGroups(),  # noqa: B008  (frozen)
) -> None:
    """Refuses faults that this topology cannot have. Raises `UsageError`."""
    for fault in faults:
        match fault:
            case RankFault():
                _check_rank_fault(fault, topology, updates, strategy)
                if fault.phase in RECOVERY_PHASES:
                    _check_recovery_fault(fault, faults, strategy, groups)
            case LogServerFault(step=step):
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


def phases_of(topology: Topology, updates: str, strategy: str = "auto") -> tuple[str, ...]:
    """The phases in which a rank can be killed here."""
    absent = {"reduce", "update", "copy", "finish"} if topology.replicas == 1 else set()
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
    """The rank fault under which the log, or a checkpoint, is corrupted."""
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
    """The stream named, or the first that the victim's replay reads."""
    victim = victim_of(fault, faults)
    assert victim is not None, "check() ran first"
    return fault.stream or topology.replay_streams(victim.rank, groups)[0]


def fault_id(index: int) -> str:
    """The name under which the fault of this index fires."""
    return f"fault{index}"


def held_together(faults: Sequence[Fault], *, each: bool = False) -> list[list[int]]:
    """Indices of rank faults that wait for the drill's word, those that get it at the same moment together: the
    victims of one step, if they are several, or if their log is corrupted or a log server lost before. `each`: in any
    case."""
    by_step: dict[int, list[int]] = {}
    for index, fault in enumerate(faults):
        if isinstance(fault, RankFault) and fault.step is not None and fault.phase not in RECOVERY_PHASES:
            by_step.setdefault(fault.step, []).append(index)
    beside = {fault.step for fault in faults if isinstance(fault, BEFORE_A_LOSS)}
    return [group for step, group in by_step.items() if each or len(group) > 1 or step in beside]


def all_get_there(group: Sequence[Fault], topology: Topology) -> bool:
    """Whether none of these victims of one step needs anything of another that stands where it dies.

    Those of different pipelines do not, as long as no gradients are reduced; nor do those that have all ended the
    step before. Of one pipeline a rank may wait for what its neighbour would send next; for these it is not worked out.
    """
    ranks = [fault.rank for fault in group if isinstance(fault, RankFault)]
    phases = {fault.phase for fault in group if isinstance(fault, RankFault)}
    apart = len({topology.dp_rank(rank) for rank in ranks}) == len(ranks)
    return phases == {"idle"} or (apart and phases <= {"forward", "backward", "idle"})
