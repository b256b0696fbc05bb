"""Parameters of a study, and the resulting cells: every task, strategy, failure rate and seed. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from swift_ft.errors import UsageError
from swift_ft.lab.failures.schedule import FAILURES_MAX

# Strategies of a study: the launcher's flags for each, and whether its bits must equal those of a run without failures.

PLAIN = "none"
"""Run without any recovery: torchrun, and no failures."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    flags: tuple[str, ...]
    exact: bool
    spares: int = 1
    repaired: bool = False
    """The others continue without the lost rank, whose place becomes available again after the study's ``repair_s``."""


_DROP = ("--lost-shard", "drop", "--allow-inexact")
STRATEGIES = {
    "auto": Strategy(flags=("--strategy", "auto"), exact=True),
    "checkpoint": Strategy(flags=("--strategy", "checkpoint"), exact=True),
    "snapshot": Strategy(flags=("--strategy", "snapshot", "--snapshot-every", "10"), exact=True),
    "reinit": Strategy(flags=("--strategy", "reinit"), exact=True),
    "replay": Strategy(flags=("--strategy", "replay"), exact=True),
    "shrink": Strategy(flags=("--strategy", "shrink"), exact=True, spares=0, repaired=True),
    "rollback": Strategy(flags=("--strategy", "rollback"), exact=True, spares=0, repaired=True),
    "shrink-drop": Strategy(flags=("--strategy", "shrink", *_DROP), exact=False, spares=0, repaired=True),
    "rollback-drop": Strategy(flags=("--strategy", "rollback", *_DROP), exact=False, spares=0, repaired=True),
    "lossy-forward": Strategy(
        flags=("--strategy", "lossy-forward", "--allow-inexact"), exact=False, spares=0, repaired=True
    ),
}
DEFAULT = ("auto", "checkpoint", "snapshot", "shrink", "shrink-drop", "lossy-forward")
QUICK = ("auto", "shrink-drop")


RANKS = 2
"""Number of replicas; each has the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Description of a task for people (`trainers.tasks` has the model and the batches)."""

    title: str
    measure: str
    """Metric on the held-out test set."""
    unit: str
    higher_is_better: bool
    apart: str = ""
    """Unit of a difference, if it is another one."""
    needs: str = ""
    """Required package of the extra `lab`, if any."""


TASKS = {
    "bytes": Task(
        title="Bytes of the standard library", measure="loss", unit="bits per byte", higher_is_better=False
    ),
    "digits": Task(
        title="Images of digits",
        measure="accuracy",
        unit="%",
        higher_is_better=True,
        apart="points",
        needs="sklearn",
    ),
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
        for flag, given, known in (
            ("--task", self.tasks, TASKS),
            ("--strategy", self.strategies, STRATEGIES),
        ):
            for name in given:
                if name not in known:
                    raise UsageError(f"study: {flag} {name}: there are {', '.join(known)}")
            if len(set(given)) != len(given):
                raise UsageError(f"study: {flag} {','.join(given)}: each only once")
        if not self.rates or len(set(self.rates)) != len(self.rates):
            raise UsageError("study: --rates: one or more, each only once")
        if len({f"{rate:g}" for rate in self.rates}) != len(self.rates):
            raise UsageError("study: --rates: two are the same in six digits")
        for rate in self.rates:
            if not 0.0 < rate <= 20.0:
                raise UsageError(f"study: --rates {rate:g}: above 0 and at most 20 failures per 100 steps")
        if not 1 <= self.seeds <= 100:
            raise UsageError(f"study: --seeds {self.seeds}: 1 to 100")
        if not 20 <= self.steps <= 1_000_000:
            raise UsageError(f"study: --steps {self.steps}: 20 to 1000000")
        if max(self.rates) * self.steps / 100 > FAILURES_MAX / 2:
            most = FAILURES_MAX // 2
            raise UsageError(f"study: --steps {self.steps} with that rate: more than {most} failures a run")
        if not 1 <= self.checkpoint_every <= self.steps:
            raise UsageError(f"study: --checkpoint-every {self.checkpoint_every}: 1 to the steps")
        if not 0.0 <= self.repair_s <= 600.0:
            raise UsageError(f"study: --repair-s {self.repair_s:g}: 0 to 600 s")

    def cells(self) -> Iterator[Cell]:
        """Yields the cells seed by seed. So a stopped study has complete seeds, and disturbances of the machine affect
        all strategies alike."""
        for seed in range(self.seeds):
            for task in self.tasks:
                yield Cell(task=task, strategy=PLAIN, rate=0.0, seed=seed)
                for rate in (0.0, *self.rates):
                    for strategy in self.strategies:
                        yield Cell(task=task, strategy=strategy, rate=rate, seed=seed)

    def as_json(self) -> dict[str, Any]:
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    def difference(self, stored: Mapping[str, Any]) -> str:
        """Describes the first setting in which a stored study differs; empty if none does."""
        for name in (field.name for field in fields(self)):
            mine = self.as_json()[name]
            if stored.get(name) != mine:
                return f"its {name} is {_words(stored.get(name))}, not {_words(mine)}"
        return ""


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def failures_spec(cell: Cell, steps: int) -> str:
    """Formats the cell's failures for `swift-ft run --failures`. Every rank is a host, so each fails half as often as
    the job."""
    mtbf = RANKS * 100.0 / cell.rate
    return f"every=exponential,mtbf={mtbf:.6g},until={steps},seed={cell.seed},phase=optimizer"
