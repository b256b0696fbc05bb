"""Driver: carries out the effects of all jobs, on one asyncio loop.

It works in turns: the commands that have come since the last one are taken, what they have changed is made durable in
one transaction, and then it is published, log servers are asked, and all commands are answered. A turn ends with a
transition, so each state is durable and seen by itself. Nothing is taken while the store writes.

Log servers are asked beside it (`questions`); what they answer comes back as commands.

An error in the core of one job is that job's trouble. Its memory may be half-way, so what a turn has changed in it is
dropped, and the job is read again from the store, as after a restart.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from services.coordinator import commands as m
from services.coordinator import origins
from services.coordinator.apart import Apart
from services.coordinator.command_checks import is_stale
from services.coordinator.commands import Refusal
from services.coordinator.communicators import job_class
from services.coordinator.core import Job
from services.coordinator.lives import starts_again
from services.coordinator.logs import LogControl
from services.coordinator.meeting import Meetings
from services.coordinator.parts import ROOT, by_job, key_of, row_key
from services.coordinator.published import Published
from services.coordinator.questions import Questions, Unavailable
from services.coordinator.row import JobRow, LogServer
from services.coordinator.sharing import Sharing
from services.coordinator.snapshot import JobSnapshot
from services.coordinator.store import MetadataStore, StoreConflict, Stored, StoreFailed, Transaction
from services.coordinator.timing import Timing
from services.coordinator.views import measurements_of, status_of, summary_of
from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.errors import UsageError

logger = logging.getLogger(__name__)

JOBS_MAX = 1024
JOBS_SHOWN_MAX = 4096
"""In one answer, which gRPC's clients take up to 4 MiB of."""

STOPS = "the coordinator is shutting down"

T = TypeVar("T")


class TooMany(Exception):
    """A limit of this coordinator would be passed."""


class NoSuchJob(Exception):
    """Nobody has joined a job of that name."""


class _Error(Exception):
    """An error was made with a job."""


class _Show:
    """An effect of the driver's own: what was not shown yet."""


