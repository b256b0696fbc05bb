"""Changes of whole jobs: fence, trim, reset, drop; the janitor, which unlinks dropped files; alarms, ages, moves."""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from swift_ft import events
from swift_ft.log.manifest import JobMeta
from swift_ft.log.protocol import Reason
from swift_ft_services.logserver import procedures
from swift_ft_services.logserver.append_session import refusal_of
from swift_ft_services.logserver.cold import is_folder
from swift_ft_services.logserver.core import JobState, Refused, StreamState
from swift_ft_services.logserver.procedures import (
    Clean,
    Forget,
    Procedure,
    Rest,
    Save,
    Settle,
    Step,
    meta_of,
)
from swift_ft_services.logserver.quotas import Notice
from swift_ft_services.logserver.segments import JobDamaged, StorageError
from swift_ft_services.logserver.state import ServerState, check_names
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import RecoveredJob


def tell(news: Iterable[Notice]) -> None:
    """(without the server's lock) Emits the events."""
    for notice in news:
        events.emit(notice.event, **notice.fields)


# Free disk space, as reported by the system; the alarms depend on it.


class DiskWatch:
    """Checks the free disk space. Called without the server's lock, by any thread."""

    def __init__(
        self, state: ServerState, free_bytes: Callable[[], int | None], clock: Callable[[], float]
    ) -> None:
        self.free_bytes = free_bytes
        self._state = state
        self._clock = clock

    def check(self) -> None:
        free = self.free_bytes()
        with self._state.changed:
            news = self._state.look_at_disk(free, self._clock())
        tell(news)

    def files_removed(self) -> None:
        """Checks the disk after files were removed: a write may be tried at once."""
        with self._state.changed:
            self._state.space.files_removed(self._clock())
        self.check()


_REST_S = 0.0002


def rest(seconds: float | None = None) -> None:
    """(without the server's lock) Pauses between two pieces of long work, so that waiting threads get the lock. (A lock
    that is taken again at once usually goes to the thread that just released it.)"""
    time.sleep(_REST_S if seconds is None else seconds)


T = TypeVar("T")
_FREED_AT_ONCE = 2000


