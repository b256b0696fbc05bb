"""Calls of the coordinator to a job's log servers, and how long they are retried.

Calls block, so they run in threads; their results become commands for the job.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TypeVar

from swift_ft import events
from swift_ft._pb import log_pb2
from swift_ft.errors import (
    AccessDenied,
    JobSetApart,
    LogUnavailable,
    StaleGeneration,
    SwiftError,
    UnknownJob,
)
from swift_ft.log import admin
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import log_placement
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.log_placement import RESETS, Call
from swift_ft_services.threads import NONE_LEFT, Threads


class LogServers:
    """Calls to one log server each. They block; the driver runs them in threads. They raise what `swift_ft.log.admin`
    does."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def fence(self, address: str, job: str, generation: int, held: bool = False) -> str:
        """Fences the job, durably: from now on the server accepts only appends of `generation`. Returns where it has
        what it moves to an object store. Raises StaleGeneration; raises UnknownJob if `held` and the server holds no
        earlier generation of the job."""
        return admin.fence(address, job, generation, self._timeout_s, held=held)

    def trim(self, address: str, job: str, generation: int, below_step: int, cold: str = "") -> None:
        """Trims under `generation`, which the server must hold. `cold`: drops instead what a lost server has moved
        there. Raises StaleGeneration."""
        admin.trim(address, job, below_step, self._timeout_s, cold, generation=generation)

    def reset(self, address: str, job: str, generation: int, number: int) -> str:
        """Drops every record of the job, once for each `number` of a generation, which the server must hold. Returns as
        `fence` does. Raises StaleGeneration, UnknownJob."""
        return admin.reset(address, job, generation, self._timeout_s, number=number)

    def space(self, address: str, job: str, generation: int) -> log_pb2.JobStatus | None:
        found = admin.space(address, job, generation, self._timeout_s)
        if found is not None and found.apart:
            raise JobSetApart(found.apart)
        return found

    def inventory(self, address: str, job: str, cold: str = "") -> list[StreamSummary]:
        """Returns a summary of every stream of the job; empty for an unknown job. `cold`: of those that a lost server
        has moved there."""
        return [summary_of(stream) for stream in admin.inventory(address, job, self._timeout_s, cold)]


def _words(address: str, job: str, error: SwiftError) -> str:
    """Returns an error of a log server's as one line that names it."""
    if isinstance(error, StaleGeneration):
        return (
            f"log server {address} is ahead of this coordinator for job {job} ({error}): "
            "start the job under another name, or with an empty log"
        )
    named = isinstance(error, AccessDenied | LogUnavailable) or str(error).startswith("log server")
    return str(error) if named else f"log server {address}: {error}"


def _refusal(generation: int, address: str, job: str, error: SwiftError) -> m.LogsRefused:
    unfit, reason = isinstance(error, JobSetApart), _words(address, job, error)
    return m.LogsRefused(generation=generation, reason=reason, address=address, unfit=unfit)


def summary_of(stream: log_pb2.StreamInventory) -> StreamSummary:
    return StreamSummary(
        stream=stream.stream,
        records=stream.records,
        first_step=stream.first_step if stream.has_records else -1,
        last_step=stream.last_step if stream.has_records else -1,
        trimmed_below_step=stream.trimmed_below_step,
        corrupt=stream.corrupt,
        reason=stream.reason,
        unlogged=admin.unlogged(stream),
        marks=stream.marks,
    )


logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0
MOVED_ATTEMPTS = 3
ERRORS_MAX = 10
"""Consecutive errors after which a log server counts as unfit. One that does not answer at all is retried without
limit."""

T = TypeVar("T")


class Unavailable(Exception):
    """This coordinator is stopping, and another one will answer; or a job reverts to its durable state."""


class Unsure(Unavailable):
    """This coordinator's store does not answer, and another one may hold it by now; or it answers again soon."""


class _Overtaken(Exception):
    """The answer is no longer needed: a newer generation asks again, or the job is over."""


class _Refused(Exception):
    """The log server holds a higher generation of this job, or cannot serve it: a retry will not help."""

    def __init__(self, command: m.LogsRefused) -> None:
        super().__init__(command)
        self.command = command


