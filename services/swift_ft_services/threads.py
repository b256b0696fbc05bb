"""Threads that are started before there is work for them, so that no thread fails at the moment in which it is needed.

At a limit of memory or of processes none can be started. A `ThreadPoolExecutor` raises that in whoever submits: at a
server of gRPC that is the one thread which serves all calls, and it would be the end of it.
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
    """An executor whose `submit` starts no thread and never fails; `ready` starts one. They are daemons, and end with
    this object."""

    def __init__(self, most: int, name: str, *, ahead: int = 1) -> None:
        """``ahead``: so many are there from now on. RuntimeError: they cannot be started."""
        super().__init__(most, name)
        self._most = most
        self._name = name
        self._guard = threading.Lock()
        self._begun = 0
        self._free = 0
        """Threads that wait for work; below 0: work that waits for a thread."""
        self._work: _Work = SimpleQueue()
        self.shut_down = weakref.finalize(self, self._work.put, None)
        for _ in range(ahead):
            self._begin()

    def ready(self) -> bool:
        """Whether what is submitted next finds a thread: one is free, or could be started, or all that there may be
        are there, and the next one to be free takes it."""
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
        """As of any executor; after `ready`, or it waits for a thread that is there."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001  (whoever waits for the result gets it)
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._guard:
            self._free -= 1
        self._work.put(work)
        return future

    def done(self) -> None:
        """(its thread) Work is done."""
        with self._guard:
            self._free += 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Its threads end once all that was submitted is done, which is not waited for."""
        self.shut_down()


def _take_turns(work: _Work, threads: "weakref.ref[Threads]") -> None:
    """Holds no reference to the pool while there is nothing to do."""
    while (item := work.get()) is not None:
        item()
        del item
        if (pool := threads()) is not None:
            pool.done()
        del pool
    work.put(None)  # for the next one