class Administration:
    """Operations that change a whole job. One at a time; each is durable before it is answered."""

    def __init__(
        self,
        state: ServerState,
        wait_durable: Callable[[str], None],
        watch: DiskWatch,
        clock: Callable[[], float],
    ) -> None:
        """``wait_durable(job)``: as `Committer.wait_durable`."""
        self._state = state
        self._wait_durable = wait_durable
        self._watch = watch
        self._clock = clock
        self._changed = state.changed
        self._one_at_a_time = threading.Lock()
        self._removing = threading.Lock()  # removes a stream's files, never those of a later job of that name
        self._janitor_work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._janitor = threading.Thread(target=self._janitor_loop, name="janitor", daemon=True)

    def start(self) -> None:
        self._janitor.start()

    def stop(self) -> None:
        """Ends the janitor after its queued work."""
        self._janitor_work.put(None)
        self._janitor.join()

    def fence(self, job_name: str, generation: int, held: bool = False) -> None:
        self._carry_out(procedures.fence(self._state, job_name, generation, self._clock(), held=held))

    def trim(self, job_name: str, below_step: int, generation: int = 0) -> int:
        check_names(job_name)
        with self._changed:
            self._state.check_apart(job_name)
            job = self._state.core.jobs.get(job_name)
        return self._trim(job, below_step, generation) if job is not None else 0

    def trim_later(self, job: JobState) -> None:
        """Queues a waiting trim: a reader that may have held it up has ended."""
        self._janitor_work.put(partial(self._trim_waiting, job))

    def _trim_waiting(self, job: JobState) -> None:
        try:
            self._trim(job, 0)
        except Refused as refused:
            events.emit("trim_failed", job=job.name, reason=str(refused))

    def _trim(self, job: JobState, below_step: int, generation: int = 0) -> int:
        return self._carry_out(procedures.trim(self._state, job, below_step, generation))

    def reset(self, job_name: str, generation: int, number: int) -> None:
        self._carry_out(procedures.reset(self._state, job_name, generation, number))

    def _carry_out(self, procedure: Procedure[T]) -> T:
        """Runs a procedure, executing its steps. Raises Refused, also if a step fails."""
        with self._one_at_a_time:
            while True:
                try:
                    with self._changed:
                        step = next(procedure)
                        if isinstance(step, Settle):
                            self._await_durable(step.job, procedure)
                except StopIteration as done:
                    result: T = done.value
                    return result
                try:
                    self._do(step)
                except Refused as refused:
                    with self._changed:
                        procedure.throw(refused)
                    raise

    def _do(self, step: Step) -> None:
        match step:
            case Save():
                self._save(step.job, step.meta)
            case Clean():
                self._clean(step.streams)
            case Forget():
                self._forget(step.job)
            case Notice():
                tell([step])
            case Rest():
                rest()
                for some in step.garbage:
                    _empty(some)

    def drop(self, job_name: str, *, force: bool, why: str = "asked for") -> tuple[int, int]:
        """Drops a job. Returns how many (records, bytes) are forgotten."""
        return self._carry_out(procedures.drop(self._state, job_name, self._clock(), force=force, why=why))

    def _forget(self, job: str) -> None:
        try:
            with self._removing:
                remove_files = self._state.storage.drop(job)
        except StorageError as error:
            raise Refused(*refusal_of(error)) from None
        self._janitor_work.put(partial(self._remove_files, job, remove_files))

    def _remove_files(self, job_name: str, remove_files: Callable[[], None]) -> None:
        try:
            remove_files()
        except OSError as error:  # the next start removes them
            events.emit("not_removed", job=job_name, reason=str(error))
        self._watch.files_removed()

    def save_later(self, job: JobState) -> None:
        self._janitor_work.put(partial(self._save_now, job))

    def _save_now(self, job: JobState) -> None:
        with self._one_at_a_time:
            with self._changed:
                if self._state.core.jobs.get(job.name) is not job:
                    return  # dropped meanwhile
                meta = meta_of(job)
            try:
                self._save(job.name, meta)
            except Refused as refused:
                events.emit("manifest_not_saved", job=job.name, reason=str(refused))

    def save_all(self) -> None:
        """(at shutdown) Saves all manifests, which record what each stream must hold at the next start."""
        for job in self._state.core.jobs.values():
            if job.generation:
                self._save_now(job)

    def _await_durable(self, job: str, procedure: Procedure[T]) -> None:
        self._wait_durable(job)
        if self._state.failed:
            procedure.throw(Refused(Reason.CLOSED, self._state.failed))

    def _save(self, job: str, meta: JobMeta) -> None:
        try:
            self._state.storage.save(job, meta)
        except JobDamaged as damaged:
            with self._changed:
                news = self._state.set_apart(job, str(damaged))
            tell([news])
            raise Refused(Reason.APART, str(damaged)) from None
        except StorageError as error:
            raise Refused(*refusal_of(error)) from None

    def _clean(self, streams: Iterable[StreamState]) -> None:
        for stream in streams:
            self._janitor_work.put(partial(self._remove, stream, stream.first))

    def _remove(self, stream: StreamState, first: int) -> None:
        try:
            with self._removing:
                if not self._is_there(stream):
                    return  # dropped meanwhile, with its files
                freed = self._state.storage.remove(stream.job, stream.name, first)
        except StorageError as error:
            events.emit("not_removed", job=stream.job, stream=stream.name, reason=str(error))
            return
        if freed:
            events.emit("freed", job=stream.job, stream=stream.name, bytes=freed)
            self._watch.files_removed()

    def _is_there(self, stream: StreamState) -> bool:
        with self._changed:
            job = self._state.core.jobs.get(stream.job)
            return job is not None and job.streams.get(stream.name) is stream

    def _janitor_loop(self) -> None:
        while True:
            work = self._janitor_work.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # a bug: the rest of the work continues
                logging.getLogger(__name__).exception("the janitor failed")


