"""Driver: carries out the effects of all jobs, on one asyncio loop.

It works in turns: the commands that have come since the last one are taken, what they have changed is made durable in
one transaction, and then it is published, log servers are asked, and all commands are answered. A turn ends with a
transition, so each state is durable and seen by itself. Nothing is taken while the store writes.

Log servers are asked beside it (`questions`); what they answer comes back as commands.
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
from services.coordinator.messages_text import waiting_for
from services.coordinator.parts import ROOT, by_job, row_key
from services.coordinator.questions import Questions
from services.coordinator.row import JobRow, LogServer
from services.coordinator.sharing import Sharing
from services.coordinator.snapshot import JobSnapshot
from services.coordinator.store import MetadataStore, StoreConflict, StoreFailed, Transaction
from services.coordinator.timing import Timing
from services.coordinator.views import measurements_of, status_of, summary_of, view_of
from swift import events
from swift._pb import coordinator_pb2 as pb
from swift.errors import UsageError

logger = logging.getLogger(__name__)

SOON_S = 0.05
"""How long what is new is not shown, if the state is as it was: n ranks that join are not n Views for each."""
TOLD_PER_S = 1024
"""... and longer, if so many watchers would be told of it in a second."""
SHOWN_S = 5.0
"""How long a View may name a rank as waited for that has reported, or is ready: to show each at once would wake all."""
JOBS_MAX = 1024
JOBS_SHOWN_MAX = 4096
"""In one answer, which gRPC's clients take up to 4 MiB of."""

STOPS = "the coordinator is shutting down"

T = TypeVar("T")


class Unavailable(Exception):
    """This coordinator is going down; another one will answer."""


class TooMany(Exception):
    """A limit of this coordinator would be passed."""


