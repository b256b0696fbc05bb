"""gRPC interface of the driver: validates requests, which are the commands, and converts refusals to status codes."""

import math
from collections.abc import AsyncIterator, Callable, Mapping, MutableSequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import Message

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.coordinator_messages import between, check_measured, of_view, whole
from swift_ft.credentials import Credentials
from swift_ft.errors import UsageError
from swift_ft.log.protocol import REASON_KEY, Reason
from swift_ft.log.record import STEP_MAX
from swift_ft.text import WORLD_SIZE_MAX, check_name, text_of
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Fenced, Invalid, Mismatch, Taken
from swift_ft_services.coordinator.driver import Driver, JobApart, NoSuchJob, TooMany
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.log_calls import Unavailable, Unsure
from swift_ft_services.interceptors import visit_of

# View updates for watchers: each is built once for all that know the same View.


class Updates:
    """The View updates of all jobs. For each job only the updates to its newest View are kept."""

    def __init__(self) -> None:
        self._made: dict[str, _Made] = {}

    def to(self, view: pb.View, known: pb.View | None, rank: int | None) -> pb.ViewUpdate:
        """Returns the update for a watcher (`rank`, or None for no rank) that knows the View `known`, or none yet."""
        made = self._made.get(view.job)
        if made is None or made.view is not view:
            made = self._made[view.job] = _Made(view, made)
        reads_log = rank is None or rank in made.readers
        key = (0 if known is None else known.revision, reads_log)
        if key not in made.updates:
            made.updates[key] = (
                whole(view, reads_log=reads_log)
                if known is None
                else between(known, view, reads_log=reads_log)
            )
        return made.updates[key]


class _Made:
    def __init__(self, view: pb.View, before: "_Made | None") -> None:
        self.view = view
        self.readers = _readers(view, before)
        self.updates: dict[tuple[int, bool], pb.ViewUpdate] = {}


def _readers(view: pb.View, before: _Made | None) -> frozenset[int]:
    """Returns the ranks that read the log. Computed once per generation, which has one plan."""
    if before is not None and before.view.plan == view.plan:
        return before.readers
    published = of_view(view)
    return frozenset() if published is None else published.plan.log_readers


# ruff: noqa: N802  (gRPC names its methods so)


LONGEST_REASON = 2000
LONGEST_ID = 128
TEXTS = {
    **dict.fromkeys(
        ("reason", "difference", "why_not", "unfit", "place", "problem", "inexact_reason"), LONGEST_REASON
    ),
    **dict.fromkeys(("run", "label", "host", "lost", "add_host"), LONGEST_ID),
}
"""Field that is shown to people -> the most characters of it that are kept."""
_MASKS = {"value"}
"""Fields of a vote that are bit masks, not counters."""
SHARE_WAIT_S_MAX = 2.0
MACHINES_MAX = 1 << 12
"""Limit for one job."""
MEET_S_MAX = 3600.0
KINDS = (pb.BUILT, pb.AGREE, pb.SHRINK, pb.GROW)
"""Kinds that a member may vote for."""
FAILURES: Mapping[type[Exception], tuple[grpc.StatusCode, str]] = {
    Fenced: (grpc.StatusCode.FAILED_PRECONDITION, "fenced"),
    Mismatch: (grpc.StatusCode.FAILED_PRECONDITION, "mismatch"),
    Taken: (grpc.StatusCode.ALREADY_EXISTS, "taken"),
    Invalid: (grpc.StatusCode.INVALID_ARGUMENT, "invalid"),
    NoSuchJob: (grpc.StatusCode.NOT_FOUND, "no_such_job"),
    JobApart: (grpc.StatusCode.DATA_LOSS, Reason.APART.value),
    TooMany: (grpc.StatusCode.RESOURCE_EXHAUSTED, Reason.LIMIT.value),
    Unavailable: (grpc.StatusCode.UNAVAILABLE, "unavailable"),
    Unsure: (grpc.StatusCode.UNAVAILABLE, "unavailable"),
}
"""What the driver raises -> the status of the call, and the reason that is counted."""

Context = grpc.aio.ServicerContext[Any, Any]


