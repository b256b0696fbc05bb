"""What every backend promises (`swift_ft.comm.backend`), held against each of them.

gloo: a process for each member, real sockets, real SIGKILL. nccl: the same over the fake NCCL of the simulated device,
where waits order streams only: each operation there ends with the wait and the check that a step has before its update.
local: threads of this process. Scenarios that torch's own suite has for `dist._reconfigure` (pytorch,
test/distributed/test_c10d_fault_tolerance.py) are named as there.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tests.device import simulated
from tests.integration.forked import Forks, meeting, new_store
from tests.integration.group_members import LARGE, SMALL, Listener, Member, Told, digest, values
from tests.local_backend import LocalBackend
from tests.patience import eventually

PATIENCE_S = 40.0  # a machine may be busy; no timeout of a backend's ends a wait before it

Operation = dict[str, Any]


class World:
    """Members to be told, and the store in which they meet."""

    def __init__(self, backend: str, forks: Forks, listener: Listener) -> None:
        self._backend = backend
        self._forks = forks
        self._listener = listener
        self._store = new_store()
        self._processes: list[Any] = []

    def members(self, count: int) -> list[Told]:
        return [self._listener.start(self._begin) for _ in range(count)]

    def _begin(self, path: str) -> None:
        if self._backend == "local":
            member = Member(LocalBackend(), ("127.0.0.1", self._store.port), lambda: None)
            threading.Thread(target=member.serve, args=(path,), daemon=True).start()
        else:
            environment = {**meeting(self._store)}
            arguments = [path, self._store.port]
            program = (
                "tests.device.nccl_members" if self._backend == "nccl" else "tests.integration.group_members"
            )
            self._processes.append(self._forks.run(program, arguments, environment))

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.fixture(params=["gloo", "nccl", "local"])
def world(request: pytest.FixtureRequest, forks: Forks) -> Iterator[World]:
    if request.param == "nccl":
        if simulated.compiler() is None:
            pytest.skip("no C++ compiler: g++ makes the simulated device")
        simulated.library()
    with Listener() as listener:
        world = World(request.param, forks, listener)
        yield world
        world.close()


def begin_to_connect(members: Sequence[Told], group: str, size: int | None = None) -> None:
    for place, member in enumerate(members):
        member.ask("open", group=group)
        member.ask("start", group=group, operation="connect", own=place, size=size or len(members))


def connected(members: Sequence[Told]) -> None:
    for member in members:
        outcome = member.ask("outcome", patience_s=PATIENCE_S)
        assert "gave" in outcome, outcome


def connect(members: Sequence[Told], group: str) -> None:
    begin_to_connect(members, group)
    connected(members)


def start(member: Told, group: str, operation: Operation) -> None:
    member.ask("start", group=group, **operation)


def gave(member: Told) -> str:
    outcome = member.ask("outcome", patience_s=PATIENCE_S)
    assert "gave" in outcome, outcome
    return str(outcome["gave"])


def freed(member: Told) -> None:
    """By an error that a lost peer could be behind. A small send may have been over before."""
    outcome = member.ask("outcome", patience_s=PATIENCE_S)
    assert outcome.get("lost_peer"), outcome


def works(members: Sequence[Told], group: str, seeds: Sequence[int] | None = None) -> None:
    """All sum up, in their order, and get the same bits."""
    seeds = seeds or [10 + place for place in range(len(members))]
    for numel in (SMALL, LARGE):
        for member, seed in zip(members, seeds, strict=True):
            start(member, group, all_reduce(seed, numel))
        expected = digest(functools.reduce(torch.add, [values(seed, numel) for seed in seeds]))
        assert [gave(member) for member in members] == [expected] * len(members)


def all_reduce(seed: int, numel: int) -> Operation:
    return {"operation": "all_reduce", "seed": seed, "numel": numel}


def waits(member: Told) -> None:
    """It has begun, and is not over. (If it has not begun yet, the abort comes first: then it has to raise as well.)"""
    assert member.ask("outcome", patience_s=0.05) == {"waits": True}


NO_PAYLOAD_CUT: dict[str, Callable[[int], Operation]] = {
    "recv": lambda place: {"operation": "recv", "source": 2, "tag": 1, "numel": SMALL},
    "all_reduce, small": lambda place: all_reduce(place, SMALL),
    "broadcast": lambda place: {"operation": "broadcast", "seed": place, "numel": SMALL, "root": 2},
    "barrier": lambda place: {"operation": "barrier"},
}
"""These leave no thread behind. A payload that is cut while it arrives may keep one of the backend's for ever."""
WITHOUT_ITS_PEER = NO_PAYLOAD_CUT | {
    "send": lambda place: {"operation": "send", "to": 2, "tag": 1, "seed": 1, "numel": 4 * LARGE},
    "all_reduce, large": lambda place: all_reduce(place, LARGE),
    "all_gather": lambda place: {"operation": "all_gather", "seed": place, "numel": LARGE},
    "reduce_scatter": lambda place: {"operation": "reduce_scatter", "seed": place, "numel": LARGE},
    "all_to_all": lambda place: {"operation": "all_to_all", "seed": place, "numel": LARGE},
}
"""What members 0 and 1 do while member 2 does nothing. First those after which all threads must be gone."""


