"""Seeds: one, or many over several processes; and what they reached."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from services.logserver import readahead
from tests.sim.checkers import Violation
from tests.sim.faults import inject
from tests.sim.world import Outcome, World


class _AtOnce:
    """An executor without a thread."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, work: Callable[..., Any], *args: Any) -> "futures.Future[Any]":
        done: futures.Future[Any] = futures.Future()
        try:
            done.set_result(work(*args))
        except OSError as error:
            done.set_exception(error)
        return done

    def shutdown(self, *_: object, **__: object) -> None: ...


@contextmanager
def _without_threads() -> Iterator[None]:
    """Readers read ahead in a thread. Here they do so at once, into less memory."""
    before, size = readahead.futures, readahead._BUFFER_BYTES
    readahead.futures = SimpleNamespace(  # type: ignore[assignment]
        ThreadPoolExecutor=_AtOnce, Future=futures.Future, wait=futures.wait
    )
    readahead._BUFFER_BYTES = 1 << 16
    try:
        yield
    finally:
        readahead.futures, readahead._BUFFER_BYTES = before, size


def run_seed(seed: int) -> Outcome:
    """The same for the same seed, always."""
    with _without_threads():
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
    return Outcome(
        seed=seed,
        state=str(world.state),
        sim_seconds=world.kernel.now,
        counts=dict(world.kernel.counts),
        violation=violation,
        checker=checker,
        trace=world.kernel.trace() if violation else [],
    )


def summary(outcomes: list[Outcome]) -> list[str]:
    """Lines that say what was injected and what came of it."""
    counts: Counter[str] = Counter()
    for outcome in outcomes:
        counts.update(outcome.counts)
        counts[f"job {outcome.state}"] += 1
    return [f"{count:>9}  {what}" for what, count in sorted(counts.items())]
