"""What one part of a session needs of another one is there."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import UsageError
from swift_ft.planner import Assignment
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member
from swift_ft.train.session import Session
from tests.integration.logserver_world import REPOSITORY

TIMEOUT_S = 60.0


class Coordinator:
    """Its client and its watcher, of a job that has finished."""

    address, job = "127.0.0.1:1", "j"

    def __init__(self) -> None:
        self.latest = pb.View(job="j", generation=3, state=pb.FINISHED, world_size=1)

    def join(self, *_: object, **__: object) -> int:
        return self.latest.generation

    def call(self, _beat: pb.HeartbeatRequest) -> Any:
        return SimpleNamespace(interval_s=TIMEOUT_S)

    def watch(self, saw: Any) -> "Coordinator":
        self.saw = saw
        return self

    def wait_for(self, predicate: Any, timeout_s: float | None) -> pb.View:
        return self.latest

    def close(self) -> None: ...


def session_of(directory: str, coordinator: Any, **settings: Any) -> tuple[Session, Member]:
    member = Member("127.0.0.1:1", "j", 0, "i")
    member.client.close()
    member.client = coordinator
    config = SessionConfig(strategy="replay", **settings)
    return Session(
        rank=0, assignment=Assignment.grid(1), member=member, checkpoint_dir=directory, config=config
    ), member


def refuse(directory: str) -> None:
    """(in a process of its own) It never joins."""
    coordinator = Coordinator()
    coordinator.join = None  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"cannot be had as shared memory \(memfd\).*; allow it, or give"):
        session_of(directory, coordinator, log_queue_bytes=1 << 62)


def build(directory: str) -> None:
    """(in a process of its own: torch has one default group) Every part of it is bound to what it needs."""
    coordinator = Coordinator()
    session, member = session_of(directory, coordinator)
    updates = session._updates
    for part, names in (
        (session._gate, ("set_up", "channel", "updates", "participants")),
        (updates, ("vote", "before_reduction", "reduced", "unreduced", "before_update")),
        (updates.cut_step, ("held_over", "given_up")),
    ):
        assert vars(part).keys() >= set(names)
    assert session._engine._site.witness is session._channel.witness
    assert session._state.randomness is session._state.iterators.randomness is session._channel.randomness
    for name, group in session.groups.items():
        assert group.gate is session._gate
        assert group.live == (name not in ("world", "pipeline"))
    session._gate.used(session.groups["world"])
    # The notice frees the trainer's thread: the communicator hears of it.
    coordinator.saw(pb.View(job="j", generation=5, state=pb.PLANNING))
    deadline = time.monotonic() + TIMEOUT_S
    while session._engine._site.communicator._newest != 5:
        assert time.monotonic() < deadline, "nobody is told of a newer generation"
        time.sleep(0.005)
    member.enter(5)
    session.close()


@pytest.mark.parametrize("work", [build, refuse])
def test_a_session_leaves_nothing_unbound_and_is_refused_without_room_for_its_log(
    tmp_path: Path, work: Callable[[str], None]
) -> None:
    program = f"from tests.unit.runtime.test_wiring import {work.__name__} as work; work({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * TIMEOUT_S, cwd=REPOSITORY)