class Servicer(pb_grpc.CoordinatorServicer):
    """The gRPC servicer. It contains no decisions: all are made in the core."""

    def __init__(self, driver: Driver | None, refused: Callable[[str], None] = lambda reason: None) -> None:
        """`driver`: None while another coordinator holds the store. `refused(reason)` is called for every call that is
        refused."""
        self.driver = driver
        self.standing_by = "this coordinator does not serve yet"
        """Why there is no driver."""
        self._refused = refused
        self._updates = Updates()

    @property
    def _driver(self) -> Driver:
        """Raises Unavailable while another coordinator holds the store."""
        if self.driver is None:
            raise Unavailable(self.standing_by)
        return self.driver

    def generation_of(self, job: str) -> int:
        return 0 if self.driver is None else self.driver.generation_of(job)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        wrong = "" if request.member.incarnation else "a member needs an incarnation"
        if not 0 < request.world_size <= WORLD_SIZE_MAX:
            wrong = wrong or f"world size {request.world_size}: a job has 1 to {WORLD_SIZE_MAX} ranks"
        if wrong := wrong or problem_of(request):
            await self._abort_invalid(context, wrong)
        may_see = visit_of().covers
        async with self._answering(context, request.job):
            return pb.JoinReply(generation=await self._driver.join(request.job, request, may_see))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.ViewUpdate]:
        async with self._answering(context, request.job):
            driver = self._driver
            driver.apart.check(request.job)
        rank = request.rank if request.HasField("rank") else None
        known: pb.View | None = None
        async for view in driver.views(request.job):
            update = self._updates.to(view, known, rank)
            known = view
            yield update
        async with self._answering(context, request.job):  # it says why there are no more
            self._driver.apart.check(request.job)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatReply:
        if not 0.0 <= request.replay.seconds_left < math.inf:
            request.replay.ClearField("seconds_left")
        job = await self._applied(context, request)
        return pb.HeartbeatReply(generation=job.row.generation, interval_s=job.heartbeat_interval_s)

    async def _acknowledge(self, request: m.Request, context: Context) -> pb.Ack:
        await self._applied(context, request)
        return pb.Ack()

    Report = Ready = Refuse = Differs = Rehearsed = CheckpointDurable = AskCheckpoint = _acknowledge
    MemberExited = Suspect = Finish = _acknowledge

    async def _take_with_reason(
        self, request: pb.FailRequest | pb.RevokeRequest | pb.StopRequest, context: Context
    ) -> pb.Ack:
        request.reason = request.reason or "no reason given"
        return await self._acknowledge(request, context)

    Fail = Stop = _take_with_reason

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.Ack:
        request.reason = request.reason[:LONGEST_ID]
        return await self._take_with_reason(request, context)

    async def Vote(self, request: pb.VoteRequest, context: Context) -> pb.Ack:
        if request.kind not in KINDS:
            await self._abort_invalid(context, f"a vote for {request.kind}: there is no such")
        return await self._acknowledge(request, context)

    async def Measure(self, request: pb.MeasureRequest, context: Context) -> pb.Ack:
        try:
            check_measured(request.measured)
        except ValueError as error:
            await self._abort_invalid(context, f"a measurement: {error}")
        return await self._acknowledge(request, context)

    async def ChangeLogServers(self, request: pb.ChangeLogServersRequest, context: Context) -> pb.Ack:
        if request.add:
            try:  # this process would connect there with a token that is valid for every job
                Credentials.from_environment().check_named(request.add)
            except UsageError as error:  # before the job is fenced for it
                await self._abort_invalid(context, f"the coordinator does not connect there: {error}")
        return await self._acknowledge(request, context)

    async def Share(self, request: pb.ShareRequest, context: Context) -> pb.ShareReply:
        async with self._answering(context, request.job):
            sharing = self._driver.sharing(request.job, request)
        if sharing is None:
            return pb.ShareReply(generation=self.generation_of(request.job))
        if request.epoch not in (0, sharing.epoch):
            return pb.ShareReply(generation=sharing.generation, epoch=sharing.epoch)
        after: list[pb.Shared] = []
        if request.changes:
            async with self._answering(context, request.job):
                after = sharing.change(request.incarnation, request.number, request.changes)
        if request.wait_s > 0:
            await sharing.wait(request.until, min(request.wait_s, SHARE_WAIT_S_MAX))
        if not sharing.is_in(request.generation):
            return pb.ShareReply(generation=self.generation_of(request.job))
        news, revision, more = sharing.news(request.seen)
        return pb.ShareReply(
            generation=sharing.generation,
            epoch=sharing.epoch,
            revision=revision,
            news=news,
            after=after,
            more=more,
        )

    async def Meet(self, request: pb.MeetRequest, context: Context) -> pb.MeetReply:
        request.DiscardUnknownFields()  # it is kept, and told to others
        if wrong := _wrong_meeting(request):
            await self._abort_invalid(context, wrong)
        async with self._answering(context, request.job):
            return self._driver.meet(request.job, request)

    async def Measurements(self, request: pb.MeasurementsRequest, context: Context) -> pb.MeasurementsReply:
        async with self._answering(context, request.job):
            return self._driver.measurements(request.job)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        async with self._answering(context, request.job):
            return await self._driver.status(request.job, with_history=request.history)

    async def Jobs(self, request: pb.JobsRequest, context: Context) -> pb.JobsReply:
        try:
            return await self._driver.jobs(visit_of().covers)
        except Unavailable as unavailable:
            await self._abort(context, unavailable)

    async def _applied(self, context: Context, request: m.Request) -> Job:
        """Returns the request's job once the changes are durable."""
        request.DiscardUnknownFields()  # the job keeps parts of some requests
        if wrong := problem_of(request):
            await self._abort_invalid(context, wrong)
        async with self._answering(context, request.job):
            return await self._driver.apply(request.job, request)

    async def _abort_invalid(self, context: Context, wrong: str) -> NoReturn:
        await self._abort(context, Invalid(wrong[:LONGEST_REASON]))

    async def _abort(self, context: Context, error: Exception) -> NoReturn:
        code, reason = FAILURES[type(error)]
        self._refused(reason)
        trailers = ((REASON_KEY, reason),) if reason in (Reason.APART, Reason.LIMIT) else ()
        await context.abort(code, str(error), trailers)
        raise AssertionError("abort has raised")

    @asynccontextmanager
    async def _answering(self, context: Context, job: str) -> AsyncIterator[None]:
        """Ends the call with a status if the job's name, or the request, is refused."""
        try:
            check_name("job", job)
        except UsageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            yield
        except tuple(FAILURES) as error:
            await self._abort(context, error)


