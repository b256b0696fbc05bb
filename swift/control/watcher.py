"""ViewWatcher: the newest View of a job, kept by a thread over the Watch RPC."""

import threading
import time
from collections.abc import Callable
from typing import cast

import grpc

from swift._pb import coordinator_pb2 as pb
from swift._pb import coordinator_pb2_grpc as pb_grpc
from swift.control.updates import applied
from swift.errors import ServiceError
from swift.security.advice import advice
from swift.views import state_name
from swift.words import one_line

# Between two attempts to reconnect; the channel's own backoff stands behind it.
RECONNECT_PAUSE_S = 0.05


AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Nobody has answered."""


def outcome(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and words of a failed call. What grpc raises is a Call as well, which its types do not say."""
    call = cast("grpc.Call", error)
    return call.code(), one_line(call.details() or "")


class Line:
    """Whether the coordinator answers. Each change is told once, in a line for people. Thread-safe."""

    def __init__(self, address: str, tell: Callable[[str], None]) -> None:
        self._address = address
        self._tell = tell
        self._lock = threading.Lock()
        self._is_down = False

    def went(self, details: str) -> None:
        """A call was not answered. `details`: grpc's words, of which the last ones say why."""
        with self._lock:
            news, self._is_down = not self._is_down, True
        if news:
            why = details.rpartition(": ")[2].strip() or "no reason given"
            more = advice(self._address, details or why)
            why = f"{why}; {more}" if more else why
            self._tell(f"the coordinator at {self._address} does not answer ({why}): trying again")

    def came(self) -> None:
        with self._lock:
            news, self._is_down = self._is_down, False
        if news:
            self._tell(f"the coordinator at {self._address} answers again")


def newer(view: pb.View, than: pb.View | None) -> bool:
    """Views are ordered by (generation, revision); both are durable before a View is published."""
    return than is None or (view.generation, view.revision) > (than.generation, than.revision)


class ViewWatcher:
    """A daemon thread that follows the View of one job, through restarts of the coordinator, until closed.

    `latest` is the newest View seen. Callbacks run in the watcher's thread, one View at a time and in order;
    Views may be skipped, the newest never is. A callback must not raise: if it does, the watcher ends and
    `wait_for` says so.
    """

    def __init__(
        self,
        stub: pb_grpc.CoordinatorStub,
        line: Line,
        address: str,
        job: str,
        *callbacks: Callable[[pb.View], None],
        rank: int | None = None,
    ) -> None:
        """`rank`: who watches. It is not told what only others need; None: an operator, or a launcher."""
        self.latest: pb.View | None = None
        self._stub = stub
        self._line = line
        self._address = address
        self._job = job
        self._rank = rank
        self._callbacks = list(callbacks)
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._ended = ""  # why the thread is no longer there
        self._problem = ""  # what the last attempt died of
        self._stream: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"view-watcher-{job}", daemon=True)
        self._thread.start()

    def subscribe(self, callback: Callable[[pb.View], None]) -> None:
        """`callback` gets every newer View from now on. Look at `latest` afterwards: it may be there."""
        with self._changed:
            self._callbacks.append(callback)

    def wait_for(self, predicate: Callable[[pb.View], bool], timeout_s: float | None) -> pb.View:
        """The first View (the latest included) that satisfies `predicate`. ServiceError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self.latest is not None and predicate(self.latest):
                    return self.latest
                if self._ended:
                    raise ServiceError(self._ended)
                remaining_s = None if deadline is None else deadline - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise ServiceError(f"waited {timeout_s:g} s for job {self._job}: {self._where()}")
                self._changed.wait(remaining_s)

    def close(self) -> None:
        """Ends the thread. Waits for it, unless a callback is what calls."""
        self._closed.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _where(self) -> str:
        if self.latest is None:
            return f"no view of it from the coordinator at {self._address} {self._problem}".rstrip()
        view = self.latest
        waiting = f", waiting for {view.waiting_for}" if view.waiting_for else ""
        state = state_name(view.state)
        return f"{state} in generation {view.generation}{waiting} {self._problem}".rstrip()

    def _run(self) -> None:
        ended = f"a callback of the watcher of job {self._job} failed"
        try:
            while not self._closed.is_set():
                self._follow()
                self._closed.wait(RECONNECT_PAUSE_S)
            ended = f"the watcher of job {self._job} was closed"
        finally:
            with self._changed:
                self._ended = ended
                self._changed.notify_all()

    def _follow(self) -> None:
        try:
            self._stream = self._stub.Watch(pb.WatchRequest(job=self._job, rank=self._rank))
            if self._closed.is_set():
                self._stream.cancel()
            known: pb.View | None = None
            for update in self._stream:
                self._problem = ""
                self._line.came()
                known = applied(update, known)
                if known is None:  # another stream begins with all of it
                    self._stream.cancel()
                    return
                self._take(known)
        except grpc.RpcError as error:
            code, details = outcome(error)
            self._problem = f"({details})"
            if code in AWAY and not self._closed.is_set():
                self._line.went(details)
        except ValueError:  # grpc's word for a closed channel
            self._closed.set()

    def _take(self, view: pb.View) -> None:
        with self._changed:
            if self._closed.is_set() or not newer(view, self.latest):
                return
            self.latest = view
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        for callback in callbacks:
            callback(view)
