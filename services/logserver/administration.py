"""Fence, trim, reset; and the janitor, a thread that unlinks what they drop."""

import queue
import threading
from collections.abc import Callable, Iterable
from functools import partial

from services.logserver.committer import Committer
from services.logserver.core import JobState, Refusal, StreamState
from services.logserver.state import Refused, ServerState, check_names
from services.logserver.storage import JobMeta, StorageFailed, StorageFull, StreamMeta
from swift import events
from swift.log.wire import Reason


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
        check_names(job_name)
        with self._one_at_a_time:
            with self._changed:
                if generation == 0:
                    raise Refused(Refusal(Reason.INVALID, "generation 0 cannot be granted; they start at 1"))
                refusal = self._state.core.fence(job_name, generation)
                if refusal is not None:
                    raise Refused(refusal)
                job = self._state.core.job(job_name)
                self._end_writers(job, generation)
                self._settle()
                meta = self._meta(job)
            self._save(job_name, meta)
            events.emit("fence", job=job_name, generation=generation)

    def _end_writers(self, job: JobState, generation: int) -> None:
        """Tells the writers of older generations now, not at their next frame."""
        for session in self._state.sessions:
            for stream, opened_under in session.streams.values():
                if stream.job == job.name and opened_under < generation:
                    session.end(self._state.core.check_generation(job, opened_under))

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
        with self._one_at_a_time:
            with self._changed:
                before = job.trimmed_below_step
                changed = self._state.core.trim(job, below_step)
                meta = self._meta(job)
                trimmed = job.trimmed_below_step
            if trimmed > before:
                self._save(job.name, meta)
                self._clean(changed)
                events.emit("trimmed", job=job.name, below_step=trimmed)
        return trimmed

    def reset(self, job_name: str, generation: int) -> None:
        check_names(job_name)
        with self._one_at_a_time:
            with self._changed:
                core = self._state.core
                job = core.job(job_name)
                refusal = core.check_generation(job, generation)
                if refusal is not None:
                    raise Refused(refusal)
                for session in self._state.sessions:
                    if any(stream.job == job_name for stream, _ in session.streams.values()):
                        session.end(Refusal(Reason.NOT_OPEN, f"job {job_name} was reset"))
                self._settle()
                while any(stream.durable < stream.appended for stream in job.streams.values()):
                    self._settle()  # a writer came back meanwhile
                changed = core.reset(job)
                meta = self._meta(job)
            self._save(job_name, meta)
            self._clean(changed)
            events.emit("reset", job=job_name, generation=generation)

    def save_later(self, job: JobState) -> None:
        """Something that the manifest keeps has changed."""
        self._janitor_work.put(partial(self._save_now, job))

    def _save_now(self, job: JobState) -> None:
        with self._one_at_a_time:
            with self._changed:
                meta = self._meta(job)
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

    @staticmethod
    def _meta(job: JobState) -> JobMeta:
        return JobMeta(
            generation=job.generation,
            trimmed_below_step=job.trimmed_below_step,
            streams={
                name: StreamMeta(stream.first, stream.durable, stream.quarantined)
                for name, stream in job.streams.items()
            },
        )

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
