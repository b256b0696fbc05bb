"""Jobs that a trainer ends before the last step: who is told, who waits in vain, and what is remembered."""

from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.endings import UNLIKE_CODE
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import JobRow, LogServer, State
from swift_ft_services.coordinator.timeouts import Timing
from swift_ft_services.coordinator.views import status_of, view_of
from tests.unit.coordinator.driver_world import join
from tests.unit.coordinator.rows import copy_of

TIMING = Timing(heartbeat_s=1.0, lease_s=5.0, step_bound_s=20.0, log_lost_s=15.0)


class World:
    """Two ranks that run: the stages of a pipeline, or replicas of one."""

    def __init__(self, *, replicas: bool = False) -> None:
        self.replicas = replicas
        self.now = 100.0
        self.job = Job.create("j", [LogServer(address="l0")], self.join(0), TIMING, self.now)
        self.begin("a")

    def join(self, rank: int, run: str = "a") -> m.Join:
        return m.Join(join(rank, f"{run}{rank}", pid=rank, world_size=2, run=run))

    def begin(self, run: str, version: int = 0) -> None:
        """All join; the job runs at this version."""
        self.run = run
        for rank in range(2):
            self.step(self.join(rank, run))
        if version:
            self.recover(version)
        else:
            self.step(m.LogsFenced(generation=self.row.generation))
            self.all_ready(version)

    def recover(self, version: int) -> None:
        self.step(m.LogsFenced(generation=self.row.generation))
        for rank in range(2):
            self.step(
                pb.ReportRequest(
                    **self.sender(rank),
                    generation=self.row.generation,
                    has_state=version is not None,
                    version=version,
                )
            )
        self.step(m.InventoryTaken(generation=self.row.generation, servers={"l0": []}))
        self.step(m.LogsReset(generation=self.row.generation))
        self.all_ready(version)

    def all_ready(self, version: int) -> None:
        for rank in range(2):
            stages = (0,) if self.replicas else (rank,)
            count = 1 if self.replicas else 2
            generation = self.row.generation
            self.step(pb.CheckpointRequest(**self.sender(rank), version=version, generation=generation))
            ready = pb.ReadyRequest(
                **self.sender(rank),
                generation=generation,
                version=version,
                stages=stages,
                num_stages=count,
            )
            self.step(ready)
        assert self.row.state is State.RUNNING

    @property
    def row(self) -> JobRow:
        return self.job.row

    def sender(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "incarnation": f"{self.run}{rank}"}

    def step(self, command: m.Command) -> list[m.Effect]:
        return self.job.step(command, self.now)

    def finish(self, rank: int, version: int, called: bool | None, num_steps: int = 100) -> list[m.Effect]:
        return self.step(
            pb.FinishRequest(
                **self.sender(rank), version=version, num_steps=num_steps, called=called, reason="enough"
            )
        )

    def beat(self, rank: int, version: int) -> None:
        self.step(pb.HeartbeatRequest(**self.sender(rank), version=version))

    def wait(self, versions: tuple[int, int], seconds: float = 3.0) -> None:
        until = self.now + seconds
        while self.now < until and self.row.state is State.RUNNING:
            self.now += 0.5
            for rank, version in enumerate(versions):
                self.beat(rank, version)
            self.step(m.Tick())

    def restarted(self) -> None:
        """The coordinator."""
        self.job = Job(copy_of(self.row), TIMING, self.now)


def test_one_rank_ends_it_and_all_are_told() -> None:
    world = World()
    effects = world.finish(1, 10, called=True)
    assert any(isinstance(effect, m.PublishView) for effect in effects)
    view = view_of(world.row)
    assert (view.ends_at, view.ends_of, view.state) == (10, 100, pb.RUNNING)
    world.restarted()
    assert view_of(world.row).ends_at == 10
    world.finish(0, 10, called=False)
    assert world.row.state is State.FINISHED
    assert view_of(world.row).reason == "stopped at step 9: enough"
    # However long before their last heartbeats were.
    assert [rank.version for rank in status_of(world.job, world.now).ranks] == [10, 10]