class NoSuchJob(Exception):
    """Nobody has joined a job of that name."""


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
        self._questions = Questions(logs, self.apply, self._fail)
        self._jobs: dict[str, Job] = {}
        self._revisions: dict[str, int] = {}
        """Of the part of each job that is written with all others: the store's."""
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        """Work that waits for a turn, and who waits for it."""
        self._effects: list[tuple[Job, m.Effect | _Show]] = []
        """Of this turn, once it is durable."""
        self._turn_ends = False
        """A state was entered in it."""
        self._turns: asyncio.Task[None] | None = None
        self._views: dict[str, pb.View] = {}
        self._shown_at: dict[str, float] = {}
        self._stopping = False
        self._unshown: set[str] = set()
        """Jobs of which there is something new, that will be shown soon."""
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._looked_at_logs: dict[str, float] = {}
        self._sharing: dict[str, Sharing] = {}
        self.apart = Apart()
        self._meetings = Meetings(clock())

    async def start(self) -> None:
        """Loads all jobs and says their effects again. A row that is damaged is that job's trouble: it is set apart.
        StoreFailed; UsageError: the log servers do not fit."""
        for name, parts in by_job(await self._store.read(ROOT)).items():
            values = {key: stored.value for key, stored in parts.items()}
            row = self.apart.row_of(name, values)
            if row is None:
                continue
            self._revisions[name] = parts[row_key(name)].revision
            kind = job_class(row.config)
            job = self._jobs[name] = kind(row, self.timing, self._clock(), self._log_servers, values)
            moved = self._relocated(job)
            self._publish(row)
            events.emit(
                "resumed", job=name, generation=row.generation, state=str(row.state), reason=row.reason
            )
            self._effects += [(job, effect) for effect in (*moved, *job.resume())]
        await self._in_turn(lambda: None)

    def _job(self, name: str) -> Job:
        """NoSuchJob, JobApart."""
        self.apart.check(name)
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
        for job in list(self._jobs.values()):
            self._step(job, tick)
            self._look_at_logs(job)
            self._show_who_is_late(job)
        self._meetings.look(self._clock(), self.timing.stall_s)

    def _look_at_logs(self, job: Job) -> None:
        """Whether the log servers are there, and how much room they have: asked all the time."""
        name, now = job.row.job, self._clock()
        due = now - self._looked_at_logs.get(name, -math.inf) >= self.timing.space_s
        if not job.row.state.is_over and due and not self._questions.under_way(name, "space"):
            self._looked_at_logs[name] = now
            self._questions.ask(job, "space", self._questions.space(job, job.row.generation))

    def _show_who_is_late(self, job: Job) -> None:
        shown, at = self._views[job.row.job], self._shown_at.get(job.row.job, -math.inf)
        if self._clock() - at >= SHOWN_S and shown.waiting_for != waiting_for(job.row):
            self._effects.append((job, m.PublishView()))

    def stop(self) -> None:
        """Ends the views under way and the questions to log servers."""
        self._stopping = True
        for watchers in self._watchers.values():
            for changed in watchers:
                changed.set()
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

    def jobs(self, may_see: Callable[[str], bool]) -> pb.JobsReply:
        """Those that the asker may see, as many as an answer takes."""
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
        return 0 if job is None else job.row.generation

    def snapshot(self) -> list[JobSnapshot]:
        """What every job stands at."""
        now = self._clock()
        return [JobSnapshot.of(job, now) for job in self._jobs.values()]

    async def views(self, name: str) -> AsyncGenerator[pb.View, None]:
        """The published view at once, then newer ones; a slow reader skips to the newest."""
        changed = asyncio.Event()
        self._watchers.setdefault(name, set()).add(changed)
        try:
            changed.set()
            while not self._stopping:
                await changed.wait()
                changed.clear()
                view = self._views.get(name)
                if view is not None:
                    yield view
        finally:
            self._watchers[name].discard(changed)
            if not self._watchers[name]:
                del self._watchers[name]

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
        answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = []
        self._turn_ends = False
        while self._queue and not self._turn_ends:
            work, answer = self._queue.popleft()
            try:
                answers.append((answer, work(), None))
            except Exception as error:  # noqa: BLE001  (for whoever waits for the answer)
                answers.append((answer, None, error))
        effects, self._effects = self._effects, []
        try:
            await self._make_durable({job.row.job: job for job, effect in effects if _persists(effect)})
        except Unavailable as unavailable:
            # Whatever was decided in this turn, a refusal as well, is as if it had not been.
            answers = [
                (answer, None, unavailable if bug is None or isinstance(bug, Refusal) else bug)
                for answer, _, bug in answers
            ]
        else:
            self._carry_out(effects)
        for answer, result, why_not in answers:
            if answer.done():  # nobody waits for it any more
                continue
            if why_not is None:
                answer.set_result(result)
            else:
                answer.set_exception(why_not)

    def _step(self, job: Job, command: m.Command) -> None:
        """(in a turn)"""
        self._check_up()
        try:
            effects = job.step(command, self._clock())
        except Refusal:
            raise
        except Exception as error:
            # Memory may be half-way; what is durable is not. Another process goes on from there.
            self._fail(f"{type(error).__name__} at {type(command).__name__} for job {job.row.job}: {error}")
            raise
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

    def _carry_out(self, effects: Sequence[tuple[Job, m.Effect | _Show]]) -> None:
        """(all of a turn, once it is durable)"""
        if self._stopping:
            return
        published: set[str] = set()
        asks = self._questions
        for job, effect in effects:
            match effect:
                case m.Persist():
                    self._after_durable(job.row, effect)
                case m.PublishView():
                    if job.row.job not in published:
                        self._publish(job.row)
                        published.add(job.row.job)
                    if effect.at_once:
                        self._show(job.row)
                case _Show():
                    self._show(job.row)
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
        """Another state or generation is shown at once; the rest a little later, with whatever has come by then."""
        shown = self._views.get(row.job)
        sharing = self._sharing.get(row.job)
        if sharing is not None and row.state.is_over:
            self._sharing.pop(row.job).end()
        elif sharing is not None and sharing.generation < row.generation:
            sharing.begin(row.generation)
        if shown is None or (row.generation, pb.State.Value(row.state)) != (shown.generation, shown.state):
            self._show(row)
        elif row.job not in self._unshown:
            self._unshown.add(row.job)
            watchers = len(self._watchers.get(row.job, ()))
            asyncio.get_running_loop().call_later(
                max(SOON_S, watchers / TOLD_PER_S), self._show_soon, row.job
            )

    def _show_soon(self, name: str) -> None:
        """In a turn: what is under way in memory may not be durable yet."""
        if name in self._unshown and not self._stopping and not self.failed.done():
            self._enqueue(lambda: self._effects.append((self._jobs[name], _Show()))).cancel()

    def _show(self, row: JobRow) -> None:
        """The View is made, and all that watch the job look at it."""
        self._unshown.discard(row.job)
        self._views[row.job] = view_of(row)
        self._shown_at[row.job] = self._clock()
        for changed in self._watchers.get(row.job, ()):
            changed.set()


def _persists(effect: m.Effect | _Show) -> bool:
    return isinstance(effect, m.Persist)
