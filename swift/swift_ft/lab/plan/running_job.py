"""Builds the profile of a running job from its ranks' measurements."""

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.plan.command import DEFAULT_MTBF_S, DEFAULT_RATE, Given
from swift_ft.lab.plan.profile import COPIES_MAX, RATE_MAX, Parallel, Profile
from swift_ft.planner import Assignment, RankMeasured
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.rpc.codec import from_message
from swift_ft.tools.status import PATIENCE_S, say


class MeasuredJob:
    """Implements `swift_ft.lab.plan.command.RunningJob` through the coordinator."""

    def __init__(self, coordinator: str, job: str) -> None:
        self._client = CoordinatorClient(coordinator, job, patience_s=PATIENCE_S, tell=say)

    def profile(self, given: Given) -> tuple[Profile, list[str]]:
        return profile_of(self._client.job, self._client.call(pb.MeasurementsRequest()), given)

    def close(self) -> None:
        self._client.close()


def profile_of(job: str, reply: pb.MeasurementsReply, given: Given) -> tuple[Profile, list[str]]:
    """Returns (profile, assumptions in it). Raises ServiceError if not all was measured yet, UsageError if the job
    cannot be planned."""
    dp_size = int(reply.config.get("replicas", "1")) * int(reply.config.get("shards", "1"))
    if dp_size > 1:
        raise UsageError(
            f"job {job} has {dp_size} data-parallel ranks to a stage: it recovers by copying, and needs no plan"
        )
    measured = {rank.rank: from_message(rank.measured) for rank in reply.ranks}
    missing = [rank for rank in Assignment.grid(reply.world_size).occupied if rank not in measured]
    if missing:
        names = ", ".join(map(str, missing))
        raise ServiceError(
            f"job {job}: {'rank' if len(missing) == 1 else 'ranks'} {names} measured no step yet; ask again later"
        )
    several = [rank for rank, measurement in measured.items() if len(measurement.stages) != 1]
    if several:
        count = len(measured[several[0]].stages)
        raise UsageError(
            f"job {job}: rank {several[0]} runs {count} stages; a plan is for one stage on each rank"
        )
    ranks = sorted(measured, key=lambda rank: measured[rank].stages[0].stage)
    stages = [measured[rank].stages[0].stage for rank in ranks]
    if stages != list(range(len(ranks))):
        raise ServiceError(
            f"job {job}: stages {stages} were measured, which are no pipeline; ask again later"
        )
    hosts = {rank.rank: rank.host for rank in reply.ranks}
    return _Made(
        job, reply, [measured[rank] for rank in ranks], [hosts[rank] for rank in ranks], given
    ).profile()


