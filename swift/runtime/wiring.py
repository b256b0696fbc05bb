"""The parts of a session, made in the order in which they need each other.

Two parts may need each other: the updates call the vote, and the engine, which holds it, is made of the state that has
the updates. Then one has a `Hook` (`swift.runtime.hook`), or asks when it is called: a generation's store and its
assignment are there only once there is a generation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swift.checkpoint.store import CheckpointStore
from swift.errors import UsageError
from swift.recovery import Assignment
from swift.recovery.groups import RecoveryGroups
from swift.recovery.strategies import may_copy
from swift.runtime import _torch
from swift.runtime.adoption import Adoption
from swift.runtime.audit import Audit
from swift.runtime.backends import default_backend
from swift.runtime.backends.base import Backend
from swift.runtime.channel import Channel
from swift.runtime.config import SessionConfig
from swift.runtime.crossing import Crossing
from swift.runtime.cut_step import CutStep, World
from swift.runtime.differences import Differences
from swift.runtime.engine import Engine
from swift.runtime.faults import FaultInjector
from swift.runtime.gate import Gate, groups_behind
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.lines import Lines
from swift.runtime.losses import Losses
from swift.runtime.member import Member
from swift.runtime.model_parts import ModelParts
from swift.runtime.own_log import OwnLog
from swift.runtime.process_groups import ProcessGroups
from swift.runtime.rank_store import CoordinatorStores
from swift.runtime.reducer import Reducer, Shares, is_ordered
from swift.runtime.rerouting import Rerouting
from swift.runtime.staggering import Staggering
from swift.runtime.state import TrainerState
from swift.runtime.ties import Ties
from swift.runtime.updates import Updates
from swift.runtime.warming import Warming
from swift.runtime.witness import Witness


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a session hands its calls to."""

    gate: Gate
    groups: dict[str, ReconfigurableGroup]
    """Those that the trainer communicates over, by name."""
    channel: Channel
    updates: Updates
    state: TrainerState
    adoption: Adoption
    crossing: Crossing
    losses: Losses
    lines: Lines
    model_parts: ModelParts
    engine: Engine
    warming: Warming

    @classmethod
    def wired(
        cls, rank: int, assignment: Assignment, member: Member, checkpoint_dir: str, config: SessionConfig
    ) -> Self:
        """`assignment`: of the full world. Raises UsageError if nothing can be written in `checkpoint_dir`."""
        logs: list[OwnLog] = []  # groups have the backend, and are not to hold the engine

        def assigned() -> Assignment:
            """Of this generation."""
            return engine.membership.assignment

        def shares() -> Shares | None:
            return adoption.shares()

        def world_now() -> World:
            return World.of(engine.membership.generation, assigned(), rank)

        backend, gate = default_backend(lambda: _service_ports(member, logs)), Gate()
        groups = groups_behind(gate, rank, assignment.process_groups(rank), backend)
        world = _own_world(groups["world"].ranks, rank, backend)
        faults = FaultInjector(rank)
        store = _checked_store(checkpoint_dir, rank, member, _twins(assignment, config, rank), faults)
        all_groups = (*groups.values(), world)
        stores = CoordinatorStores(member.client)
        communicator = ProcessGroups(backend, rank, all_groups, default=groups["world"], stores=stores)
        channel = _channel_of(rank, assignment, config, backend, faults, communicator, member)
        losses, differences = Losses(rank, config.non_finite_loss, channel), Differences(member.client)
        witness = Witness(differences.say, lambda: communicator.broken is not None, losses.look)
        channel.watch(witness)
        reducer = _reducer_of(assignment, config, groups["data"], lambda: world_now().divisor, shares)
        cut_step = CutStep(config.finishes_cut_steps, rank, reducer, world_now)
        updates = _updates_of(config, reducer, faults, channel, groups, cut_step, member, communicator)
        state = TrainerState(channel.randomness, updates, groups.get("replicate"))
        state.iterators.install()
        adoption = _adopts(config)(
            config, rank, channel, state, assigned, groups, world, witness, differences
        )
        staggering = Staggering(config.staggered, rank, member, state, world, assigned, channel)
        lines = Lines(Path(checkpoint_dir, "metrics", f"rank{rank}.jsonl"))
        engine = Engine(
            rank,
            config,
            member,
            communicator,
            channel,
            state,
            store,
            faults,
            world,
            assignment,
            witness=witness,
            differences=differences,
            adoption=adoption,
            audit=_audit_of(assignment, config, groups, state),
            lines=lines,
            staggering=staggering,
        )
        logs.append(engine.log)
        cut_step.held_over.bind(engine.held_over)
        gate.bind(channel, updates, adoption)
        _torch.before_pickling(gate.pickles)
        parts = ModelParts(rank, assignment, backend, gate, groups, channel, updates, state, adoption)
        return cls(
            gate=gate,
            groups=groups,
            channel=channel,
            updates=updates,
            state=state,
            adoption=adoption,
            crossing=Crossing(channel, updates, groups, staggering, state.objects),
            losses=losses,
            lines=lines,
            model_parts=parts,
            engine=engine,
            warming=Warming(rank, member.client, communicator, channel, state, store, witness),
        )


