"""Thread pool that starts its threads ahead of the work, so that submitting work never fails.

At a limit of memory or of processes no thread can be started. A `ThreadPoolExecutor` then raises in `submit`; in a gRPC
server that would end the one thread that serves all calls.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

NONE_LEFT = (
    "no thread can be started: a limit of memory or of processes is reached (pids.max, TasksMax, ulimit -u)"
)

P = ParamSpec("P")
T = TypeVar("T")
_Work = SimpleQueue[Callable[[], None] | None]


class Threads(ThreadPoolExecutor):
    """An executor whose `submit` starts no thread and never fails; `ready` starts one. Its threads are daemons."""

    def __init__(self, most: int, name: str, *, ahead: int = 1) -> None:
        """``ahead``: number of threads to start now. Raises RuntimeError if they cannot be started."""
        super().__init__(most, name)
        self._most = most
        self._name = name
        self._guard = threading.Lock()
        self._begun = 0
        self._free = 0
        """Idle threads; if negative, queued work that has no thread yet."""
        self._work: _Work = SimpleQueue()
        self.shut_down = weakref.finalize(self, self._work.put, None)
        for _ in range(ahead):
            self._begin()

    def ready(self) -> bool:
        """Returns whether work submitted next will be run: a thread is idle, or could be started, or all threads exist
        already and the next idle one takes it."""
        with self._guard:
            if self._free > 0 or self._begun == self._most:
                return True
        with suppress(RuntimeError, MemoryError):
            self._begin()
            return True
        return False

    def _begin(self) -> None:
        arguments = (self._work, weakref.ref(self))
        threading.Thread(target=_take_turns, args=arguments, name=self._name, daemon=True).start()
        with self._guard:
            self._begun += 1
            self._free += 1

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submits work as any executor does. Call `ready` first, or the work waits for an existing thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001  (raised again by `Future.result`)
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._guard:
            self._free -= 1
        self._work.put(work)
        return future

    def done(self) -> None:
        with self._guard:
            self._free += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the threads once all submitted work is done, without waiting for that."""
        self.shut_down()


def _take_turns(work: _Work, threads: "weakref.ref[Threads]") -> None:
    """Runs work until the pool ends. Holds no reference to the pool while idle."""
    while (item := work.get()) is not None:
        item()
        del item
        if (pool := threads()) is not None:
            pool.done()
        del pool
    work.put(None)  # for the next one
