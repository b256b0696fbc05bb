"""Validation of members' commands against the row. Functions raise Refusal and never change the row."""

import math

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Fenced, Invalid, Mismatch, Taken
from swift_ft_services.coordinator.job_record import JobRow, State, count_of, replicas_of
from swift_ft_services.coordinator.planning import config_of
from swift_ft_services.coordinator.restarts import comes_back, ended_words, value_words

NUM_STAGES_MAX = 1 << 16
"""A job has far fewer; tables of all stages are made of what a rank says."""


def check_holder(row: JobRow, sender: m.FromMember) -> None:
    """Raises Refusal unless the sender is the live holder of its rank; only that process may speak for the rank."""
    holder = row.holders.get(sender.rank)
    if holder is None or holder.incarnation != sender.incarnation:
        raise Fenced(
            f"this process does not hold rank {sender.rank} of job {row.job} "
            f"in generation {row.generation}: it is fenced and must stop"
        )


def is_stale(row: JobRow, said: m.OfGeneration) -> bool:
    """Returns True if the message is to be ignored: it is from an older generation, or from a spare. Raises Refusal as
    `check_holder`, and for a future generation."""
    check_holder(row, said)
    if said.generation > row.generation:
        raise Invalid(f"generation {said.generation} is not there yet: it is {row.generation}")
    return said.generation < row.generation or said.rank in row.vacant


def check_rank(row: JobRow, rank: int) -> None:
    if not 0 <= rank < row.world_size:
        raise Invalid(f"rank {rank} is not one of 0 to {row.world_size - 1}")


def check_join(row: JobRow, join: pb.JoinRequest) -> None:
    """Raises Refusal unless this process may take its rank: the job is active and has the same configuration, and the
    rank is free."""
    member = join.member
    if row.state.is_over and not (comes_back(row, join) or _has_joined(row, join)):
        ended = ended_words(row).replace("had ", "has ", 1)
        raise Mismatch(f"job {row.job} {ended}: start it again with swift-ft run")
    if join.world_size != row.world_size:
        raise Mismatch(
            f"rank {member.rank} says world size {join.world_size}, job {row.job} has {row.world_size}"
        )
    check_rank(row, member.rank)
    for what, mine, theirs in (
        ("configuration", row.config, join.config),
        ("fingerprint", row.fingerprint, join.fingerprint),
    ):
        for key in sorted({*mine, *theirs}):
            if mine.get(key) != theirs.get(key):
                raise Mismatch(
                    f"{what} of rank {member.rank} differs: {key} is {value_words(theirs, key)} there and "
                    f"{value_words(mine, key)} in job {row.job}: make them equal"
                )
    if any(holder.incarnation == member.incarnation for holder in row.fenced.values()):
        raise Fenced(f"this process held rank {member.rank} before and was fenced")
    if any(
        holder.incarnation == member.incarnation
        for rank, holder in row.holders.items()
        if rank != member.rank
    ):
        raise Invalid(f"this process holds another rank than {member.rank} already")
    holder = row.holders.get(member.rank)
    if holder is not None and holder.incarnation != member.incarnation:
        raise Taken(
            f"rank {member.rank} of job {row.job} has a live holder: process {holder.pid} on {holder.host}"
        )


def _has_joined(row: JobRow, join: pb.JoinRequest) -> bool:
    """Returns whether this process already holds its rank of a finished job; it may have to repeat its Join."""
    holder = row.holders.get(join.member.rank)
    return (
        row.state is State.FINISHED and holder is not None and holder.incarnation == join.member.incarnation
    )


def check_first(join: pb.JoinRequest) -> None:
    """Validates the first Join of a job or of a restart. Raises Refusal if world size or configuration is invalid.

    A Join that passes becomes durable, so nothing may fail because of it later.
    """
    if join.world_size < 1:
        raise Invalid(f"world size {join.world_size}: a job has at least one rank")
    try:
        config_of(join.config)
        counts = {"replicas": replicas_of(join.config)}
        counts |= {name: count_of(join.config, name, 1) for name in ("shards", "tensor_parallel")}
    except ValueError as error:
        raise Invalid(str(error)) from None
    for name, count in (*counts.items(), (" times ".join(counts), math.prod(counts.values()))):
        if count < 1 or join.world_size % count:
            raise Invalid(f"{name} {count}: a world of {join.world_size} ranks cannot be divided so")


def check_change(row: JobRow, change: pb.ChangeLogServersRequest) -> None:
    """Validates an operator's change of log servers; a repeated change is accepted. Raises Refusal if the change is
    impossible now, or if `lost` is not a log server of the job."""
    if row.state is State.FORMING or row.state.is_over:
        raise Invalid(f"job {row.job} is {row.state}: its log servers cannot be changed now")
    known = {server.address: server for server in row.log_servers}
    if change.lost and change.lost not in known:
        raise Invalid(f"{change.lost} is none of the log servers: {', '.join(known)}")
    if change.lost == change.add:
        raise Invalid("name a log server that is lost, one that has come, or one of each")


def check_ready(row: JobRow, ready: pb.ReadyRequest) -> None:
    if row.state not in (State.FORMING, State.RECOVERING):
        raise Invalid(f"ready in state {row.state}: wait for RECOVERING")
    if row.plan is not None and ready.version != row.plan.target_version:
        raise Invalid(
            f"rank {ready.rank} is ready at version {ready.version}, the plan says {row.plan.target_version}"
        )
    check_stages(row, ready)


def check_stages(row: JobRow, ready: pb.ReadyRequest) -> None:
    rank = ready.rank
    stages = sorted(ready.stages)
    if ready.num_stages > NUM_STAGES_MAX:
        raise Invalid(f"rank {rank} says there are {ready.num_stages} stages: at most {NUM_STAGES_MAX}")
    if any(not 0 <= stage < ready.num_stages for stage in stages):
        named = ", ".join(map(str, stages))
        raise Invalid(f"rank {rank} runs stages {named} of {ready.num_stages}")
    if ready.shard < 0:
        raise Invalid(f"rank {rank} holds shard {ready.shard}: shards are numbered from 0")
    others = [other for other in row.ready if other != rank]
    if row.state is State.FORMING and others and row.num_stages != ready.num_stages:
        raise Invalid(
            f"rank {rank} says there are {ready.num_stages} stages, rank {others[0]} says {row.num_stages}"
        )
    if row.state is State.RECOVERING and stages and stages != row.stages[rank]:
        raise Invalid(f"rank {rank} runs stages {stages}, its predecessor ran {row.stages[rank]}")
    if row.state is State.RECOVERING and stages and ready.shard != row.stage_shards[rank]:
        raise Invalid(f"rank {rank} holds shard {ready.shard}, its predecessor held {row.stage_shards[rank]}")