def test_who_is_on_its_way_there_is_waited_for() -> None:
    world = World()
    world.finish(1, 10, called=True)
    world.wait((9, 10), seconds=60.0)
    assert (world.row.state, world.row.generation) == (State.RUNNING, 1)


def test_who_has_begun_the_next_step_is_freed_by_a_generation() -> None:
    world = World()
    world.finish(1, 10, called=True)
    world.wait((10, 10))
    assert (world.row.state, world.row.generation) == (State.FENCING, 2)
    assert world.row.reason == "rank 1 has ended the job with step 9; others have begun the next one"
    world.recover(10)
    assert view_of(world.row).ends_at == 10
    for rank in range(2):
        world.finish(rank, 10, called=rank == 1)
    assert world.row.state is State.FINISHED


def test_a_generation_made_for_it_is_given_the_same_time() -> None:
    """Also if it runs before the next tick."""
    world = World()
    world.finish(1, 10, called=True)
    world.wait((10, 10))
    world.recover(10)
    world.finish(1, 10, called=True)
    for rank in range(2):
        world.beat(rank, 10)
    world.step(m.Tick())
    assert (world.row.state, world.row.generation) == (State.RUNNING, 2)
    world.wait((10, 10))
    assert world.row.generation == 3


def test_replicas_that_decide_otherwise_fail_the_job() -> None:
    for first, second in ((0, 1), (1, 0)):
        world = World(replicas=True)
        world.finish(first, 10, called=True)
        world.finish(second, 10, called=False)
        assert (world.row.state, world.row.exit_code) == (State.FAILED, UNLIKE_CODE)
        assert world.row.reason == (
            f"rank {first} has called session.stop() in step 9, its replica, rank {second}, has not; let all replicas "
            "decide alike, for instance by dist.all_reduce of what they decide by"
        )
    world = World(replicas=True)
    world.finish(0, 10, called=True)
    world.finish(1, 10, called=None)  # it was copied: it has not done that step
    assert world.row.state is State.FINISHED


def test_a_finished_job_started_again_remembers_it_and_a_failed_one_comes_to_it_again() -> None:
    world = World()
    for rank in range(2):
        world.finish(rank, 10, called=rank == 1)
        world.step(pb.CheckpointRequest(**world.sender(rank), version=10, generation=1))
    assert world.row.state is State.FINISHED
    world.begin("b", version=10)
    assert (world.row.end is not None, view_of(world.row).ends_of) == (True, 100)
    world.step(pb.FailRequest(reason="boom"))
    world.begin("c", version=10)
    assert world.row.end is None


def test_more_steps_are_another_end() -> None:
    world = World()
    for rank in range(2):
        world.finish(rank, 10, called=rank == 1)
        world.step(pb.CheckpointRequest(**world.sender(rank), version=10, generation=1))
    world.begin("b", version=10)
    # It is done with 200 steps: what ended the run of 100 is no reason to wait for anybody.
    world.finish(0, 200, called=None, num_steps=200)
    world.wait((200, 200))
    assert world.row.state is State.RUNNING
    world.finish(1, 200, called=None, num_steps=200)
    assert (world.row.state, world.row.reason) == (State.FINISHED, "")
    world.begin("c", version=10)
    world.finish(1, 30, called=True, num_steps=300)
    assert view_of(world.row).ends_at == 30
    assert view_of(world.row).ends_of == 300


def test_the_earliest_counts() -> None:
    world = World()
    world.finish(1, 10, called=True)
    end = world.row.end
    assert end is not None
    assert not world.job.endings.on_finish(
        pb.FinishRequest(**world.sender(0), version=12, num_steps=100, called=True)
    )
    assert world.row.end == end
    assert world.job.endings.on_finish(
        pb.FinishRequest(**world.sender(0), version=8, num_steps=100, called=True)
    )
    assert (world.row.end.version, world.row.end.rank) == (8, 0)
