"""CoordinatorClient: every call to the coordinator, retried through its restarts.

(every rank)   client = CoordinatorClient(address, job); watcher = client.watch()
               client.join(make_member(rank), world_size, config, fingerprint)
               client.ready(generation, version, stages, num_stages)       state FORMING
               client.heartbeat(version)                                   HeartbeatReply.interval_s after `renewed_at`
               client.checkpoint_durable(version)                          every K steps
               client.report(generation, version or None, ...)             state PLANNING
               client.ready(...) or client.refuse(...)                     state RECOVERING
               client.share(generation, ...)                               while groups are built
               client.finish(version)                                      state RUNNING, after the last step
(launcher)     client.meet(request); client.member_exited(rank, pid, exit_code); client.fail(reason)
(anyone)       client.status(); client.watch()

A rank's calls carry the member that was passed to `join`. All calls are idempotent, so they are retried while the
coordinator restarts. Once a call is answered, it is durable at the coordinator.
"""

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Self, TypedDict, TypeVar

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.credentials import advised, open_channel
from swift_ft.errors import (
    AccessDenied,
    Fenced,
    JobSetApart,
    JoinRefused,
    ServiceError,
    SwiftError,
    UnknownJob,
    UsageError,
)
from swift_ft.planner import RankMeasured
from swift_ft.rpc.codec import to_message
from swift_ft.rpc.views import AWAY, Line, ViewWatcher, outcome

# PatientLine: calls to the coordinator that are retried until it answers, through its restarts.

Request = TypeVar("Request")
Reply = TypeVar("Reply")

# Timeout of one attempt. Long enough for a durable write on a slow disk, short compared with any `patience_s`.
ATTEMPT_TIMEOUT_S = 5.0
# Pause between attempts. The channel reconnects at most this often as well.
RETRY_PAUSE_S = 0.05
# Pause after RESOURCE_EXHAUSTED; and how long a client that is not part of the job yet retries after it.
LIMIT_PAUSE_S = 0.5
LIMIT_PATIENCE_S = 3.0
LAST_PATIENCE_S = 3.0

CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Timeout of one connection attempt; a refused one fails at once and waits for the backoff only.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A client that waits for a restart must not share its backoff with another client of this process.
    ("grpc.use_local_subchannel_pool", 1),
    # The coordinator is reached directly by its address, never through an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
)

# CANCELLED comes from `close` (then `_closed` is set), or from a coordinator that stopped during the call.
_RETRIED = (*AWAY, grpc.StatusCode.CANCELLED)
_TOO_MUCH = grpc.StatusCode.RESOURCE_EXHAUSTED
_NOT_ALLOWED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class RankTaken(JoinRefused):
    """Refusal of a Join because the rank still has a live holder."""


class Unanswered(ServiceError):
    """Error of a call that was not answered within its `patience_s`. The call may be made again."""