def _empty(garbage: dict[Any, Any]) -> None:
    """Empties a dictionary in pieces: a million records at once would block all threads for a third of a second."""
    while garbage:
        for _ in range(min(_FREED_AT_ONCE, len(garbage))):
            garbage.popitem()
        rest()


# Periodic work: alarms follow the disk space, and unused logs age.
#
# One thread. It checks the disk twice a second. A job that was not used for a while (it has ended, or waits) gives back
# the space reserved by its files. With an age limit (off by default) jobs that were unused for that long are dropped; a
# job in use is never dropped by age.

_EVERY_S = 0.5
_AGES_EVERY_S = 60.0
_LEFT_S = 10.0
"""Seconds after which an unused job's reserved space is freed."""
_FROZEN_EVERY = 20_000
_SEEN_IDLE_S = (
    3600.0  # ages use the wall clock, which may be wrong: the server must have seen the job idle, too
)


class Retention:
    """Thread for periodic work. ``start`` and ``stop`` are called by the main thread."""

    def __init__(
        self,
        state: ServerState,
        administration: Administration,
        watch: DiskWatch,
        age_s: Callable[[str], float | None],
        clock: Callable[[], float],
    ) -> None:
        """``age_s(job)``: returns the seconds since its files were last modified."""
        self._state = state
        self._administration = administration
        self._watch = watch
        self._age_s = age_s
        self._clock = clock
        self._stop = threading.Event()
        self._frozen = 0
        self._left: set[str] = set()
        """Idle jobs that have given back their reserved space."""
        self._thread = threading.Thread(target=self._loop, name="retention", daemon=True)

    def start(self) -> None:
        self._keep_records_out_of_collections()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        keep_s = self._state.config.keep_s
        ages_due_s = 0.0
        while not self._stop.wait(_EVERY_S):
            self._keep_records_out_of_collections()
            ages_due_s -= _EVERY_S
            drop_old = bool(keep_s) and ages_due_s <= 0
            if drop_old:
                ages_due_s = min(_AGES_EVERY_S, keep_s)
            try:
                self._watch.check()
                self.give_back()
                if drop_old:
                    self.drop_old(keep_s)
            except Exception:  # without this thread an alarm would never end
                logging.getLogger(__name__).exception("looking at the disk, or for old jobs, failed")

    def _keep_records_out_of_collections(self) -> None:
        """Excludes recovered records from garbage collection. Python's collector would stop all threads while it scans
        them: half a second for half a million records, which are in no cycle."""
        records = sum(job.tally.records for job in list(self._state.core.jobs.values()))
        if abs(records - self._frozen) >= _FROZEN_EVERY:
            self._frozen = records
            gc.collect(1)
            gc.freeze()

    def give_back(self) -> None:
        """Frees the reserved space of jobs that are not written or read."""
        with self._state.changed:
            now = self._clock()
            idle = {
                name for name in self._state.core.jobs if (self._state.idle_s(name, now) or 0.0) >= _LEFT_S
            }
        for name in idle - self._left:
            self._state.storage.give_back(name)
        self._left = idle

    def drop_old(self, keep_s: float) -> None:
        for name in list(self._state.core.jobs):
            age_s = self._age_s(name)
            if age_s is None or age_s < keep_s:
                continue
            with self._state.changed:
                idle_s = self._state.idle_s(name, self._clock())
            if idle_s is None or idle_s < min(keep_s, _SEEN_IDLE_S):
                continue
            try:
                self._administration.drop(name, force=False, why=f"not touched for {age_s:.0f} s")
            except Refused as refused:
                events.emit("not_dropped", job=name, reason=str(refused))


# Moves to the cold tier.
#
# One thread, if the server has one. It begins at the low mark of a quota or of the disk, so that no alarm asks for a
# checkpoint as long as the store keeps pace. If it does not, all is as without it.

_TIER_EVERY_S = 0.2
_TIER_PAUSE_S, _TIER_PAUSE_S_MAX = 1.0, 30.0


