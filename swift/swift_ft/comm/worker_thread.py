"""A thread that waits in place of the trainer's, for backends whose waits cannot be ended.

The trainer's thread waits for the runner, and a new-generation notification can end that wait. A runner that hangs in
the backend is abandoned with its group; the next generation has new ones.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_END_S = 0.5
"""Seconds in all at the process's end. A freed thread ends in milliseconds; a hung one is not waited for."""
_leaving: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads of runners that have stopped. They may still be in the backend."""


@atexit.register
def lost() -> bool:
    """Waits for threads that are returning from the backend; returns whether one is left. A thread that returns while
    the interpreter ends can no longer take the GIL, and C++ then ends the whole process ("terminate called without an
    active exception"). `swift_ft.launch.worker` prevents that in a rank."""
    until = time.monotonic() + _END_S
    leaving = [thread for thread in threading.enumerate() if thread in _leaving]
    for thread in leaving:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in leaving)


class Broken(RuntimeError):
    """A new-generation notification ended the wait. The message reads like that of a lost connection."""


class Task:
    """A call that a runner carries out. One thread waits for it; the runner or a notification ends it."""

    def __init__(self, run: Callable[[], Any]):
        self._run: Callable[[], Any] | None = run
        self._over = threading.Lock()
        self._over.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self._state = threading.Lock()
        self.done = False
        self.error: Exception | None = None
        self.continued: Callable[[], None] | None = None
        """Called by the thread that has waited for the task, however it ended: it orders its device's work behind the
        task's."""

    def carry_out(self) -> None:
        """(runner) Runs the call. Its result or its error wakes the waiting thread."""
        # References are dropped with the call: a thread that frees a process group while the interpreter ends aborts.
        run, self._run = self._run, None
        assert run is not None
        error: Exception | None = None
        try:
            run()
        except Exception as raised:  # noqa: BLE001  (passed to the waiting thread)
            error = raised
        del run
        self.end(error)

    def end(self, error: Exception | None) -> None:
        with self._state:
            if self.done:
                return
            self.error, self.done = error, True
            callbacks, self._callbacks = self._callbacks, []
        self._over.release()
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once the task is over, at once if it already is."""
        with self._state:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        """Waits for the end. Raises the task's error, or Broken."""
        with self._over:
            pass
        if self.continued is not None:
            self.continued()
        if self.error is not None:
            raise self.error


class Runner:
    """One thread that carries out tasks in order, for one group of one generation.

    (any thread) ``submit`` → ``Task.wait``; (watcher thread) ``stop``: all waiting threads are freed at once
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Task] = set()
        self._stopped: Broken | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Task:
        """Queues a call. On a stopped runner the task has already ended, with the error."""
        task = Task(run)
        with self._lock:
            stopped = self._stopped
            if stopped is None:
                self._open.add(task)
                self._tasks.put(task)
        if stopped is not None:
            task.end(stopped)
        return task

    def stop(self) -> None:
        with self._lock:
            self._stopped = self._stopped or Broken("connection of an ended generation")
            left, self._open = self._open, set()
            _leaving.add(self._thread)
            self._tasks.put(None)
        for task in left:
            task.end(self._stopped)

    @property
    def stopped(self) -> bool:
        return self._stopped is not None

    def join(self, timeout_s: float) -> None:
        """Waits for the thread to end, so that it does not outlive the interpreter. A hung thread is given up."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.carry_out()
            with self._lock:
                self._open.discard(task)
            del task
