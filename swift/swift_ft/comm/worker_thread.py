"""A thread that waits in the place of the trainer's, for backends whose waits cannot be ended.

The trainer's thread waits for the runner, and a notice can end that. A runner that is lost in the backend is left
behind with its group; the next generation has new ones.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_END_S = 0.5
"""In all, at the process's end. A thread that is free again ends in milliseconds; a lost one is not waited for."""
_leaving: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
"""Threads of runners that have stopped. They may be in the backend still."""


@atexit.register
def lost() -> bool:
    """Waits for threads that come back from the backend just now; whether one is left. One that came back while the
    interpreter ends could not have its lock any more, and C++ ends the whole process then ("terminate called without an
    active exception"). `swift_ft.launch.worker` keeps a rank from that."""
    until = time.monotonic() + _END_S
    leaving = [thread for thread in threading.enumerate() if thread in _leaving]
    for thread in leaving:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in leaving)


class Broken(RuntimeError):
    """A notice has ended the wait. Its words are those of a lost connection, which is what it stands for."""


class Task:
    """Something that a runner does. Waited for by one thread, ended by the runner or by a notice."""

    def __init__(self, run: Callable[[], Any]):
        self._run: Callable[[], Any] | None = run
        self._over = threading.Lock()
        self._over.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self._state = threading.Lock()
        self.done = False
        self.error: Exception | None = None

    def carry_out(self) -> None:
        """(runner) Runs it; its result or its error wakes whoever waits."""
        # What it refers to goes with it: a thread that lets a process group go while the interpreter ends aborts.
        run, self._run = self._run, None
        assert run is not None
        error: Exception | None = None
        try:
            run()
        except Exception as raised:  # noqa: BLE001  (handed to whoever waits)
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
        """Calls `callback` once this is over, at once if it is."""
        with self._state:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        """Raises what the task has raised, or Broken."""
        with self._over:
            pass
        if self.error is not None:
            raise self.error


class Runner:
    """One thread that carries out tasks in order, for one group of one generation.

    (any thread) ``submit`` → ``Task.wait``; (watcher thread) ``stop``: whoever waits is freed at once
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Task] = set()
        self._stopped: Broken | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Task:
        """Queues a call. On a runner that has stopped the task has ended already, with the error."""
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

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end: one that is left may not meet the interpreter's. A lost one is given up."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.carry_out()
            with self._lock:
                self._open.discard(task)
            del task