class PatientLine:
    """Connection of one job to its coordinator. Thread-safe.

    Errors of every call: ServiceError (Unanswered: no answer within `patience_s`; the message names the address.
    AccessDenied: the coordinator rejects this process's token), Fenced (this incarnation no longer holds its rank),
    UsageError (an invalid call: a bug or bad input).

    `tell` receives a human-readable line when the first attempt fails, though it is retried, and when answers resume.
    """

    def __init__(
        self,
        address: str,
        job: str,
        *,
        patience_s: float = 60.0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.address = address
        self.job = job
        self.patience_s = patience_s
        self.member: pb.Member | None = None
        self.renewed_at = -math.inf
        """Start of this rank's last call, other than heartbeats, that renewed its lease; monotonic seconds."""
        self._line = Line(address, tell)
        self._channel = open_channel(address, CHANNEL_OPTIONS)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        self._closed = threading.Event()
        self._watchers: list[ViewWatcher] = []
        self._sent: object = None
        """Last call that was sent without waiting for its answer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the watchers and the calls in progress, which raise ServiceError."""
        self._closed.set()
        for watcher in self._watchers:
            watcher.close()
        self._channel.close()

    @property
    def forgotten(self) -> str:
        """Error message for a job that has run before and that the coordinator no longer knows."""
        return (
            f"the coordinator at {self.address} does not know job {self.job} any more: it runs on another --directory, "
            "or on one that was emptied; start it on the job's own, and then the job again"
        )

    @property
    def _let_in(self) -> bool:
        return self.member is not None or any(watcher.latest is not None for watcher in self._watchers)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Reply]",
        request: Request,
        refused: type[SwiftError] = Fenced,
        patience_s: float | None = None,
    ) -> Reply:
        begun = time.monotonic()
        patience_s = self.patience_s if patience_s is None else patience_s
        deadline = begun + patience_s
        while True:
            remaining_s, pause_s = deadline - time.monotonic(), RETRY_PAUSE_S
            try:
                reply = method(request, timeout=max(0.05, min(ATTEMPT_TIMEOUT_S, remaining_s)))
                self._line.came()
                return reply
            except grpc.RpcError as error:
                code, details = outcome(error)
                # A client that was admitted once had a valid token: a newer one may not be in the file yet.
                if code not in _RETRIED and not (code in _NOT_ALLOWED and self._let_in) and code != _TOO_MUCH:
                    raise self._translated(code, details, refused) from None
                if (
                    code == _TOO_MUCH
                ):  # a limit, of calls per second for example: not a reason to end a running job
                    pause_s = LIMIT_PAUSE_S
                    if not self._let_in:
                        deadline = min(deadline, begun + LIMIT_PATIENCE_S)
                if time.monotonic() + pause_s >= deadline:
                    if code in _NOT_ALLOWED or code == _TOO_MUCH:
                        raise self._translated(code, details, refused) from None
                    raise Unanswered(
                        f"no answer from the coordinator at {self.address} within {patience_s:g} s: "
                        + advised(self.address, details)
                    ) from None
                if code in AWAY and not self._closed.is_set():
                    self._line.went(details)
            except ValueError:  # grpc's word for a closed channel
                raise ServiceError(f"the line to the coordinator at {self.address} was closed") from None
            if self._closed.wait(pause_s):
                raise ServiceError(f"the line to the coordinator at {self.address} was closed")

    def _send(self, method: "grpc.UnaryUnaryMultiCallable[Request, Reply]", request: Request) -> None:
        """Sends one attempt of a call and does not wait for the answer."""
        try:
            # grpc cancels a call that is no longer referenced.
            self._sent = method.future(request, timeout=ATTEMPT_TIMEOUT_S)
        except ValueError:  # grpc's word for a closed channel
            raise ServiceError(f"the line to the coordinator at {self.address} was closed") from None

    def _translated(self, code: grpc.StatusCode, details: str, refused: type[SwiftError]) -> SwiftError:
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            return refused(details)
        if code in _NOT_ALLOWED:
            return AccessDenied(f"the coordinator at {self.address}: {details}")
        if code == grpc.StatusCode.ALREADY_EXISTS:
            return RankTaken(details)
        if code == grpc.StatusCode.INVALID_ARGUMENT:
            return UsageError(details)
        if code == grpc.StatusCode.NOT_FOUND and self._let_in:
            return UnknownJob(self.forgotten)
        if code == grpc.StatusCode.DATA_LOSS:
            return JobSetApart(details)
        if code == grpc.StatusCode.NOT_FOUND:
            return UnknownJob(f"{details}: swift-ft jobs lists those that there are")
        if code == grpc.StatusCode.UNIMPLEMENTED:
            return UsageError(f"at {self.address} is another service, not a coordinator")
        return ServiceError(f"the coordinator at {self.address}: {code.name}: {details}")


class _Me(TypedDict):
    rank: int
    incarnation: str


def make_member(rank: int) -> pb.Member:
    """Returns this process as the holder of `rank`, with a new incarnation on each call."""
    return pb.Member(rank=rank, incarnation=uuid.uuid4().hex, pid=os.getpid(), host=socket.gethostname())


