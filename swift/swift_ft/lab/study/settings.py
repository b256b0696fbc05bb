"""Parameters of a study, and the resulting cells: every task, strategy, failure rate and seed. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from swift_ft.errors import UsageError
from swift_ft.lab.failures.schedule import FAILURES_MAX

# Strategies of a study: the launcher's flags for each, and whether its bits must equal those of a run without failures.

PLAIN = "none"
"""Run without any recovery: torchrun, and no failures."""


@dataclass(frozen=True, slots=True)
class Strategy:
    flags: tuple[str, ...]
    exact: bool = True
    repaired: bool = False
    """The others continue without the lost rank, whose place becomes available again after the study's ``repair_s``.
    Strategies that need another process have a warm spare."""


_DROP = ("--lost-shard", "drop", "--allow-inexact")
STRATEGIES = {
    "auto": Strategy(("--strategy", "auto")),
    "checkpoint": Strategy(("--strategy", "checkpoint")),
    "snapshot": Strategy(("--strategy", "snapshot", "--snapshot-every", "10")),
    "reinit": Strategy(("--strategy", "reinit")),
    "replay": Strategy(("--strategy", "replay")),
    "shrink": Strategy(("--strategy", "shrink"), repaired=True),
    "rollback": Strategy(("--strategy", "rollback"), repaired=True),
    "shrink-drop": Strategy(("--strategy", "shrink", *_DROP), exact=False, repaired=True),
    "rollback-drop": Strategy(("--strategy", "rollback", *_DROP), exact=False, repaired=True),
    "lossy-forward": Strategy(("--strategy", "lossy-forward", "--allow-inexact"), exact=False, repaired=True),
}
DEFAULT = "auto,checkpoint,snapshot,shrink,shrink-drop,lossy-forward"
QUICK = {"task": "bytes", "strategy": "auto,shrink-drop", "rates": "2", "seeds": 1, "steps": 120}

RANKS = 2
"""Number of replicas; each has the whole model."""


@dataclass(frozen=True, slots=True)
class About:
    """Description of a task for people (`trainers` has the model and the batches)."""

    title: str
    measure: str
    """Metric on the held-out test set."""
    unit: str
    apart: str
    """Unit of a difference."""
    higher_is_better: bool


TASKS = {
    "bytes": About("Bytes of the standard library", "loss", "bits per byte", "bits per byte", False),
    "digits": About("Images of digits", "accuracy", "%", "points", True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run. Rate 0: no failures."""

    task: str
    strategy: str
    rate: float
    """Mean number of failures of the job in 100 steps."""
    seed: int
    """Seed of the weights, of the order of the batches, and of the failures."""

    @property
    def name(self) -> str:
        return f"{self.task}-{self.strategy}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything that a cell's result depends on, and that determines the cells. Raises UsageError if invalid."""

    tasks: tuple[str, ...]
    strategies: tuple[str, ...]
    rates: tuple[float, ...]
    seeds: int
    steps: int
    checkpoint_every: int
    repair_s: float

    def __post_init__(self) -> None:
        failures = max(self.rates) * self.steps / 100
        for fits, rule in (
            (all(0.0 < rate <= 20.0 for rate in self.rates), "--rates: above 0 and at most 20 per 100 steps"),
            (1 <= self.seeds <= 100, "--seeds: 1 to 100"),
            (20 <= self.steps <= 1_000_000, "--steps: 20 to 1000000"),
            (
                failures <= FAILURES_MAX // 2,
                f"--steps: with that rate at most {FAILURES_MAX // 2} failures a run",
            ),
            (1 <= self.checkpoint_every <= self.steps, "--checkpoint-every: 1 to the steps"),
            (0.0 <= self.repair_s <= 600.0, "--repair-s: 0 to 600 s"),
        ):
            if not fits:
                raise UsageError(f"study: {rule}")

    def cells(self) -> Iterator[Cell]:
        """Yields the cells seed by seed. So a stopped study has complete seeds, and disturbances of the machine affect
        all strategies alike."""
        for seed in range(self.seeds):
            for task in self.tasks:
                yield Cell(task=task, strategy=PLAIN, rate=0.0, seed=seed)
                for rate in (0.0, *self.rates):
                    for strategy in self.strategies:
                        yield Cell(task=task, strategy=strategy, rate=rate, seed=seed)


def failures_spec(cell: Cell, steps: int) -> str:
    """Formats the cell's failures for `swift-ft run --failures`. Every rank is a host, so each fails half as often as
    the job."""
    mtbf = RANKS * 100.0 / cell.rate
    return f"every=exponential,mtbf={mtbf:.6g},until={steps},seed={cell.seed},phase=optimizer"
