"""Builds the profile of a running job from its ranks' measurements."""

from argparse import Namespace
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.plan.profile import COPIES_MAX, RATE_MAX, Profile
from swift_ft.planner import Assignment
from swift_ft.text import tell
from swift_ft.tools.status import PATIENCE_S

DEFAULT_RATE = 1e9
"""Assumed bytes per second of a log whose rate was not measured."""
DEFAULT_MTBF_S = 30 * 86400.0


def ask(coordinator: str, job: str) -> pb.MeasurementsReply:
    """Returns what the job's ranks have measured. Raises ServiceError if the coordinator does not answer."""
    client = CoordinatorClient(coordinator, job, patience_s=PATIENCE_S, tell=tell)
    try:
        reply: pb.MeasurementsReply = client.call(pb.MeasurementsRequest())
        return reply
    finally:
        client.close()


def profile_of(job: str, reply: pb.MeasurementsReply, given: Namespace) -> tuple[Profile, list[str]]:
    """Returns (profile, assumptions in it). `given`: the command line, whose values take precedence. Raises
    ServiceError if not all was measured yet, UsageError if the job cannot be planned."""
    ranks, hosts = _in_order(job, reply)
    microbatches = {rank.microbatches for rank in ranks}
    if len(microbatches) > 1:
        counts = ", ".join(map(str, sorted(microbatches)))
        raise ServiceError(f"job {job}: ranks count {counts} microbatches a step")
    for stage, rank in enumerate(ranks):
        if not rank.HasField("checkpoint_s"):
            raise ServiceError(f"job {job}: stage {stage} has saved no checkpoint yet; ask again later")
    assumed: list[str] = []
    machines = _machines(job, hosts, given, assumed)
    stages = [rank.stages[0] for rank in ranks]
    forward, backward = _boundaries(ranks, assumed)

    def default(value: float | None, field: str, otherwise: float, flag: str, why: str = "") -> float:
        """Returns the value; without one `otherwise`, which it notes as an assumption."""
        if value is None:
            assumed.append(f"{field} {otherwise:.4g} ({flag}{f'; {why}' if why else ''})")
        return otherwise if value is None else value

    written, most = _written(ranks, machines)
    nobody = f"it took {most:.3g}, and nobody waited for it" if most else "nothing was logged"
    write, read = given.log_write_rate, given.log_read_rate
    write = written if write is None else write
    read = _read_rate(ranks) if read is None else read
    copies = min(1 + int(reply.config.get("helpers", "0")), COPIES_MAX)
    if copies > 1 and given.network_rate is None:
        assumed.append("nobody helps a replay (else --network-rate)")
    made = Profile(
        name=job,
        source="",
        microbatches=microbatches.pop(),
        forward_s=tuple(stage.forward_s for stage in stages),
        backward_s=tuple(stage.backward_s for stage in stages),
        update_s=tuple(rank.update_s for rank in ranks),
        step_s=median(rank.step_s for rank in ranks),
        forward_bytes=forward,
        backward_bytes=backward,
        other_bytes=sum(rank.other_bytes for rank in ranks),
        machine_of_stage=machines,
        log_write_bytes_per_s=default(
            write, "log.write_bytes_per_s", max(DEFAULT_RATE, most), "--log-write-rate", nobody
        ),
        log_read_bytes_per_s=default(
            read, "log.read_bytes_per_s", DEFAULT_RATE, "--log-read-rate", "nothing was replayed"
        ),
        network_bytes_per_s=given.network_rate,
        checkpoint_interval_steps=int(reply.config.get("checkpoint_every", "0")),
        checkpoint_bytes=tuple(rank.checkpoint_bytes for rank in ranks),
        checkpoint_bytes_per_s=_checkpoint_rate(ranks, machines),
        checkpoint_stall_s=max(rank.checkpoint_stall_s for rank in ranks),
        machine_mtbf_s=(
            default(given.machine_mtbf, "failures.machine_mtbf_s", DEFAULT_MTBF_S, "--machine-mtbf"),
        )
        * (machines[-1] + 1),
        fixed_s=default(given.fixed, "fixed_s", 0.0, "--fixed"),
        copies_max=1 if given.network_rate is None else copies,
        gradient_bytes=tuple(rank.stages[0].gradient_bytes for rank in ranks),
    )
    return made, assumed