class Questions:
    """The calls in progress, of all jobs. Everything but the calls themselves runs on the loop."""

    def __init__(
        self,
        logs: LogServers,
        apply: Callable[[str, m.Command], Awaitable[Job]],
        failed: Callable[[str, str], None],
    ) -> None:
        """`apply(job, command)` applies a command. `failed(job, error)` is called with an unexpected error."""
        self._logs = logs
        self._apply = apply
        self._failed = failed
        # Calls may block until their timeout: those that a recovery waits for must not queue after polls of free space.
        self._threads = Threads(32, "logs")
        self._pollers = Threads(8, "space")
        self._given_up: set[str] = set()
        """Addresses that a job has given up and that have not answered since: other jobs do not wait for them."""
        self._losses_seen: set[tuple[str, int]] = set()
        """(job, number of a server) of the losses that `_given_up` was told of."""
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """(job, kind) -> the call in progress; a newer one replaces it."""

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for pool in (self._threads, self._pollers):
            pool.shutdown()

    def forget(self, name: str) -> None:
        for (job, _), task in list(self._tasks.items()):
            if job == name:
                task.cancel()

    def under_way(self, name: str, kind: str) -> bool:
        return (name, kind) in self._tasks

    def ask(self, job: Job, kind: str, question: Coroutine[None, None, None]) -> None:
        key = (job.row.job, kind)
        older = self._tasks.get(key)
        if older is not None:
            older.cancel()
        task = asyncio.get_running_loop().create_task(question)
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: tuple[str, str], task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled():
            error = task.exception()
            if isinstance(error, BaseExceptionGroup):  # of calls to several servers
                error = error.split(Unavailable)[1]
            if error is not None and not isinstance(error, Unavailable):
                logger.error("asking the log servers (%s)", " ".join(key), exc_info=error)
                self._failed(key[0], f"{type(error).__name__} in {key[1]}: {error}")

    async def fence(self, job: Job, generation: int) -> None:
        lost = {(job.row.job, n) for n, server in enumerate(job.row.log_servers) if server.lost}
        addresses = {job.row.log_servers[n].address for _, n in lost - self._losses_seen}
        self._given_up |= addresses.difference(job.row.addresses())
        self._losses_seen |= lost
        calls = self._calls(job, generation, log_placement.to_fence(job.row, job.places))
        cold = await self._ask_all(job, generation, calls)
        if cold is not None:
            await self._apply(job.row.job, m.LogsFenced(generation=generation, cold=cold))

    async def reset(self, job: Job, generation: int) -> None:
        trim = self._tasks.get((job.row.job, "trim"))
        if trim is not None:
            trim.cancel()  # after the reset, steps below may be written again
        calls = self._calls(job, generation, log_placement.to_give_up(job.row))
        cold = await self._ask_all(job, generation, calls)
        if cold is not None:
            await self._apply(job.row.job, m.LogsReset(generation=generation, cold=cold))

    def _calls(self, job: Job, generation: int, calls: Mapping[str, Sequence[Call]]) -> Callable[[str], str]:
        name = job.row.job

        def ask(address: str) -> str:
            cold = ""
            for call in calls[address]:
                if call in RESETS:
                    cold = self._logs.reset(address, name, generation, RESETS[call])
                else:
                    cold = self._logs.fence(address, name, generation, call is Call.FENCE_HELD)
            return cold

        return ask

    async def inventory(self, job: Job, generation: int) -> None:
        name = job.row.job

        def inventory(address: str) -> list[StreamSummary]:
            return self._logs.inventory(address, name)

        answers = await self._ask_all(job, generation, inventory)
        if answers is not None:
            moved = await self._moved(job)
            await self._apply(name, m.InventoryTaken(generation=generation, servers=answers, moved=moved))

    async def _moved(self, job: Job) -> dict[int, list[StreamSummary]]:
        """Returns what lost servers have moved to the object store. Without an answer nothing of it counts."""
        row, found = job.row, dict[int, list[StreamSummary]]()
        address = row.reads_moved()
        for number, cold in row.moved(min(row.checkpoints, default=0)).items() if address else ():
            inventory = partial(self._logs.inventory, address, row.job, cold)
            for attempt in range(MOVED_ATTEMPTS):  # the server goes on reading after a call has timed out
                try:
                    found[number] = await self._in_thread(inventory)
                    break
                except SwiftError as error:
                    if attempt == MOVED_ATTEMPTS - 1:
                        events.emit(
                            "moved_unknown", job=row.job, address=address, cold=cold, reason=str(error)
                        )
                await asyncio.sleep(RETRY_FIRST_S)
        return found

    async def _ask_all(self, job: Job, generation: int, call: Callable[[str], T]) -> dict[str, T] | None:
        """Returns the answer of every log server in use. Returns None if the answers are no longer needed, or if one
        refused the generation, which is then reported to the job."""
        refusals: list[_Refused] = []
        overtaken = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    address: group.create_task(self._until_answered(job, generation, address, call))
                    for address in job.row.addresses()
                }
        except* _Refused as errors:
            refusals = [error for error in errors.exceptions if isinstance(error, _Refused)]
        except* _Overtaken:
            overtaken = True
        for refusal in refusals[:1]:
            await self._apply(job.row.job, refusal.command)
        if refusals or overtaken:
            return None
        return {address: task.result() for address, task in tasks.items()}

    async def _until_answered(self, job: Job, generation: int, address: str, call: Callable[[str], T]) -> T:
        """Retries as long as the generation lasts: without its log servers a job cannot recover, and they may return.
        Raises _Overtaken if the answer is no longer needed, and _Refused."""
        name = job.row.job
        pause_s = RETRY_FIRST_S
        errors = 0
        while True:
            if job.row.generation != generation or job.row.state.is_over:
                raise _Overtaken
            try:
                answer = await self._in_thread(lambda: call(address))
            except (StaleGeneration, JobSetApart) as error:
                raise _Refused(_refusal(generation, address, name, error)) from None
            except UnknownJob:
                await self._apply(name, m.LogLost(generation=generation, address=address))
                raise _Overtaken from None
            except SwiftError as error:
                words = _words(address, name, error)
                given_up = address in self._given_up and isinstance(error, LogUnavailable)
                blocked = m.LogsBlocked(
                    generation=generation, address=address, reason=words, given_up=given_up
                )
                await self._apply(name, blocked)
                errors = 0 if isinstance(error, AccessDenied | LogUnavailable) else errors + 1
                if errors >= ERRORS_MAX:
                    reason = f"{words} ({errors} times in a row)"
                    refused = m.LogsRefused(generation=generation, reason=reason, address=address, unfit=True)
                    raise _Refused(refused) from None
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_LAST_S, 2 * pause_s)
            else:
                self._given_up.discard(address)
                await self._apply(name, m.LogHeard(address=address))
                await self._apply(name, m.LogsBlocked(generation=generation, address=address, reason=""))
                return answer

    async def _in_thread(self, call: Callable[[], T], pool: Threads | None = None) -> T:
        """Runs a call in a thread. Raises LogUnavailable if no thread can be started: retry."""
        pool = pool or self._threads
        if not pool.ready():
            raise LogUnavailable(NONE_LEFT)
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def space(self, job: Job, generation: int) -> None:
        """Polls the free space once. A server that does not answer is polled again later."""
        name = job.row.job
        granted = job.row.granted  # read before the poll: a server just added may not know the job yet

        async def one(address: str) -> None:
            try:
                space = await self._in_thread(
                    lambda: self._logs.space(address, name, generation), self._pollers
                )
            except JobSetApart as error:
                await self._apply(name, _refusal(generation, address, name, error))
                return
            except SwiftError as error:
                logger.info("log server %s does not say how much room it has: %s", address, error)
                return
            self._given_up.discard(address)
            await self._apply(name, m.LogHeard(address=address))
            if space is None and granted == generation:
                await self._apply(name, m.LogLost(generation=generation, address=address))
            if space is not None and space.wants_checkpoint:
                await self._apply(
                    name,
                    m.LogsPressed(
                        address=address,
                        reason=space.wants_checkpoint,
                        trimmed_below_step=space.trimmed_below_step,
                    ),
                )

        async with asyncio.TaskGroup() as group:
            for address in job.row.addresses():
                group.create_task(one(address))

    async def trim(self, job: Job, generation: int, below_step: int) -> None:
        """Asks once. A server that does not answer is trimmed at the next checkpoint, or once it needs room
        (`LogsPressed`): surplus records do no harm. A call that comes late, behind a fence, is refused."""
        row, name = job.row, job.row.job

        async def one(address: str, cold: str = "") -> None:
            try:
                await self._in_thread(lambda: self._logs.trim(address, name, generation, below_step, cold))
            except SwiftError as error:
                events.emit("trim_failed", job=name, address=address, reason=str(error))

        needed, reader = row.moved(below_step), row.reads_moved()
        async with asyncio.TaskGroup() as group:
            for address in row.addresses():
                group.create_task(one(address))
            for number, cold in row.moved(-1).items():
                if reader and number not in needed:
                    group.create_task(one(reader, cold))