class Driver:
    """All jobs of one coordinator. Everything runs on the loop that called `start`."""

    def __init__(
        self,
        store: MetadataStore,
        logs: LogControl,
        timing: Timing,
        log_servers: list[LogServer],
        *,
        copies: int = 1,
        clock: Callable[[], float] = events.now,
        caught_up: Callable[[], bool] = lambda: True,
        after_durable: Callable[[JobRow, m.Persist], None] = lambda row, persist: None,
        jobs_max: int = JOBS_MAX,
    ) -> None:
        self.timing = timing
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why this process must end: its memory is ahead of its disk."""
        self._store = store
        self._log_servers = log_servers
        self._copies = copies
        self._clock = clock
        self._caught_up = caught_up
        """Whether all that had come was read, at some moment since this was asked last."""
        self._after_durable = after_durable
        self._jobs_max = jobs_max
        self._questions = Questions(logs, self.apply, self._spoil)
        self._jobs: dict[str, Job] = {}
        self._revisions: dict[str, int] = {}
        """Of the part of each job that is written with all others: the store's."""
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        """Work that waits for a turn, and who waits for it."""
        self._effects: list[tuple[Job, m.Effect | _Show]] = []
        """Of this turn, once it is durable."""
        self._turn_ends = False
        """A state was entered in it, or an error was made."""
        self._touched: set[str] = set()
        """Jobs that the work under way has given a command to."""
        self._spoilt: dict[str, str] = {}
        """Jobs with which an error was made in this turn, and which."""
        self._going_back: dict[str, int] = {}
        """Jobs that are read again from the store at this moment, and their generations."""
        self._turns: asyncio.Task[None] | None = None
        self._published = Published(clock, self._show_soon)
        self._stopping = False
        self._looked_at_logs: dict[str, float] = {}
        self._sharing: dict[str, Sharing] = {}
        self.apart = Apart()
        self._meetings = Meetings(clock())

    async def start(self) -> None:
        """Loads all jobs and says their effects again. A row that is damaged is that job's trouble: it is set apart.
        StoreFailed; UsageError: the log servers do not fit."""
        for name, parts in by_job(await self._store.read(ROOT)).items():
            self._load(name, parts)
        await self._in_turn(lambda: None)

    def _load(self, name: str, parts: Mapping[str, Stored]) -> None:
        """The job that these are all parts of goes on, or is set apart. Raises UsageError as `_relocated`."""
        values = {key: stored.value for key, stored in parts.items()}
        row = self.apart.row_of(name, values)
        if row is None:
            return
        try:
            kind = job_class(row.config)
            job = kind(row, self.timing, self._clock(), self._log_servers, values)
            effects = [*self._relocated(job), *job.resume()]
            self._published.show(row)
        except UsageError:
            raise
        except Exception as error:
            logger.exception("job %s, as it is stored", name)
            self.apart.put(name, f"{type(error).__name__}: {error}")
            return
        self._jobs[name], self._revisions[name] = job, parts[row_key(name)].revision
        events.emit("resumed", job=name, generation=row.generation, state=str(row.state), reason=row.reason)
        self._effects += [(job, effect) for effect in effects]

    def _job(self, name: str) -> Job:
        """NoSuchJob, JobApart; Unavailable: it is being read again."""
        self.apart.check(name)
        if name in self._going_back:
            raise Unavailable(f"job {name} goes back to what is durable of it")
        job = self._jobs.get(name)
        if job is None:
            raise NoSuchJob(name)
        return job

    def _relocated(self, job: Job) -> list[m.Effect]:
        """Log servers may come back under other addresses; a stream's place is a position in their list."""
        row = job.row
        named = {server.address for server in self._log_servers}
        known = {server.address: number for number, server in enumerate(row.log_servers)}
        if row.state.is_over or set(row.addresses()) <= named <= set(known):
            return []
        # Those that are lost may be left out. One that came for another one is named in its place, or as it came.
        for numbers in (job.places.by_origin(), row.living(), range(len(row.log_servers))):
            moved = dict(zip(numbers, self._log_servers, strict=False))
            others = [known.get(server.address, number) for number, server in moved.items()]
            if len(named) == len(numbers) and others == list(moved):
                return job.relocate(moved)
        kept = ",".join(row.log_servers[number].address for number in job.places.by_origin())
        raise UsageError(
            f"--log-servers names {','.join(sorted(named))}, job {row.job} is kept on {kept}: "
            "name as many, in the same order; those that are lost may be left out"
        )

    async def run_ticks(self) -> None:
        while True:
            await asyncio.sleep(self.timing.tick_s)
            with contextlib.suppress(Unavailable):  # `failed`, or `stop`, says so
                await self.tick()

    async def tick(self) -> None:
        """Leases may have run out: it is looked at once all that had come before was taken. The log servers are asked
        how they are."""
        await self._in_turn(self._tick)

    def _tick(self) -> None:
        tick = m.Tick(behind=not self._caught_up())
        for job in [job for job in self._jobs.values() if not job.row.state.is_over]:
            with contextlib.suppress(_Error):
                self._step(job, tick)
                self._look_at_logs(job)
                if self._published.is_outdated(job.row):
                    self._effects.append((job, m.PublishView()))
        self._meetings.look(self._clock(), self.timing.stall_s)

    def _look_at_logs(self, job: Job) -> None:
        """Whether the log servers are there, and how much room they have: asked all the time."""
        name, now = job.row.job, self._clock()
        due = now - self._looked_at_logs.get(name, -math.inf) >= self.timing.space_s
        if due and not self._questions.under_way(name, "space"):
            self._looked_at_logs[name] = now
            self._questions.ask(job, "space", self._questions.space(job, job.row.generation))

    def stop(self) -> None:
        """Ends the views under way and the questions to log servers."""
        self._stopping = True
        self._published.wake_all()
        for sharing in self._sharing.values():
            sharing.end()
        self._questions.stop()
        for _, answer in self._queue:
            if not answer.done():
                answer.set_exception(Unavailable(STOPS))
        self._queue.clear()

    # --- for the servicer ---

    async def join(self, name: str, join: m.Join, may_see: Callable[[str], bool] = lambda _job: True) -> int:
        """The generation that the rank is in. `may_see`: whether the caller may know of another job. Raises as `apply`,
        and TooMany."""
        return await self._in_turn(lambda: self._join(name, join, may_see))

    def _join(self, name: str, join: m.Join, may_see: Callable[[str], bool]) -> int:
        self.apart.check(name)
        job = self._jobs.get(name)
        if job is None or starts_again(job.row, join):
            live = sum(not other.row.state.is_over for other in self._jobs.values())
            if live >= self._jobs_max:
                raise TooMany(f"{live} jobs are under way here: no more (--jobs-max)")
            if origin := origins.wanted(None if job is None else job.row, join):
                other = self._jobs.get(origin) if may_see(origin) else None
                chosen = origins.chosen(name, origin, None if other is None else other.row, join)
                join = replace(join, origin=chosen)
        if job is None:
            kind = job_class(join.config)
            job = kind.create(name, self._log_servers, join, self.timing, self._clock(), self._copies)
            self._step(job, join)
            self._jobs[name] = job
        else:
            self._step(job, join)
        return job.row.generation

    async def apply(self, name: str, command: m.Command) -> Job:
        """Takes a command; when it returns, all that it changed is durable. Refusal, NoSuchJob, Unavailable."""

        def work() -> Job:
            job = self._job(name)
            self._step(job, command)
            return job

        return await self._in_turn(work)

    async def status(self, name: str) -> pb.StatusReply:
        """In a turn: it shows nothing that is not durable."""
        return await self._in_turn(lambda: status_of(self._job(name), self._clock()))

    async def jobs(self, may_see: Callable[[str], bool]) -> pb.JobsReply:
        """Those that the asker may see, as many as an answer takes. In a turn, as `status`."""
        return await self._in_turn(lambda: self._listed(may_see))

    def _listed(self, may_see: Callable[[str], bool]) -> pb.JobsReply:
        seen = [job for name, job in sorted(self._jobs.items()) if may_see(name)]
        seen.sort(key=lambda job: job.row.state.is_over)
        shown = [summary_of(job) for job in seen]
        shown += self.apart.summaries(may_see)
        return pb.JobsReply(jobs=shown[:JOBS_SHOWN_MAX], left_out=max(0, len(shown) - JOBS_SHOWN_MAX))

    def measurements(self, name: str) -> pb.MeasurementsReply:
        return measurements_of(self._job(name))

    def sharing(self, name: str, sender: m.Sender, generation: int, *, changes: bool) -> Sharing | None:
        """What the members of that generation share; None: it is over. Who is no member and says so (a spare) may only
        ask. Refusal, NoSuchJob."""
        job = self._job(name)
        asks = not (changes or sender.incarnation)
        stale = generation != job.row.generation if asks else is_stale(job.row, sender, generation)
        if stale or job.row.state.is_over:
            return None
        if name not in self._sharing:
            self._sharing[name] = Sharing(generation, job.row.wanted)
        return self._sharing[name]

    def meet(self, name: str, request: pb.MeetRequest) -> pb.MeetReply:
        """A launcher without a number. Refusal, TooMany."""
        job = self._jobs.get(name)
        if name not in self._meetings and len(self._meetings) >= self._jobs_max:
            raise TooMany(f"machines of {self._jobs_max} jobs are here: no more (--jobs-max)")
        return self._meetings.say(request, self._clock(), over=None if job is None else job.row.state.is_over)

    def generation_of(self, name: str) -> int:
        """0: nobody knows the job."""
        job = self._jobs.get(name)
        return self._going_back.get(name, 0) if job is None else job.row.generation

    async def snapshot(self) -> list[JobSnapshot]:
        """What every job stands at. In a turn, as `status`: what became durable before has been told of as well."""
        return await self._in_turn(
            lambda: [JobSnapshot.of(job, self._clock()) for job in self._jobs.values()]
        )

    def views(self, name: str) -> AsyncGenerator[pb.View, None]:
        """As `Published.views`, until this coordinator goes down, or the job is set apart."""
        return self._published.views(name, lambda: self._stopping or name in self.apart)

    # --- turns ---

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """What `work` gives, or raises, once all that it has changed is durable."""
        self._check_up()
        return await self._enqueue(work)

    def _enqueue(self, work: Callable[[], T]) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append((work, answer))
        if self._turns is None:
            self._turns = asyncio.create_task(self._take_turns())
        return answer

    def _check_up(self) -> None:
        """Raises Unavailable."""
        if self.failed.done():
            raise Unavailable(self.failed.result())
        if self._stopping:
            raise Unavailable(STOPS)

    async def _take_turns(self) -> None:
        try:
            while self._queue:
                await self._take_turn()
        except Exception as error:
            logger.exception("in a turn")
            self._fail(f"{type(error).__name__} in a turn: {error}")
        finally:
            self._turns = None

    async def _take_turn(self) -> None:
        done: list[tuple[asyncio.Future[Any], Any, Exception | None, set[str]]] = []
        self._turn_ends = False
        while self._queue and not self._turn_ends:
            work, answer = self._queue.popleft()
            self._touched = set()
            try:
                done.append((answer, work(), None, self._touched))
            except Exception as error:  # noqa: BLE001  (for whoever waits for the answer)
                done.append((answer, None, error, self._touched))
        spoilt, self._spoilt = self._spoilt, {}
        answers = [
            (answer, result, why_not)
            if touched.isdisjoint(spoilt)
            else (answer, None, Unavailable(f"job {', '.join(touched)} goes back to what is durable of it"))
            for answer, result, why_not, touched in done
        ]
        effects = [(job, effect) for job, effect in self._effects if job.row.job not in spoilt]
        self._effects = []
        try:
            await self._make_durable({job.row.job: job for job, effect in effects if _persists(effect)})
        except Unavailable as unavailable:
            # Whatever was decided in this turn, a refusal as well, is as if it had not been.
            answers = [
                (answer, None, unavailable if bug is None or isinstance(bug, Refusal) else bug)
                for answer, _, bug in answers
            ]
        else:
            spoilt |= self._carry_out(effects)
        for name, why in spoilt.items():
            await self._go_back(name, why)
        for answer, result, why_not in answers:
            if answer.done():  # nobody waits for it any more
                continue
            if why_not is None:
                answer.set_result(result)
            else:
                answer.set_exception(why_not)

    async def _go_back(self, name: str, error: str) -> None:
        """To what is durable of a job with which an error was made."""
        self._going_back[name] = self.generation_of(name)
        self._jobs.pop(name, None)
        self._questions.forget(name)
        events.emit("job_error", job=name, reason=error)
        try:
            parts = await self._store.read(key_of(name, ""))
        except StoreFailed as failure:
            self._fail(str(failure))
            return
        finally:
            del self._going_back[name]
        if parts and not self.apart.is_repeated(name, error, self._clock()):
            self._load(name, parts)
            self._enqueue(lambda: None).cancel()  # its effects are of the next turn
        if name in self.apart:
            if name in self._sharing:
                self._sharing.pop(name).end()
            self._published.wake(name)

    def _step(self, job: Job, command: m.Command) -> None:
        """(in a turn) Refusal; _Error: the job is spoilt."""
        self._check_up()
        name = job.row.job
        self._touched.add(name)
        if name in self._spoilt:
            raise _Error
        try:
            effects = job.step(command, self._clock())
        except Refusal:
            raise
        except Exception as error:
            logger.exception("job %s, at %s", name, type(command).__name__)
            self._spoilt[name] = f"{type(error).__name__} at {type(command).__name__}: {error}"
            self._turn_ends = True
            raise _Error from error
        self._effects += [(job, effect) for effect in effects]
        self._turn_ends = self._turn_ends or any(
            isinstance(effect, m.Persist) and effect.entered is not None for effect in effects
        )

    async def _make_durable(self, jobs: Mapping[str, Job]) -> None:
        """Unavailable: it cannot be, and this process must end."""
        self._check_up()
        puts, deletes = dict[str, str](), list[str]()
        for job in jobs.values():
            changed, gone = job.changes.take()
            puts |= changed
            deletes += gone
        if not puts:
            return
        expected = {row_key(name): self._revisions.get(name, 0) for name in jobs}
        try:
            revision = await self._store.commit(Transaction(expected=expected, puts=puts, deletes=deletes))
        except (StoreConflict, StoreFailed) as error:
            reason = f"job {', '.join(jobs)} cannot be made durable: {error}"
            self._fail(reason)
            raise Unavailable(reason) from error
        self._revisions.update(dict.fromkeys(jobs, revision))

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    # --- effects ---

    def _spoil(self, name: str, error: str) -> None:
        """An error was made with this job, outside of a turn."""
        if name in self._jobs and not self._stopping and not self.failed.done():
            self._enqueue(lambda: self._spoilt.setdefault(name, error)).cancel()

    def _carry_out(self, effects: Sequence[tuple[Job, m.Effect | _Show]]) -> dict[str, str]:
        """(all of a turn, once it is durable) Jobs that cannot be shown, and why."""
        spoilt: dict[str, str] = {}
        if self._stopping:
            return spoilt
        published: set[str] = set()
        for job, effect in effects:
            try:
                self._carry_out_one(job, effect, published)
            except Exception as error:
                logger.exception("job %s, at %s", job.row.job, type(effect).__name__)
                spoilt[job.row.job] = f"{type(error).__name__} at {type(effect).__name__}: {error}"
        return spoilt

    def _carry_out_one(self, job: Job, effect: m.Effect | _Show, published: set[str]) -> None:
        asks = self._questions
        match effect:
            case m.Persist():
                self._after_durable(job.row, effect)
            case m.PublishView():
                if job.row.job not in published:
                    self._publish(job.row)
                    published.add(job.row.job)
                if effect.at_once:
                    self._published.show(job.row)
            case _Show():
                self._published.show(job.row)
            case m.Emit():
                events.emit(effect.event, **effect.fields)
            case m.FenceLogs():
                asks.ask(job, "fence", asks.fence(job, effect.generation))
            case m.FetchInventory():
                asks.ask(job, "inventory", asks.inventory(job, effect.generation))
            case m.ResetLogs():
                asks.ask(job, "reset", asks.reset(job, effect.generation))
            case m.TrimLogs():
                asks.ask(job, "trim", asks.trim(job, effect.below_step))

    def _publish(self, row: JobRow) -> None:
        sharing = self._sharing.get(row.job)
        if sharing is not None and row.state.is_over:
            self._sharing.pop(row.job).end()
        elif sharing is not None and sharing.generation < row.generation:
            sharing.begin(row.generation)
        self._published.publish(row)

    def _show_soon(self, name: str) -> None:
        """In a turn: what is under way in memory may not be durable yet."""

        def show() -> None:
            if name in self._jobs:
                self._effects.append((self._jobs[name], _Show()))

        if not self._stopping and not self.failed.done():
            self._enqueue(show).cancel()


def _persists(effect: m.Effect | _Show) -> bool:
    return isinstance(effect, m.Persist)
