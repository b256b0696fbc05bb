"""Session of this process with the coordinator: it joins as a rank, renews the lease, and reacts to new generations.

It adds two threads to the trainer's: one renews the lease, one watches the coordinator's View. When the View requires
this rank to stop, the watcher interrupts the trainer's thread wherever it waits.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.process_groups import Interrupted
from swift_ft.coordinator_client import CoordinatorClient, Unanswered
from swift_ft.errors import Fenced, JobFailed, ServiceError, SwiftError, UnknownJob, UsageError
from swift_ft.state import complete_mark
from swift_ft.state.checkpoint_place import Place
from swift_ft.text import tell_if_possible

ENV_RUN = "SWIFT_RUN"
"""Environment variable: identity of the launcher that started this process."""
ENV_HAS_RUN = "SWIFT_HAS_RUN"
"""Environment variable: set if that launcher knows that the job has already run."""
ENV_FROM_JOB = "SWIFT_FROM_JOB"
ENV_FROM_VERSION = "SWIFT_FROM_VERSION"
"""Environment variables: job and version of the checkpoint that the job is to start from."""
ENV_FROM_CHECKPOINTS = "SWIFT_FROM_CHECKPOINTS"
"""Environment variable: directory with checkpoints of the job, if its coordinator does not know it any more."""
_MEASURED_EVERY_S = 2.0
_FREEING_S = 5.0
RESAY_S = 0.5
"""Seconds after which a report to the coordinator is repeated; half the heartbeat interval if that is longer."""


class Holder:
    """User of this session. Called by the lease thread and the watcher thread. The methods here do nothing: so between
    two sessions of this process."""

    def interrupt(self, generation: int) -> None:
        """Interrupts the trainer's thread in any wait, because a newer generation is published."""

    def measured(self) -> pb.RankMeasured | None:
        """Returns this rank's step measurements, or None if there are none yet."""
        return None

    def unsaved(self) -> pb.UnsavedCheckpoint | None:
        """Returns the checkpoint that this rank could not write yet, or None."""
        return None

    def hangs(self) -> str:
        """Returns why this rank's device seems to hang; empty if it does not."""
        return ""