class CoordinatorClient(PatientLine):
    """All coordinator calls of one job. Raises the errors of `PatientLine`, and JoinRefused (`join` only)."""

    # --- calls of a rank ---

    def join(
        self,
        member: pb.Member,
        world_size: int,
        config: Mapping[str, str],
        fingerprint: Mapping[str, str],
        *,
        takeover_s: float = 15.0,
        run: str = "",
        from_job: str = "",
        from_version: int | None = None,
    ) -> int:
        """Makes this process the holder of `member.rank`. Returns the job's generation.

        Raises JoinRefused, with the coordinator's message, if fingerprint or configuration differ from the job's, or
        if the rank still has a live holder after `takeover_s`. `run`: the launcher that started this process; an
        unknown `run` restarts a job that is over. `from_job`: a job without a checkpoint starts from a checkpoint of
        that job, of `from_version` or the newest.

        A replacement may join before the coordinator knows that its predecessor is dead. The coordinator learns that
        from the launcher or from the expired lease, so `takeover_s` should be longer than the lease.
        """
        request = pb.JoinRequest(
            job=self.job,
            member=member,
            world_size=world_size,
            config=dict(config),
            fingerprint=dict(fingerprint),
            run=run,
            from_job=from_job,
            from_version=from_version,
        )
        deadline = time.monotonic() + takeover_s
        while True:
            try:
                reply = self._call(self._stub.Join, request, refused=JoinRefused)
                break
            except RankTaken as error:
                if time.monotonic() > deadline or self._closed.wait(RETRY_PAUSE_S):
                    raise JoinRefused(str(error)) from None
        self.member = member
        return reply.generation

    def heartbeat(
        self,
        version: int,
        replay: pb.ReplayProgress | None = None,
        unsaved: pb.UnsavedCheckpoint | None = None,
    ) -> pb.HeartbeatReply:
        """Renews the lease. `version`: number of optimizer steps done. `replay`: progress of a replay in progress.
        `unsaved`: the checkpoint that could not be written yet. Call again after the reply's `interval_s`."""
        request = pb.HeartbeatRequest(
            job=self.job, **self._me(), version=version, replay=replay, unsaved=unsaved
        )
        return self._call(self._stub.Heartbeat, request)

    def report(
        self,
        generation: int,
        version: int | None,
        *,
        undo_to: int | None = None,
        undo_exact: bool = False,
        forward_to: int | None = None,
        forward_by_all: bool = False,
        finish_to: int | None = None,
        can_help: bool = False,
        off_log: bool = False,
        snapshots: Iterable[tuple[int, int]] = (),
    ) -> None:
        """(state PLANNING, own log flushed under `generation`) Reports the `version` of the state held (None: no
        state) and the versions that the interrupted step can still reach. Renews the lease.

        `undo_to`: version after undoing the applied buckets (`undo_exact`: bit for bit). `forward_to`: version after
        finishing the step, whose gradients are all reduced (`forward_by_all`: a rank that has not voted for the step
        may lack a line of it). `finish_to`: version after finishing the step together with all remaining ranks.
        `can_help`: this rank can build other stages, to share a replay. `off_log`: the state held differs from the one
        that checkpoints and log lead to. `snapshots`: (rank, version) of the state copies in this process's memory.
        """
        self._call_and_renew(
            self._stub.Report,
            pb.ReportRequest(
                job=self.job,
                **self._me(),
                generation=generation,
                has_state=version is not None,
                version=version or 0,
                undo_to=undo_to,
                undo_exact=undo_exact,
                forward_to=forward_to,
                forward_by_all=forward_by_all,
                finish_to=finish_to,
                can_help=can_help,
                off_log=off_log,
                snapshots=[pb.HeldSnapshot(rank=rank, version=version) for rank, version in snapshots],
            ),
        )

    def ready(
        self,
        generation: int,
        version: int,
        stages: Iterable[int] = (),
        num_stages: int = 0,
        shard: int = 0,
        off_log: bool = False,
    ) -> None:
        """(state FORMING or RECOVERING) Reports that groups are built and that `version` (the plan's target) is held.

        `stages`: the stages, of `num_stages`, that this rank runs. `shard`: the shard of their state that it holds.
        Ranks with equal stages and shard are replicas. `off_log`: as in `report`. Renews the lease.
        """
        self._call_and_renew(
            self._stub.Ready,
            pb.ReadyRequest(
                job=self.job,
                **self._me(),
                generation=generation,
                version=version,
                stages=list(stages),
                num_stages=num_stages,
                shard=shard,
                off_log=off_log,
            ),
        )

    def refuse(self, generation: int, reason: str, *, differs: bool = False) -> None:
        """(state RECOVERING) Reports that the plan cannot be carried out exactly. A plan without that strategy follows.
        `differs`: the recomputation gave a different result, so a restore will not be exact either."""
        self._call(
            self._stub.Refuse,
            pb.RefuseRequest(
                job=self.job, **self._me(), generation=generation, reason=reason, differs=differs
            ),
        )

    def differs(self, version: int, reason: str) -> None:
        """Reports that a step repeated from the state of `version` gave a different result. The job is not exact from
        there on."""
        self._call(
            self._stub.Differs,
            pb.DiffersRequest(job=self.job, **self._me(), version=version, reason=reason),
        )

    def rehearsed(
        self,
        rank: int,
        version: int,
        *,
        under_way: bool = False,
        steps: int = 0,
        difference: str = "",
        why_not: str = "",
    ) -> None:
        """(launcher) Reports on a rehearsal of that rank from the checkpoint of `version`: it begins (`under_way`), it
        has compared `steps` steps, or it could not be done (`why_not`)."""
        self._call(
            self._stub.Rehearsed,
            pb.RehearsedRequest(
                job=self.job,
                rank=rank,
                version=version,
                under_way=under_way,
                steps=steps,
                difference=difference,
                why_not=why_not,
            ),
        )

    def checkpoint_durable(
        self,
        version: int,
        generation: int = 0,
        recorded: bool = False,
        *,
        patience_s: float | None = None,
    ) -> None:
        """Reports that this rank's shard of the checkpoint of `version` is durable. `generation`: the one it was saved
        in. `recorded`: this rank records its steps from this version on, for a rehearsal."""
        self._call(
            self._stub.CheckpointDurable,
            pb.CheckpointRequest(
                job=self.job,
                **self._me(),
                version=version,
                generation=generation,
                recorded=recorded,
            ),
            patience_s=patience_s,
        )

    def ask_checkpoint(self, generation: int, after_version: int, reason: str) -> None:
        """Requests a checkpoint of a version above `after_version` soon. The View then names the version that all
        ranks save (`checkpoint_at`), unless one is already agreed on or complete."""
        self._call(
            self._stub.AskCheckpoint,
            pb.AskCheckpointRequest(
                job=self.job,
                **self._me(),
                generation=generation,
                after_version=after_version,
                reason=reason,
            ),
        )

    def measure(self, measured: RankMeasured) -> None:
        """Reports this rank's measurements. The coordinator keeps the newest until it ends: call every few seconds."""
        self._call(
            self._stub.Measure,
            pb.MeasureRequest(job=self.job, **self._me(), measured=to_message(measured)),
        )

    def share(
        self,
        generation: int,
        *,
        epoch: int,
        seen: int,
        number: int = 0,
        changes: Iterable[pb.SharedChange] = (),
        until: Iterable[str] = (),
        wait_s: float = 0.0,
    ) -> pb.ShareReply:
        """Exchanges keys among the ranks of a generation. Use it through `swift_ft.rpc.key_value`. A process that has
        not joined may only read."""
        me: _Me = {"rank": 0, "incarnation": ""} if self.member is None else self._me()
        return self._call(
            self._stub.Share,
            pb.ShareRequest(
                job=self.job,
                **me,
                generation=generation,
                epoch=epoch,
                seen=seen,
                number=number,
                changes=changes,
                until=until,
                wait_s=wait_s,
            ),
        )

    def change_log_servers(self, lost: str = "", add: str = "", add_host: str = "") -> None:
        """(operator) Removes a log server that is lost for good, adds one, or both. Raises UsageError if invalid."""
        self._call(
            self._stub.ChangeLogServers,
            pb.ChangeLogServersRequest(job=self.job, lost=lost, add=add, add_host=add_host),
        )

    def suspect(self, generation: int, reason: str, *, again: bool = False) -> None:
        """Reports a communication error in that generation. It fences no rank: if no rank is found dead, a generation
        begins in which all ranks keep their state. `again`: the trainer itself failed, and the step is to be repeated.
        """
        self._call(
            self._stub.Suspect,
            pb.SuspectRequest(job=self.job, **self._me(), generation=generation, reason=reason, again=again),
        )

    def finish(self, version: int, num_steps: int = 0, called: bool | None = None, reason: str = "") -> None:
        """Reports that all steps are done. Wait for FINISHED before exiting; if FENCING comes instead, take part in it.

        `called`: the trainer ended the job in its last step, before `num_steps` were done. None: this process has not
        run that step.
        """
        request = pb.FinishRequest(
            job=self.job, **self._me(), version=version, num_steps=num_steps, called=called, reason=reason
        )
        self._call(self._stub.Finish, request)

    def revoke(self, generation: int, reason: str, label: str = "") -> None:
        """(member of a communicator) Revokes the group `label` (empty: all groups) of that generation for all ranks."""
        self._call(
            self._stub.Revoke,
            pb.RevokeRequest(job=self.job, **self._me(), generation=generation, reason=reason, label=label),
        )

    def vote(
        self,
        generation: int,
        number: int,
        kind: "pb.VoteKind.ValueType",
        value: int = 0,
        acknowledged: Iterable[int] = (),
        reason: str = "",
        *,
        waits: bool,
    ) -> None:
        """(member of a communicator) Sends this member's vote. Vote again until the View has the decision.

        `waits`: waits for the answer. Without it, a lost or refused vote goes unnoticed until the next one.
        """
        request = pb.VoteRequest(
            job=self.job,
            **self._me(),
            generation=generation,
            number=number,
            kind=kind,
            value=value,
            acknowledged=acknowledged,
            reason=reason,
        )
        if waits:
            self._call(self._stub.Vote, request)
        else:
            self._send(self._stub.Vote, request)

    # --- calls of a launcher, and of anyone ---

    def member_exited(
        self, rank: int, pid: int, exit_code: int, incarnation: str = "", *, given_up: bool = False
    ) -> None:
        """(launcher) Reports that a child has exited. `exit_code` is negative if a signal killed it. `given_up`: it is
        not replaced."""
        self._call(
            self._stub.MemberExited,
            pb.ExitRequest(
                job=self.job,
                rank=rank,
                incarnation=incarnation,
                pid=pid,
                exit_code=exit_code,
                given_up=given_up,
            ),
        )

    def place_given_up(self, rank: int) -> None:
        """(launcher) Reports that the rank, whose last process has exited before, will not be replaced any more."""
        self._call(self._stub.MemberExited, pb.ExitRequest(job=self.job, rank=rank, given_up=True))

    def place_unfit(self, rank: int, reason: str) -> None:
        """(launcher) Reports that the rank's place failed its health check and gets no process now. Only displayed."""
        self._call(self._stub.MemberExited, pb.ExitRequest(job=self.job, rank=rank, unfit=reason))

    def fail(self, reason: str, patience_s: float | None = None) -> None:
        """(rank, launcher) Fails the job. Every member sees FAILED with the reason."""
        me = self._me() if self.member is not None else _Me(rank=-1, incarnation="")
        self._call(
            self._stub.Fail,
            pb.FailRequest(job=self.job, **me, reason=reason),
            patience_s=patience_s,
        )

    def meet(self, request: pb.MeetRequest) -> pb.MeetReply:
        """(launcher without a number) Announces this launcher. Call repeatedly. See `swift_ft.launch.rendezvous`."""
        return self._call(self._stub.Meet, request)

    def ask_last_checkpoint(self, reason: str) -> None:
        """(launcher) Requests a checkpoint soon, of a version above all that ranks have done. Raises ServiceError after
        `LAST_PATIENCE_S`, because a launcher that leaves must not wait for a coordinator that is gone as well."""
        request = pb.AskCheckpointRequest(job=self.job, rank=-1, reason=reason)
        self._call(self._stub.AskCheckpoint, request, patience_s=LAST_PATIENCE_S)

    def stop(self, run: str, reason: str) -> None:
        """(launcher `run`) Reports that it was asked to stop and that its ranks have ended."""
        self._call(self._stub.Stop, pb.StopRequest(job=self.job, run=run, reason=reason))

    def measurements(self) -> pb.MeasurementsReply:
        """Returns the newest measurements of all ranks."""
        return self._call(self._stub.Measurements, pb.MeasurementsRequest(job=self.job))

    def status(self) -> pb.StatusReply:
        """Returns the View, with every rank's lease, version and suspicions."""
        return self._call(self._stub.Status, pb.StatusRequest(job=self.job))

    def jobs(self) -> pb.JobsReply:
        """Returns the coordinator's jobs that this process's token gives access to. Ignores the client's own job."""
        return self._call(self._stub.Jobs, pb.JobsRequest())

    def watch(self, *callbacks: Callable[[pb.View], None]) -> ViewWatcher:
        """Returns a running watcher of this job's View. `callbacks` are subscribed before the first View arrives."""
        rank = None if self.member is None else self.member.rank
        watcher = ViewWatcher(self._stub, self._line, self.address, self.job, *callbacks, rank=rank)
        self._watchers.append(watcher)
        return watcher

    # --- ---

    def _me(self) -> "_Me":
        if self.member is None:
            raise UsageError("join the job before you make calls as one of its ranks")
        return {"rank": self.member.rank, "incarnation": self.member.incarnation}

    def _call_and_renew(
        self, method: "grpc.UnaryUnaryMultiCallable[Request, Reply]", request: Request
    ) -> None:
        begun = time.monotonic()
        self._call(method, request)
        self.renewed_at = begun
