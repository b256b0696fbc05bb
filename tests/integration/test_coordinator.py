"""The coordinator as a process, against fake members."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift import control
from tests.integration.coordinator_world import Coordinator, FakeMember


@pytest.fixture
def members() -> Iterator[list[FakeMember]]:
    started: list[FakeMember] = []
    yield started
    for member in started:
        member.kill()
    assert [m.error for m in started if m.error] == []


def test_a_job_forms_loses_a_rank_recovers_and_finishes(tmp_path: Path, members: list[FakeMember]) -> None:
    coordinator = Coordinator(tmp_path / "meta").start()
    members += [FakeMember(coordinator.address, "a", rank, 3, steps=10**9).start() for rank in range(3)]
    watcher = members[0].watcher
    watcher.wait_for(lambda view: view.state == control.RUNNING, 10)

    victim = members[1]
    victim.kill()
    launcher = control.CoordinatorClient(coordinator.address, "a")
    launcher.member_exited(1, victim.member.pid, -signal.SIGKILL)
    view = watcher.wait_for(lambda view: view.state == control.PLANNING, 10)
    assert view.generation == 2
    assert [member.rank for member in view.fenced] == [1]
    members.append(FakeMember(coordinator.address, "a", 1, 3, steps=10**9).start())
    watcher.wait_for(lambda view: view.state == control.RUNNING and view.generation == 2, 10)
    for member in members:
        member.steps = (member.version or 0) + 50  # each at its own pace, so:
    last = max(member.steps for member in members)
    for member in members:
        member.steps = last
    watcher.wait_for(lambda view: view.state == control.FINISHED, 10)
    launcher.close()
    assert coordinator.stop() == 0