class Tiering:
    """Thread that moves sealed segments of jobs that need space. ``start`` and ``stop``: by the main thread."""

    def __init__(self, state: ServerState, storage: DirectoryStorage, watch: DiskWatch) -> None:
        self._state = state
        self._storage = storage
        self._watch = watch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="tiering", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the move under way."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        work = [self._storage.clean_left, self._storage.clean_cold, self._move]
        pause_s, told = _TIER_PAUSE_S, ""
        while not self._stop.wait(_TIER_EVERY_S):
            try:
                for each in list(work):
                    each()
                    if each == self._storage.clean_left:
                        work.remove(each)
                pause_s, told = _TIER_PAUSE_S, ""
            except (OSError, StorageError) as error:
                reason = str(getattr(error, "strerror", None) or error)
                if reason != told:
                    events.emit("not_moved", reason=reason)
                told = reason
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _TIER_PAUSE_S_MAX)

    def _move(self) -> None:
        """Moves segments until there is room again, or nothing to move."""
        while not self._stop.is_set():
            with self._state.changed:
                jobs = self._state.core.jobs
                known = [jobs[name] for name in self._state.space.to_move() if name in jobs]
            # A large job may have nothing to move; then others give room.
            if not any(self._move_of(job) for job in known):
                return

    def _move_of(self, job: JobState) -> bool:
        """Moves one segment of the job. Returns whether there was one."""
        moved = self._storage.move_oldest(job.name)
        if moved is None:
            return False
        name, below = moved
        with self._state.changed:
            stream = job.streams.get(name)
            if self._state.core.jobs.get(job.name) is not job or stream is None:
                return True  # dropped meanwhile
            before = stream.cold_bytes
            stream.moved(below)
            size = stream.cold_bytes - before
            self._state.space.recount(self._state.core)
        events.emit("moved", job=job.name, stream=name, bytes=size, below=below)
        self._watch.files_removed()
        return True


# What lost servers have moved to the same store.


class LostServers:
    """Jobs by which the records are read that lost servers have moved: each is of one server, and is not written."""

    def __init__(
        self, state: ServerState, storage: DirectoryStorage, take: Callable[[RecoveredJob], None]
    ) -> None:
        """`take`: as at the start of a server, of a job that was recovered."""
        self._state = state
        self._storage = storage
        self._take = take
        self._lock = threading.Lock()

    def job(self, job: str, cold: str) -> str:
        """Returns the name of the job that has these records; they are looked up the first time. Raises Refused."""
        name = f"{job}@{cold}"
        with self._lock, self._asking(job, cold):
            if name not in self._state.core.jobs:
                found = self._storage.read_lost(job, cold)
                if found.streams:
                    with self._state.changed:
                        self._take(found)
        return name

    @contextmanager
    def _asking(self, job: str, cold: str) -> Iterator[None]:
        """Checks the names, and turns the store's errors into Refused."""
        check_names(job)
        if not is_folder(cold):
            raise Refused(Reason.INVALID, f"{cold[:80]}: no server moves records there")
        try:
            yield
        except StorageError as error:
            raise Refused(Reason.CORRUPT, str(error)) from None
        except OSError as error:
            raise Refused(Reason.BUSY, f"the object store: {error.strerror}") from None

    def drop_all(self, job: str) -> None:
        """(the job is dropped) Removes what lost servers have moved of it, as far as it was read here. That happens
        once the store answers."""
        with self._state.changed:
            names = [name for name in self._state.core.jobs if name.startswith(f"{job}@")]
        with self._lock:
            for name in names:
                self._drop(job, name.partition("@")[2])

    def drop(self, job: str, cold: str) -> None:
        """Removes these records, also from the store. Raises Refused, also if they are not the job's."""
        with self._lock, self._asking(job, cold):
            self._storage.check_lost(job, cold)
            self._drop(job, cold)

    def _drop(self, job: str, cold: str) -> None:
        with self._state.changed:
            self._state.core.jobs.pop(f"{job}@{cold}", None)
            self._state.space.recount(self._state.core)
        self._storage.drop_lost(job, cold)