@pytest.mark.parametrize("first", [0, 1])
def test_an_abort_frees_whatever_waits_and_needs_no_peer(first: int, world: World) -> None:
    members = world.members(3)
    for turn, (name, operation) in enumerate(WITHOUT_ITS_PEER.items()):
        if name == "send" and world._backend == "local":
            continue  # it keeps all that is sent, and waits for nobody
        group = f"{turn}"
        connect(members, group)
        for place in (0, 1):
            start(members[place], group, operation(place))
        for place in (first, 1 - first):  # the other one has not been told yet
            waits(members[place]) if place == first else None
            members[place].ask("abort", group=group)
            freed(members[place])
        for member in members[:2]:
            member.ask("close", group=group)
            if name in NO_PAYLOAD_CUT:
                eventually(
                    lambda member=member: member.ask("runners_left") == 0, f"no thread waits in {name}"
                )
        members[2].ask("close", group=group)
    connect(members, "next")
    works(members, "next")


def test_an_abort_frees_who_connects_and_a_second_one_who_connects_again(world: World) -> None:
    members = world.members(3)
    for group in ("first", "second"):  # member 2 does not come
        begin_to_connect(members[:2], group, size=3)
        for member in members[:2]:
            waits(member)
            member.ask("abort", group=group)
            freed(member)
            member.ask("close", group=group)
    connect(members, "third")
    works(members, "third")


def test_an_abort_frees_who_connects_to_one_that_stands_still(world: World) -> None:
    """It was found in the store, and does not connect to the others: gloo waits for minutes. Which of two connects to
    the other one is gloo's choice, another one for every group: so there are several tries."""
    members = world.members(3)
    waited = False
    for turn in range(12):
        group = f"{turn}"
        members[2].ask("open", group=group)
        start(members[2], group, {"operation": "half_connect", "own": 2, "size": 3})
        waits(members[2])
        for place in (0, 1):
            members[place].ask("open", group=group)
            start(members[place], group, {"operation": "connect", "own": place, "size": 3})
        for member in members[:2]:
            outcome = member.ask("outcome", patience_s=0.2)
            member.ask("abort", group=group)
            if outcome == {"waits": True}:
                waited = True
                freed(member)
            member.ask("close", group=group)
        if waited:
            break
    assert waited
    members[2].tell("die")
    again = [*members[:2], *world.members(1)]
    connect(again, "next")
    works(again, "next")


