"""What one part of a session needs of another one is there, or is missed aloud."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.errors import UsageError
from swift_ft.planner import Assignment
from swift_ft.train.boundary_log import FORWARD
from swift_ft.train.collective_policy import Gate
from swift_ft.train.config import SessionConfig
from swift_ft.train.coordinator_session import Member
from swift_ft.train.hook import Hook
from swift_ft.train.session import Session
from swift_ft.train.updates import Updates
from tests.integration.logserver_world import REPOSITORY
from tests.local_backend import LocalBackend
from tests.unit.runtime.test_updates import HalvingReducer
from tests.unit.runtime.wired import channel_of, engine_of, ignored, state_of, updates_of

TIMEOUT_S = 60.0


def test_a_hook_that_is_bound_to_nothing_names_itself() -> None:
    hook: Hook[[int], int] = Hook("Part.hook")
    with pytest.raises(AssertionError, match=r"^Part\.hook is bound to nothing$"):
        hook(1)
    hook.bind(lambda number: number + 1)
    assert hook(1) == 2
    with pytest.raises(AssertionError, match=r"^Part\.hook is bound already$"):
        hook.bind(lambda number: number)
    assert hook(1) == 2


def stepped(updates: Updates) -> torch.nn.Parameter:
    """A parameter of 1.0 whose update was asked for."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    updates.add(optimizer)
    updates.begin_step(0)
    parameter.grad = torch.ones(2)
    try:
        optimizer.step()
    finally:
        assert parameter.tolist() == [1.0, 1.0]
    return parameter


def test_no_update_is_applied_without_a_vote() -> None:
    config = SessionConfig(replicas=2)
    with pytest.raises(AssertionError, match=r"Updates\.vote is bound to nothing"):
        stepped(updates_of(config, HalvingReducer(), vote=None))
    with pytest.raises(AssertionError, match=r"Updates\.before_update is bound to nothing"):
        stepped(updates_of(config, HalvingReducer(), before_update=None))
    with pytest.raises(AssertionError, match=r"Updates\.before_reduction is bound to nothing"):
        stepped(updates_of(config, HalvingReducer(), before_reduction=None))


def test_the_engine_is_what_an_update_is_put_to_the_vote_by() -> None:
    updates = updates_of(vote=None)
    channel: Any = SimpleNamespace()
    engine_of(0, SessionConfig(), member=None, channel=channel, state=state_of(1, updates))
    with pytest.raises(AssertionError, match="is bound already"):
        updates.vote.bind(ignored)


def test_nothing_passes_a_gate_that_knows_of_no_step() -> None:
    gate = Gate()
    group = ReconfigurableGroup("default", (0, 1), 0, LocalBackend(), gate=gate)
    group._circuit = object()  # type: ignore[assignment]
    words = r"Gate\.bind was not called"
    with gate.step():
        for call in (
            lambda: group.allreduce([torch.ones(1)], torch.distributed.AllreduceOptions()),
            lambda: gate.collective(group, "all_reduce", [torch.ones(1)], ignored, alike=True),
            gate.reducing,
        ):
            with pytest.raises(AssertionError, match=words):
                call()
    with gate.passing(), pytest.raises(AssertionError, match=words):
        group.send([torch.ones(1)], 1)
    nothing: Any = SimpleNamespace()
    gate.bind(nothing, updates_of(), [])
    gate.used(ReconfigurableGroup("default", (0, 1), 0, LocalBackend()))
    with pytest.raises(AssertionError, match="called before"):
        gate.bind(nothing, updates_of(), [])


def test_a_channel_that_nobody_has_opened_logs_nothing_in_silence() -> None:
    channel = channel_of(ranks=2)
    channel.begin_step(0)
    with pytest.raises(AssertionError, match=r"Channel\.watch was not called"):
        channel.sends(0, FORWARD, 0, 0, torch.ones(1))
    channel.watch(None)
    for call in (
        lambda: channel.sent(0, FORWARD, 0, 0, torch.ones(1)),
        channel.wait_copied,
        channel.drop_step,
    ):
        with pytest.raises(AssertionError, match=r"Channel\.open was not called"):
            call()
    with pytest.raises(AssertionError, match=r"Channel\.watch was called before"):
        channel.watch(None)


# -- a whole session ------------------------------------------------------------------------------------------


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
    hooks = [hook for part in vars(session).values() for hook in _hooks(part)]
    assert len(hooks) == 6
    for hook in hooks:
        with pytest.raises(AssertionError, match="is bound already"):
            hook.bind(ignored)
    assert session._engine._steps._witness is session._channel.witness
    assert session._state.randomness is session._state.iterators.randomness is session._channel.randomness
    for name, group in session.groups.items():
        assert group.gate is session._gate
        assert group.live == (name not in ("world", "pipeline"))
    session._gate.used(session.groups["world"])
    # The notice frees the trainer's thread: the communicator hears of it.
    coordinator.saw(pb.View(job="j", generation=5, state=pb.PLANNING))
    deadline = time.monotonic() + TIMEOUT_S
    while session._engine._communicator._newest != 5:
        assert time.monotonic() < deadline, "nobody is told of a newer generation"
        time.sleep(0.005)
    member.enter(5)
    session.close()


def _hooks(part: object) -> list[Hook[..., Any]]:
    return [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Hook)]


@pytest.mark.parametrize("work", [build, refuse])
def test_a_session_leaves_nothing_unbound_and_is_refused_without_room_for_its_log(
    tmp_path: Path, work: Callable[[str], None]
) -> None:
    program = f"from tests.unit.runtime.test_wiring import {work.__name__} as work; work({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=2 * TIMEOUT_S, cwd=REPOSITORY)