class _Made:
    """Builder of a profile from measurements. Ranks and hosts are in stage order."""

    def __init__(
        self,
        job: str,
        reply: pb.MeasurementsReply,
        ranks: Sequence[RankMeasured],
        hosts: Sequence[str],
        given: Given,
    ) -> None:
        self._job, self._reply, self._ranks, self._given = job, reply, ranks, given
        self._assumed: list[str] = []
        self._machines = self._machine_of_stage(hosts)

    def profile(self) -> tuple[Profile, list[str]]:
        ranks, given = self._ranks, self._given
        microbatches = {measurement.microbatches for measurement in ranks}
        if len(microbatches) > 1:
            raise ServiceError(
                f"job {self._job}: ranks count {', '.join(map(str, sorted(microbatches)))} microbatches a step"
            )
        stages = [measurement.stages[0] for measurement in ranks]
        forward, backward = self._boundaries()
        sizes, rate = self._checkpoints()
        profile = Profile(
            name=self._job,
            source="",
            microbatches=microbatches.pop(),
            forward_s=tuple(stage.forward_s for stage in stages),
            backward_s=tuple(stage.backward_s for stage in stages),
            update_s=tuple(measurement.update_s for measurement in ranks),
            step_s=median(measurement.step_s for measurement in ranks),
            forward_bytes=forward,
            backward_bytes=backward,
            other_bytes=sum(measurement.other_bytes for measurement in ranks),
            machine_of_stage=self._machines,
            log_write_bytes_per_s=self._write_rate(),
            log_read_bytes_per_s=self._read_rate(),
            network_bytes_per_s=given.network_bytes_per_s,
            checkpoint_interval_steps=int(self._reply.config.get("checkpoint_every", "0")),
            checkpoint_bytes=sizes,
            checkpoint_bytes_per_s=rate,
            checkpoint_stall_s=max(measurement.checkpoint_stall_s or 0.0 for measurement in ranks),
            machine_mtbf_s=(self._mtbf_s(),) * (self._machines[-1] + 1),
            fixed_s=self._fixed_s(),
            parallel=self._parallel(),
        )
        return profile, self._assumed

    def _machine_of_stage(self, hosts: Sequence[str]) -> tuple[int, ...]:
        if self._given.machine_per_rank or not all(hosts):
            return tuple(range(len(hosts)))
        runs = [(host, len(list(run))) for host, run in groupby(hosts)]
        twice = next((host for i, (host, _) in enumerate(runs) if host in [h for h, _ in runs[:i]]), None)
        if twice is not None:
            raise UsageError(
                f"job {self._job}: the stages on machine {twice} are no neighbours; give --machine-per-rank to plan "
                "as if each rank had its own"
            )
        if len(runs) == 1 and len(hosts) > 1:
            self._assumed.append(f"all ranks are on {hosts[0]}, one machine (else --machine-per-rank)")
        return tuple(machine for machine, (_, count) in enumerate(runs) for _ in range(count))

    def _boundaries(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the bytes of a step over each boundary, forward and backward."""
        last = len(self._ranks) - 1
        forward, backward = [0] * last, [0] * last
        for source, measurement in enumerate(self._ranks):
            for sent in measurement.stages[0].sent:
                to = sent.destination
                if abs(to - source) > 1:
                    self._assumed.append(
                        f"what stage {source} sends to stage {to} counts at every boundary in between"
                    )
                way = forward if to > source else backward
                for boundary in range(max(min(source, to), 0), min(max(source, to), last)):
                    way[boundary] += sent.bytes
        return tuple(forward), tuple(backward)

    def _checkpoints(self) -> tuple[tuple[int, ...], float]:
        """Returns the bytes of each stage, and the bytes per second of a machine, whose ranks save in parallel."""
        sizes: list[int] = []
        of_machine: dict[int, list[tuple[int, float]]] = {}
        for stage, measurement in enumerate(self._ranks):
            if measurement.checkpoint_bytes is None or measurement.checkpoint_s is None:
                raise ServiceError(
                    f"job {self._job}: stage {stage} has saved no checkpoint yet; ask again later"
                )
            sizes.append(measurement.checkpoint_bytes)
            of_machine.setdefault(self._machines[stage], []).append(
                (measurement.checkpoint_bytes, measurement.checkpoint_s)
            )
        rates = [
            sum(size for size, _ in saved) / max(*(seconds for _, seconds in saved), 1e-6)
            for saved in of_machine.values()
        ]
        return tuple(sizes), max(median(rates), 1.0)

    def _write_rate(self) -> float:
        """Returns a machine's write rate. The measured rate is the log's limit only on machines where training
        waited for it."""
        if self._given.log_write_bytes_per_s is not None:
            return self._given.log_write_bytes_per_s
        of_machine: dict[int, float] = {}
        for machine, measurement in zip(self._machines, self._ranks, strict=True):
            of_machine[machine] = of_machine.get(machine, 0.0) + (measurement.log_write_bytes_per_s or 0.0)
        if any(measurement.log_full for measurement in self._ranks):
            full = [
                m for m, measurement in zip(self._machines, self._ranks, strict=True) if measurement.log_full
            ]
            return max(min(of_machine[machine] for machine in full), 1.0)
        most = max(of_machine.values())
        why = f"it took {most:.3g}, and nobody waited for it" if most else "nothing was logged"
        return self._default("log.write_bytes_per_s", max(DEFAULT_RATE, most), "--log-write-rate", why)

    def _read_rate(self) -> float:
        """Returns the read rate of all last replays: bytes over the seconds that the replays waited for them."""
        if self._given.log_read_bytes_per_s is not None:
            return self._given.log_read_bytes_per_s
        size = sum(measurement.log_read_bytes or 0 for measurement in self._ranks)
        if size:
            waited_s = sum(measurement.log_read_wait_s or 0.0 for measurement in self._ranks)
            return max(size / waited_s, 1.0) if waited_s > size / RATE_MAX else RATE_MAX
        return self._default("log.read_bytes_per_s", DEFAULT_RATE, "--log-read-rate", "nothing was replayed")

    def _mtbf_s(self) -> float:
        if self._given.machine_mtbf_s is not None:
            return self._given.machine_mtbf_s
        return self._default("failures.machine_mtbf_s", DEFAULT_MTBF_S, "--machine-mtbf", "")

    def _fixed_s(self) -> float:
        if self._given.fixed_s is not None:
            return self._given.fixed_s
        return self._default("fixed_s", 0.0, "--fixed", "")

    def _parallel(self) -> Parallel | None:
        copies = min(1 + int(self._reply.config.get("helpers", "0")), COPIES_MAX)
        if copies == 1:
            return None
        if self._given.network_bytes_per_s is None:
            self._assumed.append("nobody helps a replay (else --network-rate)")
            return None
        return Parallel(
            copies_max=copies,
            gradient_bytes=tuple(measurement.stages[0].gradient_bytes for measurement in self._ranks),
        )

    def _default(self, field: str, value: float, flag: str, why: str) -> float:
        self._assumed.append(f"{field} {value:.4g} ({flag}{f'; {why}' if why else ''})")
        return value