def test_reconfigure_after_abort(world: World) -> None:
    """What begins after an abort raises; the next generation is whole, and has other members first."""
    members = world.members(3)
    connect(members, "first")
    works(members, "first")
    members[0].ask("abort", group="first")
    for operation in (all_reduce(1, SMALL), WITHOUT_ITS_PEER["recv"](0), WITHOUT_ITS_PEER["send"](0)):
        start(members[0], "first", operation)
        freed(members[0])
    members[0].ask("open", group="aborted")
    members[0].ask("abort", group="aborted")
    start(members[0], "aborted", {"operation": "connect", "own": 0, "size": 3})
    freed(members[0])
    for member in members:
        member.ask("abort", group="first")
        member.ask("close", group="first")
    connect(members[::-1], "next")
    works(members[::-1], "next")


@pytest.mark.parametrize("left", ["message", "part of a sum"])
def test_no_message_of_an_ended_generation_arrives_in_the_next(left: str, world: World) -> None:
    members = world.members(2)
    message = {"operation": "send", "to": 1, "tag": 5, "numel": SMALL}
    connect(members, "first")
    start(members[0], "first", {**message, "seed": 1} if left == "message" else all_reduce(1, SMALL))
    members[0].ask("outcome", patience_s=0.05)  # nobody takes what it sends
    for member in members:
        member.ask("abort", group="first")
        member.ask("close", group="first")
    connect(members, "second")
    start(members[1], "second", {"operation": "recv", "source": 0, "tag": 5, "numel": SMALL})
    waits(members[1])
    start(members[0], "second", {**message, "seed": 2})
    assert gave(members[1]) == digest(values(2, SMALL))
    gave(members[0])
    works(members, "second", seeds=[3, 4])


def leave(members: Sequence[Told], group: str) -> None:
    for member in members:
        member.ask("abort", group=group)
    for member in members:
        freed(member)
        member.ask("close", group=group)


@pytest.mark.parametrize("gone", [0, 1, 2], ids=["first", "middle", "last"])
def test_shrink_exclude_rank_and_scale_up(gone: int, world: World) -> None:
    """One is killed while all are in an operation; the others go on without it, and then with another one."""
    members = world.members(3)
    connect(members, "all")
    others = [member for place, member in enumerate(members) if place != gone]
    for member in others:
        start(member, "all", all_reduce(1, LARGE))
    members[gone].tell("die")
    leave(others, "all")
    connect(others, "fewer")
    works(others, "fewer")
    for member in others:
        start(member, "fewer", {"operation": "recv", "source": 0, "tag": 1, "numel": SMALL})
    leave(others, "fewer")
    more = [*others, *world.members(2)]
    connect(more, "more")
    works(more, "more")


def test_reconfigure_late_join(world: World) -> None:
    members = world.members(3)
    begin_to_connect(members[:2], "all", size=3)
    waits(members[0])
    members[2].ask("open", group="all")
    start(members[2], "all", {"operation": "connect", "own": 2, "size": 3})
    connected(members)
    works(members, "all")


def test_reconfigure_merge_split(world: World) -> None:
    members = world.members(4)
    for turn, groups in enumerate(([(0, 1), (2, 3)], [(0, 1, 2, 3)], [(3, 0), (1, 2)], [(0,), (1, 2, 3)])):
        for places in groups:
            begin_to_connect([members[place] for place in places], f"{turn}-{places}")
        connected(members)
        for places in groups:
            works([members[place] for place in places], f"{turn}-{places}")
        for places in groups:
            for place in places:
                members[place].ask("close", group=f"{turn}-{places}")


def test_another_group_is_not_touched(world: World) -> None:
    members = world.members(2)
    for group in ("before", "aborted", "behind"):
        connect(members, group)
    start(members[0], "aborted", all_reduce(1, LARGE))
    for member in members:
        member.ask("abort", group="aborted")
    freed(members[0])
    for group in ("before", "behind"):
        works(members, group)
        assert members[0].ask("store_works", group=group)
    for member in members:
        member.ask("close", group="aborted")
    works(members, "before")
