"""A real coordinator process and fake members over real gRPC, for the integration tests."""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient, make_member
from swift_ft.errors import Fenced, ServiceError
from tests.integration.logserver_world import Service

CONFIG = {"seed": "7"}
FINGERPRINT = {"torch": "2.13.0"}
RANKS = 3


class Coordinator(Service):
    module = "swift_ft_services.coordinator"


class FakeMember:
    """A rank without a trainer: it does what each View says, and its steps are sleeps.

    It says everything once: what was acknowledged must survive the coordinator.
    """

    def __init__(
        self,
        address: str,
        job: str,
        rank: int,
        world_size: int,
        *,
        steps: int = 1_000_000,
        stages: Sequence[int] = (),
        num_stages: int = 0,
        refuses: Callable[[pb.View], str] = lambda view: "",
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.steps = steps
        self.stages = list(stages)
        self.num_stages = num_stages
        self.refuses = refuses
        self.version: int | None = None
        self.versions_at_running: dict[int, int] = {}
        self.silent = threading.Event()
        """While set, it does not renew its lease."""
        self.fenced = False
        self.ended: pb.View | None = None
        self.error: BaseException | None = None
        self.member = make_member(rank)
        self.member.pid = os.getpid() * 1000 + rank
        self.client = CoordinatorClient(address, job, patience_s=30)
        self._changed = threading.Event()
        self._killed = threading.Event()
        self.watcher = self.client.watch(lambda view: self._changed.set())
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"member-{rank}-{work.__name__}")
            for work in (self._beat, self._live)
        ]

    def start(self) -> "FakeMember":
        self.client.join(
            pb.JoinRequest(
                member=self.member,
                world_size=self.world_size,
                config=CONFIG,
                fingerprint=FINGERPRINT,
            )
        )
        for thread in self._threads:
            thread.start()
        return self

    def report_exit(self) -> None:
        """What its launcher says once it is dead."""
        with CoordinatorClient(self.client.address, self.client.job) as launcher:
            exited = pb.ExitRequest(rank=self.rank, pid=self.member.pid, exit_code=-signal.SIGKILL)
            exited.incarnation = self.member.incarnation
            launcher.call(exited)

    def kill(self) -> None:
        """It says nothing any more, as if by SIGKILL."""
        self._killed.set()
        self._changed.set()
        # Calls under way end with it: else they would ask a coordinator that has ended for all their patience.
        self.client.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Fenced:
            self.fenced = True
        except ServiceError as error:
            if not self._killed.is_set():
                self.error = error
        except BaseException as error:
            self.error = error
            raise

    def _beat(self) -> None:
        while not self._killed.is_set() and self.ended is None:
            if not self.silent.is_set():
                self.client.call(pb.HeartbeatRequest(version=self.version))
            self._killed.wait(0.1)

    def _live(self) -> None:
        said: set[tuple[int, int]] = set()
        while not self._killed.is_set():
            self._changed.clear()
            view = self.watcher.latest
            now = (view.generation, view.state) if view is not None else (0, 0)
            if view is None:
                self._changed.wait(1)
            elif view.state in (pb.FINISHED, pb.FAILED):
                self.ended = view
                return
            elif view.state == pb.RUNNING:
                self._train(view)
            elif now in said:
                self._changed.wait(1)
            else:
                said.add(now)
                self._act(view)

    def _train(self, view: pb.View) -> None:
        if self.version is None:
            raise AssertionError("RUNNING without a state")
        self.versions_at_running.setdefault(view.generation, self.version)
        if self.version == self.steps:
            self.client.call(pb.FinishRequest(version=self.version))
            self._changed.wait(0.1)
        else:
            self.version += 1
            self._changed.wait(0.005)

    def ready(self, generation: int, version: int | None) -> pb.ReadyRequest:
        return pb.ReadyRequest(
            generation=generation, version=version, stages=self.stages, num_stages=self.num_stages
        )

    def _act(self, view: pb.View) -> None:
        if view.state == pb.FORMING:
            self.version = 0
            self.client.call(pb.CheckpointRequest())
            self.client.call(self.ready(view.generation, 0))
        elif view.state == pb.PLANNING:
            has_state = self.version is not None
            self.client.call(
                pb.ReportRequest(generation=view.generation, has_state=has_state, version=self.version)
            )
        elif view.state == pb.RECOVERING:
            reason = self.refuses(view)
            if reason:
                self.client.call(pb.RefuseRequest(generation=view.generation, reason=reason))
                return
            self.version = view.plan.target_version
            self.client.call(self.ready(view.generation, self.version))


class Job:
    """A coordinator and the members of one job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.coordinators: list[Coordinator] = []
        self.members: list[FakeMember] = []

    def coordinator(self, *flags: str) -> Coordinator:
        self.coordinators.append(
            Coordinator(self.directory / f"meta{len(self.coordinators)}", *flags).start()
        )
        return self.coordinators[-1]

    def member(self, rank: int, job: str = "a", **named: object) -> FakeMember:
        member = FakeMember(self.coordinators[-1].address, job, rank, RANKS, **named)  # type: ignore[arg-type]
        self.members.append(member)
        return member.start()

    def form(self, job: str = "a", **named: object) -> list[FakeMember]:
        members = [self.member(rank, job, **named) for rank in range(RANKS)]
        self.wait(members[0], lambda view: view.state == pb.RUNNING)
        return members

    def wait(self, member: FakeMember, predicate: Callable[[pb.View], bool]) -> pb.View:
        """Watched by `member`, which must live."""
        return member.watcher.wait_for(predicate, 20)

    def close(self) -> None:
        for member in self.members:
            member.kill()
        for coordinator in self.coordinators:
            coordinator.stop()
        errors = [(m.rank, m.error) for m in self.members if m.error is not None]
        assert not errors, errors


def recovered(generation: int) -> Callable[[pb.View], bool]:
    return lambda view: view.state == pb.RUNNING and view.generation == generation


def finish(job: Job, members: list[FakeMember]) -> None:
    """Lets the members run to one last step, and waits for the end."""
    last = max(member.version or 0 for member in members) + 20
    for member in members:
        member.steps = last
    job.wait(members[0], lambda view: view.state == pb.FINISHED)
