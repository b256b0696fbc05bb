"""Calls of the coordinator to a job's log servers, and how long they are retried.

Calls block, so they run in threads; their results become commands for the job.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from swift_ft import events
from swift_ft.credentials import Credentials
from swift_ft.errors import (
    AccessDenied,
    JobSetApart,
    LogUnavailable,
    ServiceError,
    StaleGeneration,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift_ft.log import admin
from swift_ft.planner import StreamSummary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator import log_placement
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.log_placement import RESETS, Call
from swift_ft_services.threads import NONE_LEFT, Threads


class GenerationRefused(ServiceError):
    """The log server holds a higher generation of this job: a retry will not help."""

    address = ""


class Unfit(GenerationRefused):
    """The log server reports that it cannot serve this job: its files there are damaged, or each answer is an error. A
    retry will not help."""


class Answered(ServiceError):
    """The log server answered with an error: it is reachable."""


class JobForgotten(ServiceError):
    """A log server that held a generation of the job no longer knows the job."""


def check_address(address: str) -> None:
    """Validates the address of a log server that a caller names: this process would connect there with a token that is
    valid for every job. Raises UsageError if it must not."""
    try:
        Credentials.from_environment().check_named(address)
    except UsageError as error:
        raise UsageError(f"the coordinator does not connect there: {error}") from None


class LogServers:
    """Calls to one log server each. They block; the driver runs them in threads.

    Raises ServiceError if there is no answer: retry. Raises Unfit if a retry will not help.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def fence(self, address: str, job: str, generation: int, held: bool = False) -> None:
        """Fences the job, durably: from now on the server accepts only appends of `generation`. Raises
        GenerationRefused; raises JobForgotten if `held` and the server holds no earlier generation of the job."""
        with _named_errors(address, job):
            admin.fence(address, job, generation, self._timeout_s, held=held)

    def trim(self, address: str, job: str, below_step: int) -> None:
        with _named_errors(address, job):
            admin.trim(address, job, below_step, self._timeout_s)

    def reset(self, address: str, job: str, generation: int, number: int) -> None:
        """Drops every record of the job, once for each `number` of a generation, which the server must hold. Raises
        GenerationRefused, JobForgotten."""
        with _named_errors(address, job):
            admin.reset(address, job, generation, self._timeout_s, number=number)

    def space(self, address: str, job: str, generation: int) -> admin.JobSpace:
        with _named_errors(address, job):
            found = admin.space(address, job, generation, self._timeout_s)
            if found.apart:
                raise JobSetApart(found.apart)
            return found

    def inventory(self, address: str, job: str) -> list[StreamSummary]:
        """Returns a summary of every stream of the job; empty for an unknown job."""
        with _named_errors(address, job):
            return [_summary(stream) for stream in admin.inventory(address, job, self._timeout_s)]


@contextmanager
def _named_errors(address: str, job: str) -> Iterator[None]:
    """Converts errors of the log client to those of `LogServers`."""
    try:
        yield
    except StaleGeneration as error:
        raise GenerationRefused(
            f"log server {address} is ahead of this coordinator for job {job} ({error}): "
            "start the job under another name, or with an empty log"
        ) from error
    except UnknownJob as error:
        raise JobForgotten(f"log server {address}: {error}") from error
    except JobSetApart as error:
        raise Unfit(f"log server {address}: {error}") from error
    except (AccessDenied, LogUnavailable, Unfit):
        raise
    except SwiftError as error:
        where = "" if str(error).startswith("log server") else f"log server {address}: "
        raise Answered(f"{where}{error}") from error


def _summary(stream: admin.StreamInventory) -> StreamSummary:
    return StreamSummary(
        stream=stream.stream,
        records=stream.records,
        first_step=-1 if stream.first_step is None else stream.first_step,
        last_step=-1 if stream.last_step is None else stream.last_step,
        trimmed_below_step=stream.trimmed_below_step,
        corrupt=stream.corrupt,
        reason=stream.reason,
        unlogged=stream.unlogged,
        marks=stream.marks,
    )


logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0
TRIM_ATTEMPTS = 5
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
            if error is not None and not isinstance(error, Unavailable):
                logger.error("asking the log servers (%s)", " ".join(key), exc_info=error)
                self._failed(key[0], f"{type(error).__name__} in {key[1]}: {error}")

    async def fence(self, job: Job, generation: int) -> None:
        lost = {server.address for server in job.row.log_servers if server.lost}
        self._given_up |= lost.difference(job.row.addresses())
        calls = self._calls(job, generation, log_placement.to_fence(job.row, job.places))
        if await self._ask_all(job, generation, calls) is not None:
            await self._apply(job.row.job, m.LogsFenced(generation=generation))

    async def reset(self, job: Job, generation: int) -> None:
        trim = self._tasks.get((job.row.job, "trim"))
        if trim is not None:
            trim.cancel()  # after the reset, steps below may be written again
        calls = self._calls(job, generation, log_placement.to_give_up(job.row))
        if await self._ask_all(job, generation, calls) is not None:
            await self._apply(job.row.job, m.LogsReset(generation=generation))

    def _calls(self, job: Job, generation: int, calls: Mapping[str, Sequence[Call]]) -> Callable[[str], None]:
        name = job.row.job

        def ask(address: str) -> None:
            for call in calls[address]:
                if call in RESETS:
                    self._logs.reset(address, name, generation, RESETS[call])
                else:
                    self._logs.fence(address, name, generation, call is Call.FENCE_HELD)

        return ask

    async def inventory(self, job: Job, generation: int) -> None:
        name = job.row.job

        def inventory(address: str) -> list[StreamSummary]:
            return self._logs.inventory(address, name)

        answers = await self._ask_all(job, generation, inventory)
        if answers is not None:
            await self._apply(name, m.InventoryTaken(generation=generation, servers=answers))

    async def _ask_all(self, job: Job, generation: int, call: Callable[[str], T]) -> dict[str, T] | None:
        """Returns the answer of every log server in use. Returns None if the answers are no longer needed, or if one
        refused the generation, which is then reported to the job."""
        refusals: list[GenerationRefused] = []
        overtaken = False
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    address: group.create_task(self._until_answered(job, generation, address, call))
                    for address in job.row.addresses()
                }
        except* GenerationRefused as errors:
            refusals = [error for error in errors.exceptions if isinstance(error, GenerationRefused)]
        except* _Overtaken:
            overtaken = True
        for refusal in refusals[:1]:
            unfit = isinstance(refusal, Unfit)
            await self._refused(job, generation, refusal.address, str(refusal), unfit=unfit)
        if refusals or overtaken:
            return None
        return {address: task.result() for address, task in tasks.items()}

    async def _until_answered(self, job: Job, generation: int, address: str, call: Callable[[str], T]) -> T:
        """Retries as long as the generation lasts: without its log servers a job cannot recover, and they may return.
        Raises _Overtaken if the answer is no longer needed, and Unfit if the server answers only with errors."""
        name = job.row.job
        pause_s = RETRY_FIRST_S
        errors = 0
        while True:
            if job.row.generation != generation or job.row.state.is_over:
                raise _Overtaken
            try:
                answer = await self._in_thread(lambda: call(address))
            except GenerationRefused as refusal:
                refusal.address = address
                raise
            except JobForgotten:
                await self._begin_anew(job, generation, address)
                raise _Overtaken from None
            except ServiceError as error:
                given_up = address in self._given_up
                blocked = m.LogsBlocked(
                    generation=generation, address=address, reason=str(error), given_up=given_up
                )
                await self._apply(name, blocked)
                errors = errors + 1 if isinstance(error, Answered) else 0
                if errors >= ERRORS_MAX:
                    unfit = Unfit(f"{error} ({errors} times in a row)")
                    unfit.address = address
                    raise unfit from None
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_LAST_S, 2 * pause_s)
            else:
                self._given_up.discard(address)
                await self._apply(name, m.LogHeard(address=address))
                await self._apply(name, m.LogsBlocked(generation=generation, address=address, reason=""))
                return answer

    async def _in_thread(self, call: Callable[[], T], pool: Threads | None = None) -> T:
        """Runs a call in a thread. Raises ServiceError if no thread can be started: retry."""
        pool = pool or self._threads
        if not pool.ready():
            raise ServiceError(NONE_LEFT)
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
            except Unfit as unfit:
                await self._refused(job, generation, address, str(unfit), unfit=True)
                return
            except ServiceError as error:
                logger.info("log server %s does not say how much room it has: %s", address, error)
                return
            await self._apply(name, m.LogHeard(address=address))
            if space.unknown and granted == generation:
                await self._begin_anew(job, generation, address)
            if space.wants_checkpoint:
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

    async def _refused(self, job: Job, generation: int, address: str, reason: str, *, unfit: bool) -> None:
        await self._apply(
            job.row.job,
            m.LogsRefused(generation=generation, reason=reason, address=address, unfit=unfit),
        )

    async def _begin_anew(self, job: Job, generation: int, address: str) -> None:
        change = log_placement.used_anew(job.row, job.places, generation, address)
        if change is not None:
            await self._apply(job.row.job, change)

    async def trim(self, job: Job, below_step: int) -> None:
        """Retries only a few times: the next checkpoint trims again, and surplus records do no harm."""
        name = job.row.job

        async def one(address: str) -> None:
            for attempt in range(TRIM_ATTEMPTS):
                try:
                    await self._in_thread(lambda: self._logs.trim(address, name, below_step))
                except ServiceError as error:
                    events.emit("trim_failed", job=name, address=address, reason=str(error))
                    await asyncio.sleep(RETRY_FIRST_S * 2**attempt)
                else:
                    return

        async with asyncio.TaskGroup() as group:
            for address in job.row.addresses():
                group.create_task(one(address))
