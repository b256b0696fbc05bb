"""Faults 34 to 39: who decides, what is still there, and what is never trained on, against real processes."""

import json
import shutil
import threading
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import log_pb2
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import RecordTrimmed, ServiceError
from swift_ft.lab.drill.cluster import LOG_SERVER
from swift_ft.log import admin
from swift_ft.log.protocol import code_of, message_of, reason_of
from swift_ft.log.reader import never
from tests.faults.world import TIMEOUT_S, Server, body_of, fill, key
from tests.integration.coordinator_world import Coordinator, Job, finish, recovered
from tests.integration.forked import ForkedCluster, Forks
from tests.integration.logserver_world import JOB
from tests.integration.test_coordinator import run
from tests.integration.trainer_world import TRAINERS, undisturbed, until_over
from tests.patience import eventually
from tests.unit.log.clients import reading
from tests.unit.log.frames import STREAM

# -- 34: the coordinator dies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["FENCING", "PLANNING", "RECOVERING", "RUNNING", "FINISHED"])
def test_f34_coordinator_killed_right_after_any_transition_goes_on_from_there(
    job: Job, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    coordinator = job.coordinator("--die-at", state)

    def succeed() -> None:
        coordinator.wait_killed()
        coordinator.start()

    successor = threading.Thread(target=succeed)
    successor.start()
    members = job.form()
    members[1].kill()
    members[1].report_exit()  # not answered by the one that dies of it, so said again to its successor
    members[1] = job.member(1)
    job.wait(members[0], recovered(2))
    finish(job, members)
    successor.join()

    trace = [event for event in events.read(tmp_path) if event["who"] == "coordinator"]
    died = [event for event in trace if event["event"] == "die_at"]
    assert [event["state"] for event in died] == [state]
    resumed = [event for event in trace if event["event"] == "resumed"]
    assert [(event["state"], event["generation"]) for event in resumed] == [(state, 2)]
    # What it was killed before was said by its successor, and no state was skipped or said twice.
    said = [event["state"] for event in trace if event["event"] == "state"] + [state]
    wanted = ["FORMING", "RUNNING", "FENCING", "PLANNING", "RECOVERING", "RUNNING", "FINISHED"]
    assert sorted(said) == sorted(wanted)


def reported(directory: Path) -> list[dict[str, Any]]:
    """What a coordinator has taken, and made durable."""
    return [
        event
        for event in events.read(directory)
        if (event["who"], event["event"]) == ("coordinator", "reported")
    ]


@pytest.mark.parametrize("after", ["FORMING", "RUNNING", "PLANNING"])
def test_f34_coordinator_killed_at_rest_goes_on(
    job: Job, after: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SWIFT_EVENTS", str(tmp_path))
    coordinator = job.coordinator()
    if after == "FORMING":
        members = [job.member(0), job.member(1)]
        job.wait(members[0], lambda view: len(view.members) == 2)
        coordinator.kill()
        coordinator.start()
        members.append(job.member(2))
        job.wait(members[0], recovered(1))
    else:
        members = job.form()
        if after == "PLANNING":
            members[2].kill()
            members[2].report_exit()
            job.wait(members[0], lambda view: view.state == pb.PLANNING)
            # The survivors have reported, and do not say it again.
            eventually(lambda: len(reported(tmp_path)) == 2, "two reports")
        coordinator.kill()
        coordinator.start()
        if after == "PLANNING":
            members[2] = job.member(2)
            job.wait(members[0], recovered(2))
            assert [event["rank"] for event in reported(tmp_path)[2:]] == [2]
    finish(job, members)


# -- 35: two coordinators ----------------------------------------------------------------------------------------


def test_f35_second_coordinator_on_one_directory_is_refused(job: Job) -> None:
    coordinator = job.coordinator()
    members = job.form()
    second = run("--directory", str(coordinator.directory))
    assert second.returncode == 3
    assert "another coordinator uses it" in second.stderr
    assert len(second.stderr.splitlines()) == 1, second.stderr
    finish(job, members)


def test_f35_coordinator_whose_term_is_over_ends_at_its_first_decision(job: Job, tmp_path: Path) -> None:
    """A file system without locks, or the locked file was replaced: the store's revision is what counts."""
    first = job.coordinator()
    members = job.form()
    locked = first.directory / "acknowledged"
    shutil.copy(locked, tmp_path / "copy")
    (tmp_path / "copy").replace(locked)
    second = Coordinator(first.directory).start()
    try:
        # The second one decides: its members report to it.
        with CoordinatorClient(second.address, "a") as client:
            view = client.status().view
            assert (view.state, view.generation) == (pb.RUNNING, 1)
            holder = members[1].member
            client.call(pb.ExitRequest(rank=1, pid=holder.pid, exit_code=-9, incarnation=holder.incarnation))
            assert client.status().view.generation == 2
            # Now the first one is asked for a decision, which would be generation 2 as well, for another reason.
            for member in members:
                member.client.patience_s = 1.0
            with pytest.raises(ServiceError, match="no answer"):
                members[0].client.call(pb.RefuseRequest(generation=1, reason="something else"))
            assert first.process is not None
            assert first.process.wait(TIMEOUT_S) == 3
            assert first.process.stderr is not None
            said = first.process.stderr.read()
            assert "job a cannot be made durable" in said
            assert len(said.splitlines()) == 1, said
            after = client.status().view
            assert after.generation == 2
            assert after.reason == "rank 1 was killed by signal 9"
    finally:
        for member in members:
            member.kill()
        job.members.clear()
        second.stop()
        assert first.process is not None
        first.process.communicate()
        job.coordinators.clear()


def test_f35_coordinator_that_is_behind_the_log_servers_does_not_act(job: Job, tmp_path: Path) -> None:
    """One with a directory of its own begins the job anew: the log holds a later generation, and it gives up."""
    with Server(tmp_path / "log") as log:
        log_servers = ("--log-servers", log.address)
        job.coordinator(*log_servers)
        members = [job.member(rank, JOB) for rank in range(3)]
        job.wait(members[0], recovered(1))
        members[1].kill()
        members[1].report_exit()
        members[1] = job.member(1, JOB)
        job.wait(members[0], recovered(2))
        job.coordinator(*log_servers)
        late = job.member(0, JOB)
        view = job.wait(late, lambda view: view.state == pb.FAILED)
        assert f"is ahead of this coordinator for job {JOB}" in view.reason
        assert log.stub.Inventory(log_pb2.InventoryRequest(job=JOB)).generation == 2
        assert members[0].client.status().view.state == pb.RUNNING
        finish(job, members)


# -- 36: a second failure ----------------------------------------------------------------------------------------


def test_f36_second_death_during_a_recovery_supersedes_its_plan_by_a_higher_generation(job: Job) -> None:
    job.coordinator()
    members = job.form()
    members[0].kill()
    members[0].report_exit()
    job.wait(members[1], lambda view: view.state == pb.PLANNING)
    members[2].kill()
    members[2].report_exit()
    job.wait(members[1], lambda view: view.generation == 3)
    members[0], members[2] = job.member(0), job.member(2)
    view = job.wait(members[1], recovered(3))
    assert [r.strategy for r in view.plan.ranks] == [pb.REPLAY, pb.KEEP, pb.REPLAY]
    finish(job, members)


# -- 37: log server and rank lost together ------------------------------------------------------------------------

STEPS, CHECKPOINT_EVERY = 8, 3


def until(cluster: ForkedCluster, path: Path) -> None:
    def there() -> bool:
        assert cluster.poll() is None, cluster.output_tail()
        return path.exists()

    eventually(there, cluster.output_tail, 90)


HELD = {"id": "f0", "rank": 1, "step": 5, "microbatch": 1, "phase": "backward", "hold": True}


def until_saved(cluster: ForkedCluster) -> None:
    """The rank stands where it is going to die, and the checkpoint before that is whole: saving it takes its time."""
    until(cluster, cluster.fault_directory / "f0.reached")

    def complete() -> list[int]:
        trace = events.read(cluster.directory / "events")
        return [event["version"] for event in trace if event["event"] == "checkpoint_complete"]

    eventually(lambda: CHECKPOINT_EVERY in complete(), f"checkpoint {CHECKPOINT_EVERY} is complete")


def started(
    directory: Path, faults: list[dict[str, Any]], spares: int = 0, mode: str = "traced"
) -> ForkedCluster:
    """Of the same job as `twin`, unless `mode` says otherwise."""
    return ForkedCluster(
        directory,
        ranks=3,
        spares=spares,
        trainer=[str(TRAINERS / "features.py")],
        trainer_arguments=[mode, str(STEPS)],
        faults=json.dumps(faults),
        digests_every=True,
    )


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    """The digests of a run that nothing happened to."""
    run = undisturbed(forks, tmp_path_factory.mktemp("twin"), "features.py", "traced", STEPS, ranks=3)
    digests: dict[str, Any] = run["digests"]
    assert digests
    return digests


def same_digests(directory: Path, twin: dict[str, Any], first_version: int = 0) -> None:
    found = {path.name: json.loads(path.read_text()) for path in (directory / "digests").glob("*.json")}
    for rank, version in product(range(3), range(first_version, STEPS + 1)):
        name = f"rank{rank}-v{version}.json"
        assert found[name] == twin[name], name


@pytest.mark.timeout(240)
def test_f37_log_server_and_rank_lost_together_fall_back_to_the_checkpoint_and_say_why(
    tmp_path: Path, twin: dict[str, Any]
) -> None:
    """One machine had both: the rank dies in step 5, and the log server comes back with an empty disk."""
    with started(tmp_path, [HELD], spares=1) as cluster:
        until_saved(cluster)
        cluster.kill_log_server("f1")
        assert cluster._processes[LOG_SERVER]._popen.wait(TIMEOUT_S) == -9
        shutil.rmtree(cluster.log_directories[0])
        (cluster.fault_directory / "f0.go").touch()
        until_over(cluster)
    trace = events.read(tmp_path / "events")
    (plan,) = [event for event in trace if event["event"] == "plan"]
    assert {rank["strategy"] for rank in plan["ranks"]} == {"CHECKPOINT"}
    assert plan["target_version"] == CHECKPOINT_EVERY
    assert plan["exact"]
    lost = ("is empty, and step 3 is needed", "were acknowledged and are gone")
    assert any(words in plan["reason"] for words in lost), plan["reason"]
    assert not [event for event in trace if event["event"] == "replay_end"]
    same_digests(tmp_path, twin)


@pytest.mark.timeout(240)
def test_a_job_that_was_stopped_whole_goes_on_under_its_name(tmp_path: Path, twin: dict[str, Any]) -> None:
    """Stopped in step 5, services and ranks alike, and started again: from its newest checkpoint to the same bits."""
    with started(tmp_path, [HELD]) as cluster:
        until_saved(cluster)
        cluster.stop()
    before = events.read(tmp_path / "events")
    assert max(event["step"] for event in before if event["event"] == "step_end") == 4
    assert not [event for event in before if event["event"] == "finished"]
    for path in (*tmp_path.glob("*.address"), *(tmp_path / "digests").iterdir()):
        path.unlink()  # what is found below is of the second start
    with started(tmp_path, []) as cluster:
        until_over(cluster)
    after = [event for event in events.read(tmp_path / "events") if event["t"] > before[-1]["t"]]
    (plan,) = [event for event in after if event["event"] == "plan"]
    assert {rank["strategy"] for rank in plan["ranks"]} == {"CHECKPOINT"}
    assert plan["target_version"] == CHECKPOINT_EVERY
    assert sum(event["event"] == "finished" for event in after) == 3
    for rank in range(3):
        (restored,) = (tmp_path / "digests").glob(f"rank{rank}-v{CHECKPOINT_EVERY}-g*.json")
        assert json.loads(restored.read_text()) == twin[f"rank{rank}-v{CHECKPOINT_EVERY}.json"]
    same_digests(tmp_path, twin, CHECKPOINT_EVERY + 1)


# -- 38: trimmed --------------------------------------------------------------------------------------------------


def test_f38_trimmed_step_is_not_found_and_a_replay_holds_a_lease(tmp_path: Path) -> None:
    with Server(tmp_path / "log", "--segment-bytes", "60000") as server:
        fill(server, 20)
        with reading(server.address) as reader:
            cursor = reader.follow(STREAM, 5)
            assert cursor.get(key(5), TIMEOUT_S, lambda: False).body == body_of(5)
            assert admin.trim(server.address, JOB, 12, TIMEOUT_S) == 5  # as far as the replay allows
            for step in range(6, 20):
                assert cursor.get(key(step), TIMEOUT_S, lambda: False).body == body_of(step)
            cursor.close()
            # Now it goes on by itself.
            eventually(lambda: server.said("trimmed")[-1]["below_step"] == 12, "the trim goes on")
            with pytest.raises(RecordTrimmed, match="the oldest step there is 12"):
                reader.digests(STREAM, 11, cancelled=never)
        for call in (
            lambda: list(server.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM, from_step=11))),
            lambda: list(server.stub.Digests(log_pb2.DigestsRequest(job=JOB, stream=STREAM, from_step=0))),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert (code_of(caught.value), reason_of(caught.value)) == (grpc.StatusCode.NOT_FOUND, "trimmed")
            assert "the oldest step there is 12" in message_of(caught.value)
        server.kill()
        server.start()  # a trim is durable
        assert server.inventory().trimmed_below_step == 12
        server.check(12, 20)


# -- 39: a replay that differs ------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_f39_replay_that_differs_from_the_log_is_refused_and_never_trained_on(tmp_path: Path) -> None:
    with started(tmp_path, [HELD], spares=1, mode="unrepeatable") as cluster:
        until_saved(cluster)
        (cluster.fault_directory / "f0.go").touch()
        until_over(cluster)
    trace = events.read(tmp_path / "events")
    plans = [e for e in trace if e["event"] == "plan"]
    assert {entry["strategy"] for entry in plans[0]["ranks"]} == {"KEEP", "REPLAY"}
    assert {entry["strategy"] for entry in plans[-1]["ranks"]} == {"CHECKPOINT"}
    assert "is not the logged one" in plans[-1]["reason"]
    assert plans[-1]["target_version"] == 3
    assert not [e for e in trace if e["event"] == "replay_end"]
    assert sum(e["event"] == "finished" for e in trace) == 3