def _in_order(job: str, reply: pb.MeasurementsReply) -> tuple[list[pb.RankMeasured], list[str]]:
    """Returns what the ranks have measured, and their hosts, in the order of their stages."""
    dp_size = int(reply.config.get("replicas", "1")) * int(reply.config.get("shards", "1"))
    if dp_size > 1:
        raise UsageError(
            f"job {job} has {dp_size} data-parallel ranks to a stage: it recovers by copying, and needs no plan"
        )
    measured = {rank.rank: rank.measured for rank in reply.ranks}
    missing = [rank for rank in Assignment.grid(reply.world_size).occupied if rank not in measured]
    if missing:
        names = ", ".join(map(str, missing))
        raise ServiceError(
            f"job {job}: {'rank' if len(missing) == 1 else 'ranks'} {names} measured no step yet; ask again later"
        )
    for rank, measurement in measured.items():
        if len(measurement.stages) != 1:
            raise UsageError(
                f"job {job}: rank {rank} runs {len(measurement.stages)} stages; a plan is for one stage on each rank"
            )
    order = sorted(measured, key=lambda rank: measured[rank].stages[0].stage)
    stages = [measured[rank].stages[0].stage for rank in order]
    if stages != list(range(len(order))):
        raise ServiceError(
            f"job {job}: stages {stages} were measured, which are no pipeline; ask again later"
        )
    hosts = {rank.rank: rank.host for rank in reply.ranks}
    return [measured[rank] for rank in order], [hosts[rank] for rank in order]


def _machines(job: str, hosts: Sequence[str], given: Namespace, assumed: list[str]) -> tuple[int, ...]:
    if given.machine_per_rank or not all(hosts):
        return tuple(range(len(hosts)))
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    names = [host for host, _ in runs]
    twice = next((host for host in names if names.count(host) > 1), None)
    if twice is not None:
        raise UsageError(
            f"job {job}: the stages on machine {twice} are no neighbours; give --machine-per-rank to plan as if each "
            "rank had its own"
        )
    if len(runs) == 1 and len(hosts) > 1:
        assumed.append(f"all ranks are on {hosts[0]}, one machine (else --machine-per-rank)")
    return tuple(machine for machine, (_, count) in enumerate(runs) for _ in range(count))


def _boundaries(
    ranks: Sequence[pb.RankMeasured], assumed: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    last = len(ranks) - 1
    forward, backward = [0] * last, [0] * last
    for source, rank in enumerate(ranks):
        for sent in rank.stages[0].sent:
            to = sent.destination
            if abs(to - source) > 1:
                assumed.append(f"what stage {source} sends to stage {to} counts at every boundary in between")
            way = forward if to > source else backward
            for boundary in range(max(min(source, to), 0), min(max(source, to), last)):
                way[boundary] += sent.bytes
    return tuple(forward), tuple(backward)


def _checkpoint_rate(ranks: Sequence[pb.RankMeasured], machines: Sequence[int]) -> float:
    """Returns the bytes per second of a machine, whose ranks save in parallel."""
    sizes, seconds = dict.fromkeys(machines, 0), dict.fromkeys(machines, 1e-6)
    for machine, rank in zip(machines, ranks, strict=True):
        sizes[machine] += rank.checkpoint_bytes
        seconds[machine] = max(seconds[machine], rank.checkpoint_s)
    return max(median(sizes[machine] / seconds[machine] for machine in sizes), 1.0)


def _written(ranks: Sequence[pb.RankMeasured], machines: Sequence[int]) -> tuple[float | None, float]:
    """Returns a machine's write rate, None if no training waited for the log, whose limit is not known then; and the
    highest rate of a machine."""
    rates = dict.fromkeys(machines, 0.0)
    for machine, rank in zip(machines, ranks, strict=True):
        rates[machine] += rank.log_write_bytes_per_s
    full = [rates[machine] for machine, rank in zip(machines, ranks, strict=True) if rank.log_full]
    return (max(min(full), 1.0) if full else None), max(rates.values())


def _read_rate(ranks: Sequence[pb.RankMeasured]) -> float | None:
    """Returns the read rate of all last replays: bytes over the seconds that the replays waited for them. None if
    nothing was replayed."""
    size = sum(rank.log_read_bytes for rank in ranks)
    waited_s = sum(rank.log_read_wait_s for rank in ranks)
    if not size:
        return None
    return max(size / waited_s, 1.0) if waited_s > size / RATE_MAX else RATE_MAX