class Member:
    """This rank's session with the coordinator.

    (main thread) ``join`` → ``latest`` … ``enter(generation)`` once it acts on a generation … ``check()``
    (watcher thread) on a newer generation: ``holder.interrupt(generation)``, which must free the main thread
    """

    def __init__(self, address: str, job: str, rank: int, incarnation: str):
        self.client = CoordinatorClient(address, job)
        self.identity = pb.Member(
            rank=rank, incarnation=incarnation, pid=os.getpid(), host=socket.gethostname()
        )
        self.version = 0  # for heartbeats
        self.replay: Callable[[], pb.ReplayProgress] | None = None
        """Returns the progress of this rank's replay; None while it does not replay."""
        self.entered = 0
        self._noticed = 0
        self._fenced = ""
        self._wanted: tuple[int, str] | None = (
            None  # a request for an early checkpoint, until the coordinator has received it
        )
        self._wanting = threading.Lock()
        self._measured_at = 0.0
        self._said_unknown = self._said_hangs = False
        self._resay_s = RESAY_S
        self.lease: dict[str, Any] = {}
        """Parameters with which the sidecar renews the lease while this process cannot run; set by `join`."""
        self.on_renewed: Callable[[float], None] = lambda at_s: None
        """(lease thread) Called once this process has renewed its lease itself, with the monotonic time."""
        self._closed = threading.Event()
        self._heart: threading.Thread | None = None
        self._freeing: threading.Thread | None = None

    def join(
        self,
        world_size: int,
        config: Mapping[str, str],
        fingerprint: Mapping[str, str],
        holder: Holder,
        checkpoints: Place | None = None,
    ) -> None:
        """Joins as the rank and starts the lease and watcher threads. `checkpoints`: the job's place of them, which is
        looked through for complete ones if the job may be new to the coordinator. Raises JoinRefused.

        If this process has joined already, only replaces the `holder`. Raises UsageError if its settings differ.
        """
        if self._heart is not None:
            self._go_on_with(holder, config)
            return
        run, from_job = os.environ.get(ENV_RUN, ""), os.environ.get(ENV_FROM_JOB, "")
        version = os.environ.get(ENV_FROM_VERSION)
        given, found = os.environ.get(ENV_FROM_CHECKPOINTS, ""), None
        if os.environ.get(ENV_HAS_RUN):
            self._check_known()
        elif checkpoints is not None:
            found = complete_mark.find(checkpoints, given, self.identity.rank)
        request = pb.JoinRequest(
            member=self.identity,
            world_size=world_size,
            config=config,
            fingerprint=fingerprint,
            run=run,
            from_job=from_job,
            from_version=int(version) if version else None,
            found=found,
            adopts=bool(given),
        )
        generation = self.client.join(request)
        self._holder: Holder = holder
        self._config = dict(config)
        self.entered = self._noticed = generation
        interval_s: float = self.client.call(pb.HeartbeatRequest()).interval_s
        self._resay_s = max(RESAY_S, interval_s / 2)
        self.lease = {
            "coordinator": self.client.address,
            "rank": self.identity.rank,
            "incarnation": self.identity.incarnation,
            "pid": self.identity.pid,
            "interval_s": interval_s,
        }
        self.watcher = self.client.watch(self._saw)
        self._heart = threading.Thread(target=self._beat, args=(interval_s,), name="swift-lease", daemon=True)
        self._heart.start()

    def detach(self) -> None:
        """Detaches the holder. Until the next `join`, no thread is interrupted and no measurement is sent."""
        self._holder, self.replay = Holder(), None
        if self._freeing is not None:
            self._freeing.join(_FREEING_S)  # it refers to the old holder until its interrupt ends

    def _go_on_with(self, holder: Holder, config: Mapping[str, str]) -> None:
        other = sorted(
            name for name in config.keys() | self._config if config.get(name) != self._config.get(name)
        )
        if other:
            raise UsageError(
                f"the training function was called again, and its session has another {other[0]} "
                f"({config.get(other[0])}, before: {self._config.get(other[0])}): give it the same settings every time"
            )
        self._holder = holder
        self.version, self.replay = 0, None

    def _check_known(self) -> None:
        """Raises UnknownJob if the coordinator has lost the job, which must not be started anew in its place."""
        try:
            self.client.status()
        except UnknownJob:
            raise UnknownJob(self.client.forgotten) from None
        except SwiftError:
            return  # `join` reports it

    # --- watcher thread and lease thread ---

    def _saw(self, view: pb.View) -> None:
        if any(member.incarnation == self.identity.incarnation for member in view.fenced):
            self._fenced = (
                self._fenced or f"generation {view.generation} has fenced this process: {view.reason}"
            )
        stop = self._fenced or view.state == pb.FAILED
        if view.generation > self._noticed or stop:
            self._noticed = max(self._noticed, view.generation + (1 if stop else 0))
            events.emit("notice", rank=self.identity.rank, generation=view.generation, reason=view.reason)
            # Runs in its own thread, so that the watcher can receive the next View.
            self._freeing = threading.Thread(
                target=self._holder.interrupt, args=(self._noticed,), daemon=True
            )
            self._freeing.start()

    def _beat(self, interval_s: float) -> None:
        pause_s = interval_s
        while not self._closed.wait(pause_s):
            pause_s = self.client.renewed_at + interval_s - time.monotonic()
            if pause_s > 0:  # a Report or a Ready has renewed the lease
                self.on_renewed(self.client.renewed_at)
                continue
            pause_s, began = interval_s, time.monotonic()
            try:
                replay = self.replay
                beat = pb.HeartbeatRequest(
                    version=self.version,
                    replay=replay() if replay is not None else None,
                    unsaved=self._holder.unsaved(),
                )
                self.client.call(beat)
                self.on_renewed(began)
                self._say_wanted()
                self._say_hangs()
                if time.monotonic() - self._measured_at >= _MEASURED_EVERY_S:
                    self.say_measured()
            except Fenced as error:
                self._fenced = str(error)
                self._noticed += 1
                self._holder.interrupt(self._noticed)
                return
            except (ServiceError, UnknownJob) as error:
                # Training does not need the coordinator; the next heartbeat retries.
                events.emit("heartbeat_unanswered", rank=self.identity.rank, reason=str(error))
                if isinstance(error, UnknownJob):
                    self._say_unknown(error)
            else:
                self._said_unknown = False

    def _say_unknown(self, error: UnknownJob) -> None:
        if self.identity.rank == 0 and not self._said_unknown:
            tell_if_possible(f"{error}; training goes on, but the job can neither recover nor finish")
        self._said_unknown = True

    def _say_wanted(self) -> None:
        wanted, latest = self._wanted, self.watcher.latest
        if wanted is None or latest is None:
            return
        version, reason = wanted
        self.client.call(
            pb.AskCheckpointRequest(generation=latest.generation, after_version=version, reason=reason)
        )
        # The coordinator ignores a request made in an old generation, so it is sent again.
        now = self.watcher.latest
        with self._wanting:
            if self._wanted is wanted and now is not None and now.generation == latest.generation:
                self._wanted = None

    def _say_hangs(self) -> None:
        reason = self._holder.hangs()
        if bool(reason) != self._said_hangs:
            self.client.call(
                pb.SuspectRequest(reason=reason)
            )  # it is shown, and nothing follows; empty: taken back
            self._said_hangs = bool(reason)

    def say_measured(self) -> None:
        """Sends this rank's measurements to the coordinator. Raises Fenced; other errors are only logged."""
        self._measured_at = time.monotonic()
        try:
            measured = self._holder.measured()
            if measured is not None:
                self.client.call(pb.MeasureRequest(measured=measured))
        except Fenced:
            raise
        except (SwiftError, ValueError) as error:
            events.emit("measured_untold", rank=self.identity.rank, reason=str(error))

    # --- main thread ---

    def say_differs(self, version: int, reason: str) -> None:
        """Reports that a step that was done again from the state of `version` gave a different result."""
        self.client.call(pb.DiffersRequest(version=version, reason=reason))

    def replaces_another(self) -> bool:
        """(before `join`) Returns whether the job has begun already; False if the coordinator does not answer."""
        try:
            return self.client.status().view.state != pb.FORMING
        except SwiftError:
            return False

    def ask_checkpoint(self, after_version: int, reason: str) -> None:
        """Requests that all ranks soon save a version above `after_version`. Returns at once: the request is sent with
        the next heartbeat and repeated until the coordinator has received it."""
        with self._wanting:
            self._wanted = (after_version, reason)

    def check_held(self) -> None:
        """Sends a heartbeat. Raises Fenced if another process holds the rank, ServiceError if there is no answer."""
        self.client.call(pb.HeartbeatRequest(version=self.version, unsaved=self._holder.unsaved()))

    @property
    def fenced(self) -> bool:
        """(any thread) Returns whether this process knows that it has lost its rank."""
        return bool(self._fenced)

    @property
    def noticed(self) -> bool:
        """Returns whether a newer generation or a stop was announced that this rank has not acted on yet."""
        return self._noticed > self.entered

    def check(self) -> None:
        """Raises Interrupted on a newer generation, and Fenced or JobFailed if this rank cannot continue."""
        if not self.noticed:
            return
        if self._fenced:
            raise Fenced(self._fenced)
        view = self.watcher.latest
        if view is not None and view.state == pb.FAILED:
            raise JobFailed(f"job {view.job} failed: {view.reason}")
        raise Interrupted(f"generation {self._noticed} supersedes {self.entered}")

    def say(self, statement: Callable[[], None]) -> bool:
        """Calls `statement` and returns whether the coordinator answered; if not, the caller repeats it. Raises its
        refusal."""
        try:
            statement()
        except Unanswered as error:
            events.emit("statement_unanswered", rank=self.identity.rank, reason=str(error))
            return False
        return True

    def await_change(self, view: pb.View) -> None:
        """Waits until the View has changed, or until it is time to repeat this rank's last report."""
        try:
            self.watcher.wait_for(
                lambda newer: (newer.generation, newer.revision) != (view.generation, view.revision),
                self._resay_s,
            )
        except ServiceError:
            return  # unchanged: the caller looks again

    def enter(self, generation: int) -> None:
        """Records that this rank acts on `generation` from here on; a newer one interrupts it again."""
        self.entered = max(self.entered, generation)

    def close(self) -> None:
        self._closed.set()
        self.client.close()
        if self._heart is not None:
            self._heart.join(timeout=5.0)


def own_servers(view: pb.View, rank: int) -> dict[str, int]:
    """Returns address -> number of the log servers that store the rank's records. A server that was given up and has
    returned has a new number at the same address, so the change shows even if a View in between was skipped."""
    numbers = {place.address: n for n, place in enumerate(view.log_places) if not place.lost}
    return {s: numbers[s] for logs in view.log_copies if logs.rank == rank for s in logs.servers}


def is_filled(view: pb.View) -> bool:
    return len(view.members) + len(view.vacant) == view.world_size