def _adopts(config: SessionConfig) -> type[Adoption]:
    return Rerouting if config.reroutes else Adoption


def _service_ports(member: Member, logs: Sequence[OwnLog]) -> list[int]:
    addresses = [member.client.address, *(address for log in logs for address in log.servers_of_job)]
    return [int(address.rpartition(":")[2]) for address in addresses]


def _updates_of(
    config: SessionConfig,
    reducer: Reducer | None,
    faults: FaultInjector,
    channel: Channel,
    groups: Mapping[str, ReconfigurableGroup],
    cut_step: CutStep,
    member: Member,
    communicator: ProcessGroups,
) -> Updates:
    return Updates(
        config,
        reducer,
        faults,
        ties=Ties(channel, groups["pipeline"]),
        cut_step=cut_step,
        channel=channel,
        check=member.check,
        groups_whole=communicator.check_whole,
    )


def _own_world(ranks: Sequence[int], rank: int, backend: Backend) -> ReconfigurableGroup:
    """All ranks, for what the session itself says: votes, copies. Nobody asks the gate about it."""
    return ReconfigurableGroup("all", ranks, rank, backend, step=None, gate=None)


def _channel_of(
    rank: int,
    assignment: Assignment,
    config: SessionConfig,
    backend: Backend,
    faults: FaultInjector,
    communicator: ProcessGroups,
    member: Member,
) -> Channel:
    channel = Channel(
        rank,
        assignment,
        config.seed,
        backend.device,
        faults,
        lambda: communicator.store,
        member.check,
        communicator.check_whole,
        RecoveryGroups.parse(config.groups),
    )
    channel.finishes_cut_steps = config.finishes_cut_steps
    return channel


def _reducer_of(
    assignment: Assignment,
    config: SessionConfig,
    data: ReconfigurableGroup,
    contributions: Callable[[], int],
    shares: Callable[[], Shares | None],
) -> Reducer | None:
    """None: no other rank has gradients of this stage."""
    if assignment.dp_size == 1:
        return None
    ordered = is_ordered(config.reduction, assignment.dp_size)
    return Reducer(data, contributions, ordered=ordered, shares=shares)


def _audit_of(
    assignment: Assignment,
    config: SessionConfig,
    groups: Mapping[str, ReconfigurableGroup],
    state: TrainerState,
) -> Audit | None:
    """None: there are no replicas, or nothing is copied from them."""
    if assignment.replicas == 1 or not may_copy(config.strategy):
        return None
    return Audit(groups.get("replicate", groups["data"]), state)


def _twins(assignment: Assignment, config: SessionConfig, rank: int) -> Sequence[int]:
    """Ranks from whose checkpoints this one may begin."""
    return assignment.peers(rank) if config.shrinks else ()


def _checked_store(
    checkpoint_dir: str, rank: int, member: Member, twins: Sequence[int], faults: FaultInjector
) -> CheckpointStore:
    """Raises UsageError if nothing can be written there; but who replaces a lost rank can go on without."""
    store = CheckpointStore(
        checkpoint_dir, rank, member, twins, lambda version: faults.at("save", version - 1)
    )
    try:
        store.check()
    except UsageError:
        if not member.replaces_another():
            raise
    return store
