"""Fence, trim, reset; and the janitor, a thread that unlinks what they drop."""

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from services.logserver import procedures
from services.logserver.committer import Committer
from services.logserver.core import JobState, Refusal, StreamState
from services.logserver.procedures import Clean, Emit, Procedure, Save, Settle, meta_of
from services.logserver.state import Refused, ServerState, check_names
from services.logserver.storage import JobMeta, StorageFailed, StorageFull
from swift import events
from swift.log.wire import Reason

T = TypeVar("T")


class Administration:
    """What changes a job as a whole. One such change at a time; each is durable before it is answered."""

    def __init__(self, state: ServerState, committer: Committer) -> None:
        self._state = state
        self._committer = committer
        self._changed = state.changed
        self._one_at_a_time = threading.Lock()
        self._janitor_work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._janitor = threading.Thread(target=self._janitor_loop, name="janitor", daemon=True)

    def start(self) -> None:
        self._janitor.start()

    def stop(self) -> None:
        """After what the janitor has to do already."""
        self._janitor_work.put(None)
        self._janitor.join()

    def fence(self, job_name: str, generation: int) -> None:
        self._carry_out(procedures.fence(self._state, job_name, generation))

    def trim(self, job_name: str, below_step: int) -> int:
        """Gives the step below which everything is trimmed now."""
        check_names(job_name)
        with self._changed:
            job = self._state.core.jobs.get(job_name)
        return self._trim(job, below_step) if job is not None else 0

    def trim_later(self, job: JobState) -> None:
        """A reader has gone that may have held up a trim."""
        self._janitor_work.put(partial(self._trim_waiting, job))

    def _trim_waiting(self, job: JobState) -> None:
        try:
            self._trim(job, 0)
        except Refused as refused:
            events.emit("trim_failed", job=job.name, reason=str(refused))

    def _trim(self, job: JobState, below_step: int) -> int:
        return self._carry_out(procedures.trim(self._state, job, below_step))

    def reset(self, job_name: str, generation: int) -> None:
        self._carry_out(procedures.reset(self._state, job_name, generation))

    def _carry_out(self, procedure: Procedure[T]) -> T:
        """Raises Refused, also where a step could not be done."""
        with self._one_at_a_time:
            while True:
                try:
                    with self._changed:
                        step = next(procedure)
                        if isinstance(step, Settle):
                            self._settle()
                except StopIteration as done:
                    result: T = done.value
                    return result
                match step:
                    case Save():
                        self._save(step.job, step.meta)
                    case Clean():
                        self._clean(step.streams)
                    case Emit():
                        events.emit(step.event, **step.fields)

    def save_later(self, job: JobState) -> None:
        """Something that the manifest keeps has changed."""
        self._janitor_work.put(partial(self._save_now, job))

    def _save_now(self, job: JobState) -> None:
        with self._one_at_a_time:
            with self._changed:
                meta = meta_of(job)
            try:
                self._save(job.name, meta)
            except Refused as refused:
                events.emit("manifest_not_saved", job=job.name, reason=str(refused))

    def save_all(self) -> None:
        """(at the end) What each stream must hold at the next start."""
        for job in self._state.core.jobs.values():
            if job.generation:
                self._save_now(job)

    def _settle(self) -> None:
        self._committer.settle()
        if self._state.failed:
            raise Refused(Refusal(Reason.CLOSED, self._state.failed))

    def _save(self, job: str, meta: JobMeta) -> None:
        try:
            self._state.storage.save(job, meta)
        except (StorageFull, StorageFailed) as error:
            reason = Reason.FULL if isinstance(error, StorageFull) else Reason.CLOSED
            raise Refused(Refusal(reason, str(error))) from None

    def _clean(self, streams: Iterable[StreamState]) -> None:
        for stream in streams:
            self._janitor_work.put(partial(self._remove, stream.job, stream.name, stream.first))

    def _remove(self, job: str, stream: str, first: int) -> None:
        try:
            freed = self._state.storage.remove(job, stream, first)
        except (StorageFull, StorageFailed) as error:
            events.emit("not_removed", job=job, stream=stream, reason=str(error))
            return
        if freed:
            events.emit("freed", job=job, stream=stream, bytes=freed)
            with self._changed:
                self._state.space_freed()

    def _janitor_loop(self) -> None:
        while True:
            work = self._janitor_work.get()
            if work is None:
                return
            work()
