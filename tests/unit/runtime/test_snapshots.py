"""Copies of states in host memory: taken by threads that stand for ranks, over queues that stand for their groups."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from swift_ft.errors import ReplayRefused, UsageError
from swift_ft.planner import Assignment, HeldSnapshot, RecoveryGroups
from swift_ft.state import transfer
from swift_ft.state.tensors import same_bits
from swift_ft.state.tree import split
from swift_ft.train.config import SessionConfig
from swift_ft.train.snapshots import Snapshots, in_order, partners
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.wired import site_of

RANKS = 3


class Lost(RuntimeError):
    """As torch says it."""


class World(LocalWire):
    """One rank's group of all."""

    def __init__(
        self, network: Network, rank: int, barrier: threading.Barrier, ended: threading.Event
    ) -> None:
        super().__init__(network, rank, ended=ended)
        self._barrier = barrier
        self.lost = False

    def run(self, _collective: Any) -> None:
        if self.lost:
            self._barrier.abort()
        try:
            self._barrier.wait(10.0)
        except threading.BrokenBarrierError:
            raise Lost("connection closed by peer") from None


class State:
    def __init__(self, rank: int) -> None:
        self.rank, self.version, self.width = rank, 0, 4
        self.weights = torch.full((self.width,), float(rank))

    def step(self) -> None:
        self.version += 1
        self.weights += 0.5

    def grow(self) -> None:
        self.weights = torch.cat([self.weights, self.weights])

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "stages": {str(self.rank): {"w": self.weights, "tied": self.weights}},
        }


class Member:
    def check(self) -> None: ...


class Job:
    def __init__(self) -> None:
        network, self.barrier, self.ended = Network(), threading.Barrier(RANKS), threading.Event()
        self.worlds = [World(network, rank, self.barrier, self.ended) for rank in range(RANKS)]
        self.states: list[Any] = [State(rank) for rank in range(RANKS)]
        self.ranks = [self.fresh(rank) for rank in range(RANKS)]
        self.assignment = Assignment.from_reports(
            num_stages=RANKS, stages={rank: [rank] for rank in range(RANKS)}
        )

    def fresh(self, rank: int) -> Snapshots:
        config, channel = (
            SessionConfig(strategy="snapshot", snapshot_every=2),
            SimpleNamespace(groups=RecoveryGroups()),
        )
        state, world = self.states[rank], self.worlds[rank]
        site = site_of(rank, config, member=Member(), channel=channel, state=state, world=world)
        return Snapshots(site, cast(Any, None))

    def take(self, generation: int = 1) -> None:
        def take(rank: Snapshots) -> None:
            try:
                rank.take_snapshot(generation, self.assignment, dict.fromkeys(range(RANKS), "a"))
            except UsageError:
                self.ended.set()
                raise

        with ThreadPoolExecutor(RANKS) as threads:
            ends = [threads.submit(take, rank) for rank in self.ranks]
        if errors := [error for end in ends if (error := end.exception())]:
            raise min(errors, key=lambda error: not isinstance(error, UsageError))

    def steps(self, count: int) -> None:
        for state in self.states:
            for _ in range(count):
                state.step()


def held(rank: int, version: int) -> set[HeldSnapshot]:
    """Its own, and that of the rank before it."""
    return {HeldSnapshot(rank, version), HeldSnapshot((rank - 1) % RANKS, version)}


def test_each_rank_holds_its_own_copy_and_another_ones() -> None:
    job = Job()
    job.steps(4)
    job.take()
    for rank, snapshots in enumerate(job.ranks):
        assert set(snapshots.held_snapshots()) == held(rank, 4)
    job.steps(1)  # a copy is no view of the state
    kept = job.ranks[1].of(0, 4).apart()
    assert same_bits(kept["stages"]["0"]["w"], torch.full((4,), 2.0))
    assert kept["stages"]["0"]["tied"] is kept["stages"]["0"]["w"]
    assert job.ranks[1].of(0, 4).digest == job.ranks[0].of(0, 4).digest


def test_the_older_version_goes_once_all_have_the_newer_one_and_its_memory_is_used_again() -> None:
    job = Job()
    job.take()
    first = {rank: _memory(job.ranks[1], rank, 0) for rank in (0, 1)}
    job.steps(2)
    job.take()
    assert set(job.ranks[1].held_snapshots()) == held(1, 2)
    job.steps(2)
    job.take()
    assert {rank: _memory(job.ranks[1], rank, 4) for rank in (0, 1)} == first
    job.steps(2)
    for state in job.states:
        state.grow()
    job.take()  # what has another shape gets other memory
    assert job.ranks[1].of(0, 6).apart()["stages"]["0"]["w"].numel() == 8


