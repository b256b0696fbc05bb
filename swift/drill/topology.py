"""Which stage runs on which rank, and what a schedule asks of the numbers it is given.

1F1B and GPipe have one stage on each rank. Looped schedules put stages k and k + P on rank k; V schedules
fold the stages, so that rank k has k and 2P - 1 - k, and the last rank holds two neighbours.
"""

from dataclasses import dataclass

from swift.errors import UsageError

# name -> (stages on each rank, placed as a V)
SCHEDULES = {
    "1f1b": (1, False),
    "gpipe": (1, False),
    "interleaved1f1b": (2, False),
    "interleavedzerobubble": (2, False),
    "zbv": (2, True),
    "dualpipev": (2, True),
}


def schedule_name(name: str) -> str:
    """The schedule's name as the project spells it; case does not matter."""
    if name.lower() not in SCHEDULES:
        raise UsageError(f"unknown schedule {name!r}: one of {', '.join(SCHEDULES)}")
    return name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The shape of one drill. Checked here, before anything is started."""

    ranks: int
    """Pipeline ranks (``--stages``)."""
    replicas: int = 1
    steps: int
    microbatches: int
    schedule: str
    checkpoint_every: int

    def __post_init__(self) -> None:
        schedule_name(self.schedule)
        for name, value, least in (
            ("--stages", self.ranks, 2),
            ("--replicas", self.replicas, 1),
            ("--steps", self.steps, 1),
            ("--microbatches", self.microbatches, 1),
            ("--checkpoint-every", self.checkpoint_every, 1),
        ):
            if value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        if self.replicas > 1:
            raise UsageError("--replicas above 1 is not there yet: leave it at 1")
        self._check_microbatches()

    def _check_microbatches(self) -> None:
        needed = {"1f1b": self.ranks, "dualpipev": 2 * self.ranks}.get(self.schedule, 1)
        if self.microbatches < needed:
            raise UsageError(
                f"--schedule {self.schedule} on {self.ranks} stages: --microbatches must be {needed} or more,"
                f" not {self.microbatches}"
            )
        rounds = max(1, self.microbatches // self.ranks)
        if self.schedule.startswith("interleaved") and self.microbatches % rounds:
            raise UsageError(
                f"--schedule {self.schedule} on {self.ranks} stages: --microbatches must be a multiple of"
                f" {rounds}, not {self.microbatches}"
            )

    @property
    def stages_per_rank(self) -> int:
        return SCHEDULES[self.schedule][0]

    @property
    def stages(self) -> int:
        """Model stages, all ranks together."""
        return self.ranks * self.stages_per_rank

    def rank_of(self, stage: int) -> int:
        if SCHEDULES[self.schedule][1] and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def replay_streams(self, rank: int) -> tuple[str, ...]:
        """Log streams whose tensors a replay of this rank takes in: what it had received from other ranks.

        It does not read the bodies of what it has sent itself, nor of external inputs: those it makes again, and
        compares their digests with the logged ones.
        """
        received: list[str] = []
        for stage in self.stages_of(rank):
            if stage > 0 and self.rank_of(stage - 1) != rank:
                received.append(f"s{stage - 1}.F")
            if stage < self.stages - 1 and self.rank_of(stage + 1) != rank:
                received.append(f"s{stage + 1}.B")
        return tuple(received)
