"""Whether a loop has caught up: idle for a moment, and not kept from running."""

import asyncio
import time

import pytest

from swift_ft_services.coordinator import __main__ as quiet
from swift_ft_services.coordinator.__main__ import QUIET_S, QuietSelector

IDLE_S = 250 * QUIET_S
"""Much longer, since the thread itself may wait for a processor first."""


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the thread has run, or waited for a processor."""
    seconds = [0.0]
    monkeypatch.setattr(quiet, "_ready_s", lambda: seconds[0])
    return seconds


def run_on(selector: QuietSelector, *works: float) -> list[bool]:
    """Whether it had caught up after each: so many seconds of work without a break, or of sleep (negative)."""

    async def main() -> list[bool]:
        selector.caught_up()
        found = []
        for seconds in works:
            until = time.monotonic() + abs(seconds)
            if seconds < 0:
                await asyncio.sleep(-seconds)
            while time.monotonic() < until:
                await asyncio.sleep(0)  # there is always something to do
            found.append(selector.caught_up())
        return found

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        return runner.run(main())


def test_a_loop_that_is_never_idle_has_not_caught_up(queued: list[float]) -> None:
    assert run_on(QuietSelector(), 0.05, -IDLE_S, 0.05) == [False, True, False]


def test_a_thread_that_waits_for_a_processor_has_not_caught_up(queued: list[float]) -> None:
    selector = QuietSelector()
    assert run_on(selector, -IDLE_S) == [True]
    queued[0] += 100.0
    assert not selector.caught_up()


def test_the_kernel_says_how_long_a_thread_was_ready() -> None:
    before = quiet._ready_s()
    assert 0.0 <= before <= quiet._ready_s()