def test_the_older_version_stands_while_not_all_have_the_newer_one() -> None:
    job = Job()
    job.take()
    job.steps(2)
    job.worlds[2].lost = True
    with pytest.raises(Lost):
        job.take()
    for rank, snapshots in enumerate(job.ranks):
        assert set(snapshots.held_snapshots()) >= held(rank, 0)
        assert job.ranks[rank].of(rank, 0).state["version"] == 0


def test_a_generation_begins_with_one_that_leaves_the_old_one_whole_until_all_have_it() -> None:
    job = Job()
    job.take()
    before = job.ranks[0].of(0, 0)
    job.ranks[2] = job.fresh(2)
    job.barrier.reset()
    job.take(generation=2)
    assert set(job.ranks[2].held_snapshots()) == held(2, 0)
    assert job.ranks[0].of(0, 0) is not before


def test_what_is_damaged_in_memory_is_refused() -> None:
    job = Job()
    job.take()
    job.ranks[1].of(0, 0).state["tensors"]["state.stages.0.w"].view(torch.uint8)[5] ^= 1
    with pytest.raises(
        ReplayRefused, match="rank 0 at version 0 in the memory of rank 1 is not what was taken"
    ):
        job.ranks[1].of(0, 0)
    job.ranks[0].of(0, 0)
    with pytest.raises(ReplayRefused, match="holds no snapshot of rank 2"):
        job.ranks[1].of(2, 0)


def test_what_is_given_up_is_forgotten() -> None:
    job = Job()
    job.steps(2)
    job.take()
    job.ranks[0].forget_above(2)
    assert set(job.ranks[0].held_snapshots()) == held(0, 2)
    job.ranks[0].forget_above(1)
    assert not job.ranks[0].held_snapshots()


def test_a_copy_is_given_away_in_memory_of_its_own() -> None:
    job = Job()
    job.take()
    copy = job.ranks[0].of(0, 0)
    copy.apart()["stages"]["0"]["w"].zero_()
    job.states[0].weights += 1
    assert job.ranks[0].of(0, 0) is copy


def test_without_room_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "available_memory", lambda: 1)
    job = Job()
    with pytest.raises(UsageError, match="no room for a snapshot of rank"):
        job.take()


def test_settings() -> None:
    assert SessionConfig(strategy="snapshot").steps_to_snapshot == 10
    assert SessionConfig().steps_to_snapshot == 0
    assert SessionConfig(snapshot_every=7).agreed()["snapshot_every"] == "7"
    assert SessionConfig(strategy="snapshot", snapshot_every=3).agreed()["snapshot_every"] == "3"
    assert "snapshot_every" not in SessionConfig().agreed()


def _memory(snapshots: Snapshots, rank: int, version: int) -> int:
    tensors, _ = split(snapshots.of(rank, version).state)
    return next(iter(tensors.values())).data_ptr()


# --- who keeps whose copy ---


class TestPartners:
    def hosts(self, *names: str) -> dict[int, str]:
        return dict(enumerate(names))

    def apart(self, ranks: int) -> dict[int, int]:
        return {rank: -1 - rank for rank in range(ranks)}

    def test_without_hosts_a_ring(self) -> None:
        assert partners(range(3), self.hosts("", "", ""), self.apart(3)) == {0: 1, 1: 2, 2: 0}

    def test_on_another_host(self) -> None:
        assert partners(range(4), self.hosts("a", "a", "b", "b"), self.apart(4)) == {0: 2, 1: 3, 2: 0, 3: 1}
        chosen = partners(range(4), self.hosts("a", "a", "a", "b"), self.apart(4))
        assert chosen == {0: 3, 1: 3, 2: 3, 3: 0}, "whatever they keep for others"

    def test_in_another_recovery_group(self) -> None:
        assert partners(range(4), self.hosts("", "", "", ""), {0: 0, 1: 0, 2: 2, 3: 2}) == {
            0: 2,
            1: 3,
            2: 0,
            3: 1,
        }

    def test_nobody_keeps_for_one_that_is_alone(self) -> None:
        assert partners([0], {0: ""}, {0: -1}) == {}

    @pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
    def test_transfers_come_in_rounds_in_which_no_rank_is_twice(self, ranks: int) -> None:
        chosen = partners(range(ranks), dict.fromkeys(range(ranks), "a"), self.apart(ranks))
        ordered = in_order(chosen)
        assert sorted(ordered) == sorted(chosen.items())
        first = {rank for transfer in ordered[: ranks // 2] for rank in transfer}
        assert len(first) == 2 * (ranks // 2)
