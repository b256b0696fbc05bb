"""Ctrl-C and its kin in the launcher: noticed by the loop, or raised where torch blocks the main thread."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from swift.launch.torch_names import SignalException

STUCK_S = 2.0
"""Some waits of torch's store run no Python code, so no handler either. After this time the process simply
ends, and the kernel ends the children with it."""


class SignalGate:
    """While the loop runs, a signal only wakes it, so that no child is lost between its start and its entry
    in the books. Inside `raising()` (rendezvous, barrier) it is raised at once.
    """

    def __init__(self, signals: list[signal.Signals], wake: Callable[[], None]) -> None:
        self._received: signal.Signals | None = None
        self._raises = False
        self._wake = wake
        self._handled = threading.Event()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(read_fd,), name="signal-watch", daemon=True).start()
        for signum in signals:
            # nohup means it.
            if not (signum == signal.SIGHUP and signal.getsignal(signum) == signal.SIG_IGN):
                signal.signal(signum, self._on_signal)

    @property
    def pending(self) -> bool:
        """A signal has come that nobody has seen by `check` yet."""
        return self._received is not None

    def take(self, signum: signal.Signals) -> bool:
        """True: this one has come; it is forgotten."""
        came = self._received == signum
        if came:
            self._received = None
        return came

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

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(signum)
        self._handled.set()
        self._wake()
        if self._raises:
            self.check()

    def _watch(self, read_fd: int) -> None:
        while True:
            signum = os.read(read_fd, 1)[0]
            if not self._handled.wait(STUCK_S):
                os._exit(128 + signum)
