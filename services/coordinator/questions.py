"""Questions: what a coordinator asks the log servers of a job, and how long it goes on asking.

Calls block, so threads make them; what comes back is a command for the job.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.coordinator import commands as m
from services.coordinator.core import Job
from services.coordinator.fencing import RESETS, Call, to_fence, to_give_up, used_anew
from services.coordinator.logs import Answered, GenerationRefused, JobForgotten, LogControl, Unfit
from swift import events
from swift.errors import ServiceError
from swift.recovery import StreamSummary

logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0
TRIM_ATTEMPTS = 5
ERRORS_MAX = 10
"""So many errors in a row, and a log server is taken to be unable. One that does not answer is waited for."""

T = TypeVar("T")


class Unavailable(Exception):
    """This coordinator is going down, and another one will answer; or a job goes back to what is durable of it."""


class _Overtaken(Exception):
    """Nobody waits for the answer: a newer generation asks anew, or the job is over."""


class Questions:
    """Of all jobs. Everything but the calls themselves runs on the loop."""

    def __init__(
        self,
        logs: LogControl,
        apply: Callable[[str, m.Command], Awaitable[Job]],
        failed: Callable[[str, str], None],
    ) -> None:
        """`apply`: has the job of that name take a command. `failed`: hears of an error that nobody expects, with the
        job's name before it."""
        self._logs = logs
        self._apply = apply
        self._failed = failed
        # Calls may hang until their timeout: what a recovery waits for does not queue behind a question about space.
        self._threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="logs")
        self._pollers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="space")
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        """(job, kind) -> what is asked; a newer question replaces the older one."""

    def stop(self) -> None:
        """Ends all that are under way."""
        for task in self._tasks.values():
            task.cancel()
        for pool in (self._threads, self._pollers):
            pool.shutdown(wait=False, cancel_futures=True)

    def forget(self, name: str) -> None:
        """What is asked for this job matters no more."""
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
        calls = self._calls(job, generation, to_fence(job))
        if await self._ask_all(job, generation, calls) is not None:
            await self._apply(job.row.job, m.LogsFenced(generation=generation))

    async def reset(self, job: Job, generation: int) -> None:
        trim = self._tasks.get((job.row.job, "trim"))
        if trim is not None:
            trim.cancel()  # behind the reset the steps below may come again
        calls = self._calls(job, generation, to_give_up(job))
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
        """The answer of every log server in use; None: nobody needs it any more, or one refused the generation, and the
        job has heard of it."""
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
        """Asks for as long as the generation lasts: without its log servers a job cannot recover, and they may come
        back. _Overtaken: they need not any more. Unfit: it is there, and answers with nothing but errors."""
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
                await self._apply(
                    name, m.LogsBlocked(generation=generation, address=address, reason=str(error))
                )
                errors = errors + 1 if isinstance(error, Answered) else 0
                if errors >= ERRORS_MAX:
                    unfit = Unfit(f"{error} ({errors} times in a row)")
                    unfit.address = address
                    raise unfit from None
                await asyncio.sleep(pause_s)
                pause_s = min(RETRY_LAST_S, 2 * pause_s)
            else:
                await self._apply(name, m.LogHeard(address=address))
                await self._apply(name, m.LogsBlocked(generation=generation, address=address, reason=""))
                return answer

    async def _in_thread(self, call: Callable[[], T], pool: ThreadPoolExecutor | None = None) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool or self._threads, call)

    async def space(self, job: Job, generation: int) -> None:
        """A server that does not answer is asked again soon enough: nothing waits for this."""
        name = job.row.job
        granted = job.row.granted  # before it is asked: one that has just come may not know the job yet

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
        change = used_anew(job, generation, address)
        if change is not None:
            await self._apply(job.row.job, change)

    async def trim(self, job: Job, below_step: int) -> None:
        """A few times only: the next checkpoint trims again, and records too many do no harm."""
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
