"""The drill's mesh of ranks, its placement of stages, and the limits that schedules set.

Ranks are a mesh (pipeline rank, replica, shard, tensor rank), numbered as torch's device mesh numbers it. Ranks that
differ in the replica alone hold the same state. A rank's *place* is its number among those of its stages.

1F1B and GPipe have one stage on each of P pipeline ranks. Looped schedules put stages k and k + P on pipeline rank k. V
schedules fold the stages: pipeline rank k has k and 2P - 1 - k, and the last one holds two neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from swift_ft.errors import UsageError
from swift_ft.lab.drill import options
from swift_ft.lab.drill.options import of_both
from swift_ft.log import record
from swift_ft.planner.groups import RecoveryGroups

# Sizes of the drill's models. No torch.

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the transformer and its batches."""

    layers: int
    width: int
    heads: int
    sequence: int
    microbatch: int
    """Sequences in one microbatch."""
    bucket_bytes: int
    """Size of a bucket of gradients, reduced and applied together: small enough that every stage has several."""
    dropout: float = 0.1
    forward_s: float = 0.0
    """Seconds that a stage sleeps in each microbatch's forward, like a device that computes without using the CPU."""
    backward_s: float = 0.0


_TINY = ModelConfig(layers=8, width=32, heads=2, sequence=16, microbatch=2, bucket_bytes=16 << 10)
MODELS = {
    "tiny": _TINY,
    "default": ModelConfig(layers=8, width=128, heads=4, sequence=64, microbatch=4, bucket_bytes=256 << 10),
    # Every stage takes a fixed time, so schedules and replays take the time that their formulas predict, although all
    # ranks share two cores.
    "paced": replace(_TINY, forward_s=0.01, backward_s=0.02),
}


# name -> (stages on each rank, placed as a V)
SCHEDULES = {
    "1f1b": (1, False),
    "gpipe": (1, False),
    "interleaved1f1b": (2, False),
    "interleavedzerobubble": (2, False),
    "zbv": (2, True),
    "dualpipev": (2, True),
}


RANKS_MAX = 256
"""Maximum ranks of a drill: all of them are processes of this machine."""

SPLITTING = ("interleavedzerobubble", "zbv")
"""Schedules that compute weight gradients separately from input gradients. (DualPipeV does so for some
microbatches.)"""


_COUNT = (1, 10**9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The shape of one drill. Construction validates it (`UsageError`) before anything is started."""

    pipeline_ranks: int = of_both(4, "ranks in a pipeline", "P", flag="--stages", bounds=_COUNT)
    replicas: int = of_both(1, "replicas of every stage", "D", bounds=_COUNT)
    """Number of parallel pipelines; each has its own batches."""
    shards: int = of_both(1, "ranks that share one replica of a stage (FSDP2)", "S", bounds=_COUNT)
    tensor_parallel: int = of_both(1, "ranks that compute a stage's layers together", "T", bounds=_COUNT)
    steps: int = of_both(30, "optimizer steps", "N", bounds=_COUNT)
    microbatches: int = of_both(8, "microbatches per step and replica", "M", bounds=_COUNT)
    schedule: str = of_both("1f1b", known=tuple(SCHEDULES))
    checkpoint_every: int = of_both(10, "steps between checkpoints", "K", bounds=_COUNT)

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise UsageError(problem)

    def _problems(self) -> Iterator[str]:
        yield from options.problems(options.values_of(self, Topology), options.options_of(Topology))
        ranks, schedule, microbatches = self.pipeline_ranks, self.schedule, self.microbatches
        if self.ranks > RANKS_MAX:
            yield (
                f"--stages, --replicas, --shards and --tensor-parallel make {self.ranks} ranks: "
                f"a drill runs all of them on this machine, and takes at most {RANKS_MAX}"
            )
        if self.ranks == 1:
            yield "--stages must be at least 2, or 1 with --replicas 2 or more"
        if ranks == 1 and self.stages_per_rank > 1:
            yield f"--schedule {schedule} needs --stages 2 or more; with 1, use 1f1b or gpipe"
        needed = {"1f1b": ranks, "dualpipev": 2 * ranks}.get(schedule, 1)
        rounds = max(1, microbatches // ranks)
        if microbatches < needed:
            wanted = f"{needed} or more"
        elif schedule.startswith("interleaved") and microbatches % rounds:
            wanted = f"a multiple of {rounds}"
        else:
            return
        yield f"--schedule {schedule} on {ranks} stages: --microbatches must be {wanted}, not {microbatches}"

    @property
    def ranks(self) -> int:
        return self.pipeline_ranks * self.places

    @property
    def parts(self) -> int:
        return self.shards * self.tensor_parallel

    @property
    def places(self) -> int:
        return self.replicas * self.parts

    def pipeline_rank(self, rank: int) -> int:
        return rank // self.places

    def place(self, rank: int) -> int:
        return rank % self.places

    def cell(self, rank: int) -> range:
        """Returns the ranks that hold one replica of a stage together, including this one."""
        return range(rank - rank % self.parts, rank - rank % self.parts + self.parts)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks with the same state, including this one."""
        first = rank - self.place(rank) + self.place(rank) % self.parts
        return tuple(range(first, first + self.places, self.parts))

    def states_of(self, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
        first = pipeline_rank * self.places
        return tuple(self.replicas_of(first + part) for part in range(self.parts))

    @property
    def stages_per_rank(self) -> int:
        return SCHEDULES[self.schedule][0]

    @property
    def splits_backward(self) -> bool:
        """Returns whether the schedule computes weight gradients separately from input gradients."""
        return SCHEDULES[self.schedule][1] or self.schedule == "interleavedzerobubble"

    @property
    def stages(self) -> int:
        return self.pipeline_ranks * self.stages_per_rank

    def pipeline_rank_of(self, stage: int) -> int:
        if SCHEDULES[self.schedule][1] and stage >= self.pipeline_ranks:
            return self.stages - 1 - stage
        return stage % self.pipeline_ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(s for s in range(self.stages) if self.pipeline_rank_of(s) == self.pipeline_rank(rank))

    def replay_streams(self, rank: int, groups: RecoveryGroups) -> tuple[str, ...]:
        """Returns the log streams whose tensors a replay of this rank's recovery group reads: what the group received
        from stages outside it.

        A replay does not read the bodies of what it sent itself, nor of external inputs: it recomputes those and
        compares their digests with the logged ones.
        """
        received: list[str] = []
        place = self.place(rank)
        for stage in sorted({other for own in self.stages_of(rank) for other in groups.stages(own)}):
            for neighbour, kind in ((stage - 1, "F"), (stage + 1, "B")):
                if self.is_logged(neighbour, stage, groups):
                    received.append(record.boundary(neighbour, kind, place, self.places))
        return tuple(received)

    def is_logged(self, source: int, destination: int, groups: RecoveryGroups) -> bool:
        """Returns whether a tensor from `source` to its neighbour `destination` is logged: it leaves its rank and its
        recovery group."""
        return (
            0 <= source < self.stages
            and self.pipeline_rank_of(source) != self.pipeline_rank_of(destination)
            and groups.crosses(source, destination)
        )