def problem_of(request: Message) -> str:
    """Makes the texts of a request, at any depth, safe to show: shorter, and without control characters except newlines
    and tabs. Returns why a number in it is too large to count on from; empty if none is. (Messages also show the
    version after a reported one.)"""
    for part, value in request.ListFields():
        if part.name in TEXTS:
            setattr(request, part.name, text_of(value[: TEXTS[part.name]]))
        for one in value if isinstance(value, MutableSequence) else (value,):
            if isinstance(one, Message):
                if wrong := problem_of(one):
                    return wrong
            elif isinstance(one, int) and abs(one) > STEP_MAX and part.name not in _MASKS:
                return f"{part.name} {one}: numbers go up to {STEP_MAX}"
    return ""


def _wrong_meeting(request: pb.MeetRequest) -> str:
    """Returns why a request is invalid whatever the state of the meeting; empty if it is valid."""
    if not request.run:
        return "a launcher needs a name"
    if request.leaves:
        return ""
    held = request.held
    for machine in (request.machine, *held.machines):
        if machine.port >= 1 << 16 or not 0 < machine.ranks <= WORLD_SIZE_MAX:
            return f"a machine has a port, and 1 to {WORLD_SIZE_MAX} ranks"
    if not 0 < request.machines_min <= request.machines_max <= MACHINES_MAX:
        return f"machines {request.machines_min} to {request.machines_max}: a job has 1 to {MACHINES_MAX}"
    if not 0 < request.lease_s <= MEET_S_MAX or not 0 <= request.last_call_s <= MEET_S_MAX:
        return f"a lease and a last call of at most {MEET_S_MAX:g} s"
    if request.HasField("held") and not held.place < len(held.machines) <= request.machines_max:
        return "a place that it has had is one among machines"
    return ""
