"""A replay that stands still is ended with its reason.

What a replay may wait for is in the log or refused (`swift.runtime.gate`). A trainer can still wait by means of its
own: a socket, a lock, a file that another rank writes. That is seen from outside, by a thread beside the trainer's: no
record was read, no microbatch computed, no step ended, and the trainer's thread has used no processor, for so long.
Then the rank refuses this way, and all restore a checkpoint. If its thread does not come free by that, the process
ends itself, and is replaced.
"""

import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch

from swift import events
from swift.errors import ServiceError

_BUSY = 0.1
"""A thread that uses this share of the time is computing, whatever it does."""
_LOOKS = 20
"""In the time that it may stand still."""
FREED_WITHIN_S = 20.0
"""A newer generation frees whoever waits in what is the session's."""
_ASK_AGAIN_S = 0.5
_NOT_THE_TRAINERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_paths()["stdlib"],
)


class Stillness:
    """Since when nothing has moved. No clock of its own."""

    def __init__(self, limit_s: float, now: float, progress: Hashable, busy_s: float) -> None:
        self._limit_s = limit_s
        self._since, self._progress, self._busy_s = now, progress, busy_s

    def look(self, now: float, progress: Hashable, busy_s: float) -> bool:
        """It has stood still for the limit. `progress`: anything that changes where it goes on; `busy_s`: processor
        time of its thread so far."""
        waited_s = now - self._since
        if progress != self._progress:
            self._since, self._progress, self._busy_s = now, progress, busy_s
        elif waited_s >= self._limit_s:
            if busy_s - self._busy_s < _BUSY * waited_s:
                return True
            self._since, self._busy_s = now, busy_s
        return False


class Standstill:
    """Around a replay: ``with Standstill(...):`` on the trainer's thread."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], Hashable],
        refuse: Callable[[str], None],
        noticed: Callable[[], bool],
    ) -> None:
        """`refuse(why)` tells the coordinator; `noticed`: it has answered with a newer generation."""
        self._limit_s = limit_s
        self._progress = progress
        self._refuse = refuse
        self._noticed = noticed
        self._over = threading.Event()
        self._trainer = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._trainer)
        self._thread = threading.Thread(target=self._watch, name="swift-standstill", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        stillness = Stillness(self._limit_s, time.monotonic(), self._progress(), self._busy())
        while not self._over.wait(self._limit_s / _LOOKS):
            if stillness.look(time.monotonic(), self._progress(), self._busy()):
                self._end()
                return

    def _busy(self) -> float:
        return time.clock_gettime(self._clock)

    def _end(self) -> None:
        why = f"the replay stands still for {self._limit_s:g} s{_place_of(self._trainer)}"
        events.emit("standstill", reason=why)
        while not self._noticed():
            if self._over.is_set():
                return
            with suppress(ServiceError):  # the coordinator is asked again
                self._refuse(why)
            self._over.wait(_ASK_AGAIN_S)
        if not self._over.wait(FREED_WITHIN_S):
            print(f"swift: {why}; this process ends, and is replaced", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


def _place_of(thread: int) -> str:
    """Where in the trainer's own code a thread is."""
    frame = sys._current_frames().get(thread)
    calls = traceback.extract_stack(frame) if frame is not None else []
    for call in reversed(calls):
        if not call.filename.startswith((*_NOT_THE_TRAINERS, "<")):
            return f", in {Path(call.filename).name}:{call.lineno} ({call.line})"
    return ""
