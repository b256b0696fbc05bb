"""What one rank of one job can make the coordinator keep, and how long others wait meanwhile."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.coordinator_client import make_member
from swift_ft.log.protocol import code_of, message_of, reason_of
from tests.hostile.world import BOUND_S
from tests.integration.coordinator_world import Coordinator

GROWTH_MAX = 128 << 20
"""What a few requests take while they are read, and what the allocator keeps of that."""
WORLD_SIZE = 1 << 16
"""As it is claimed: one rank joins."""
REQUEST_BYTES = 1 << 20


class Rank:
    """One rank's holder: what its token allows is what it does."""

    def __init__(self, coordinator: Coordinator) -> None:
        assert coordinator.process is not None
        self.process = psutil.Process(coordinator.process.pid)
        self.channel = grpc.insecure_channel(coordinator.address)
        self.stub = pb_grpc.CoordinatorStub(self.channel)
        member = make_member(0)
        self.me = {"job": "hostile", "rank": 0, "incarnation": member.incarnation}
        join = pb.JoinRequest(job="hostile", member=member, world_size=WORLD_SIZE)
        assert self.stub.Join(join, timeout=BOUND_S).generation == 1
        self.before = self.resident()
        self.number = 0

    def resident(self) -> int:
        return int(self.process.memory_info().rss)

    def grown(self) -> int:
        return self.resident() - self.before

    def share(self, **said: object) -> pb.ShareReply:
        self.number += 1
        request = pb.ShareRequest(**self.me, generation=1, number=self.number, **said)  # type: ignore[arg-type]
        return self.stub.Share(request, timeout=BOUND_S)

    def other_waits_s(self) -> float:
        """How long a call of another job takes."""
        began = time.monotonic()
        self.stub.Jobs(pb.JobsRequest(), timeout=BOUND_S)
        return time.monotonic() - began


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    coordinator = Coordinator(tmp_path / "meta", "--lease-s", "300", "--step-bound-s", "600").start()
    rank = Rank(coordinator)
    yield rank
    rank.channel.close()
    assert coordinator.stop() == 0


def test_small_keys_are_counted_by_what_they_cost(rank: Rank) -> None:
    """By their bytes, and for all the ranks that never came, they took 2 GB."""

    def fill() -> None:
        for first in range(0, 300 << 14, 1 << 14):
            keys = range(first, first + (1 << 14))
            rank.share(changes=[pb.SharedChange(key=f"{key:x}", set=b"") for key in keys])

    with pytest.raises(grpc.RpcError, match="the 1 ranks of this job share at most") as refused:
        fill()
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert rank.grown() < GROWTH_MAX
    assert rank.other_waits_s() < BOUND_S


def test_what_is_set_again_and_again_is_not_kept(rank: Rank) -> None:
    for number in range(300):
        rank.share(changes=[pb.SharedChange(key=f"{key % 100}", set=b"%d" % number) for key in range(4000)])
    assert rank.grown() < GROWTH_MAX


def test_a_million_entries_are_refused_before_anybody_walks_over_them(rank: Rank) -> None:
    """Others waited for seconds while their rank's stages were sorted and written into a message."""
    ready = pb.ReadyRequest(**rank.me, generation=1, stages=[1] * (REQUEST_BYTES - 200), num_stages=1)
    until = pb.ShareRequest(**rank.me, generation=1, until=[""] * (REQUEST_BYTES // 2 - 200), wait_s=2.0)
    vote = pb.VoteRequest(**rank.me, generation=1, kind=pb.AGREE, acknowledged=[1] * (REQUEST_BYTES - 200))
    before = sum(rank.process.cpu_times()[:2])
    with ThreadPoolExecutor(8) as pool:
        calls: list[Future[object]] = [
            pool.submit(call, request, timeout=20)
            for _ in range(20)
            for call, request in ((rank.stub.Ready, ready), (rank.stub.Share, until), (rank.stub.Vote, vote))
        ]
        waited = [rank.other_waits_s() for _ in range(10)]
        for call in calls:
            error = call.exception()
            assert isinstance(error, grpc.RpcError)
            assert (code_of(error), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "oversize")
            assert "entries: at most" in message_of(error)
    # What a call waits for here is mostly this process, which makes and sends the requests.
    assert sum(rank.process.cpu_times()[:2]) - before < 0.05 * len(calls)
    assert max(waited) < BOUND_S
    assert rank.grown() < GROWTH_MAX


def test_calls_that_wait_for_many_keys_hold_little(rank: Rank) -> None:
    keys = [f"key-{number}" for number in range(1 << 14)]
    request = pb.ShareRequest(**rank.me, generation=1, until=keys, wait_s=60.0)
    calls = [rank.stub.Share.future(request, timeout=30) for _ in range(50)]
    waited = [rank.other_waits_s() for _ in range(5)]
    assert rank.grown() < GROWTH_MAX
    for call in calls:
        assert call.result().epoch
    assert max(waited) < BOUND_S


def test_a_rank_that_claims_stages_beyond_number_holds_nobody_up(rank: Rank) -> None:
    ready = pb.ReadyRequest(**rank.me, generation=1, stages=[0], num_stages=(1 << 31) - 1)
    with pytest.raises(grpc.RpcError, match="at most 65536"):
        rank.stub.Ready(ready, timeout=BOUND_S)
    assert rank.other_waits_s() < 1.0
    assert rank.grown() < GROWTH_MAX
