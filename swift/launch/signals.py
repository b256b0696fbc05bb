"""Ctrl-C and its kin in the launcher: noticed by the loop, or raised where torch blocks the main thread."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from swift.launch.torch_names import SignalException


class SignalGate:
    """While the loop runs, a signal only wakes it, so that no child is lost between its start and its entry
    in the books. Inside `raising()` (rendezvous, barrier) it is raised at once.
    """

    def __init__(self, signals: list[signal.Signals], wake_fd: int) -> None:
        self._received: signal.Signals | None = None
        self._raises = False
        self._wake_fd = wake_fd
        for signum in signals:
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(signum)
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_fd, b"s")
        if self._raises:
            self.check()

    def check(self) -> None:
        """Raises SignalException if a signal has come."""
        if self._received is not None:
            received, self._received = self._received, None
            raise SignalException(f"got {received.name}", sigval=received)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False
