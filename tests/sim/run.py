"""Seeds: one, or many over several processes; and what they reached."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from swift_ft_services.logserver import reading
from tests.sim.checkers import Violation
from tests.sim.faults import inject
from tests.sim.world import Outcome, World


@contextmanager
def _small_messages() -> Iterator[None]:
    module: Any = reading
    size = module.MESSAGE_BYTES
    module.MESSAGE_BYTES = 1 << 16
    try:
        yield
    finally:
        module.MESSAGE_BYTES = size


def run_seed(seed: int) -> Outcome:
    """The same for the same seed, always."""
    with _small_messages():
        return _run(seed)


def _run(seed: int) -> Outcome:
    world = World(seed)
    violation = checker = ""
    try:
        world.run(inject)
    except Violation as broken:
        violation, checker = str(broken), broken.checker
    except Exception as error:  # noqa: BLE001  (an assertion or a bug of the system, under this seed)
        violation, checker = f"{type(error).__name__}: {error}", type(error).__name__
    world.kernel.count(f"job {world.state}")
    world.kernel.counts["record acknowledged"] += world.checkers.acks
    world.kernel.counts["record compared"] += world.checkers.compared
    return Outcome(
        seed=seed,
        state=str(world.state),
        sim_seconds=world.kernel.now,
        counts=dict(world.kernel.counts),
        violation=violation,
        checker=checker,
        trace=world.kernel.trace() if violation else [],
    )


@dataclass(slots=True)
class Result:
    """Of many seeds."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, other: "Result") -> None:
        self.seeds += other.seeds
        self.counts.update(other.counts)
        self.failed += other.failed


def run_seeds(seeds: Iterable[int]) -> Result:
    result = Result()
    for seed in seeds:
        outcome = run_seed(seed)
        result.seeds += 1
        result.counts.update(outcome.counts)
        if outcome.violation:
            result.failed.append(outcome)
    return result


def summary(counts: Mapping[str, int]) -> list[str]:
    """Lines that say what was injected and what came of it."""
    return [f"{count:>9}  {what}" for what, count in sorted(counts.items()) if count]
