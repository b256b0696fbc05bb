"""Processes of a benchmark, and signals that come while they are started (`swift_ft.lab.bench.output`)."""

import os
import signal
from collections.abc import Callable

import pytest

from swift_ft.lab.bench.output import signals_held


class Told(Exception):
    pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_followed_once_all_are_started(number: signal.Signals) -> None:
    """Or it would come between a process and whoever is to end it."""

    def tell(*_: object) -> None:
        raise Told

    def start() -> None:
        with signals_held():
            started.append("one")
            os.kill(os.getpid(), number)
            started.append("two")

    before = signal.signal(number, tell)
    started: list[str] = []
    try:
        with pytest.raises(Told):
            start()
        assert started == ["one", "two"]
        assert signal.getsignal(number) is tell
        with signals_held():
            pass
    finally:
        signal.signal(number, before)


def test_an_error_meanwhile_is_not_hidden() -> None:
    handler: Callable[..., object] | int | None = signal.getsignal(signal.SIGTERM)
    with pytest.raises(OSError, match="no more processes"), signals_held():
        raise OSError("no more processes")
    assert signal.getsignal(signal.SIGTERM) is handler
