"""Runners free whoever waits; collectives made of messages, over messages in memory."""

import functools
import queue
import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.comm import message_collectives
from swift_ft.comm.backend import Pending, first_tag
from swift_ft.comm.message_collectives import Messages, operation
from swift_ft.comm.worker_thread import Broken, Runner
from tests.local_backend import LocalWire, Network, in_parallel


def on_all(n: int, run: Callable[[Messages, int], None]) -> Network:
    """`run(messages, rank)` on n ranks at once. No message may be left over."""
    network = Network()
    in_parallel(n, lambda own: run(Messages(LocalWire(network, own), own, n), own))
    assert network.left() == 0
    return network


def values(n: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of many magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)).to(dtype)
        for _ in range(n)
    ]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 5),
    numel=st.sampled_from([0, 1, 2, 7, 1023, 1500, 5001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_a_sum_is_taken_in_rank_order_whatever_its_size(
    n: int, numel: int, dtype: torch.dtype, seed: int
) -> None:
    own = values(n, numel, seed, dtype)
    expected = functools.reduce(lambda a, b: a + b, [value.clone() for value in own])
    results = [value.clone() for value in own]
    on_all(n, lambda messages, rank: messages.all_reduce(results[rank], operation(None)))
    for result in results:
        assert torch.equal(result, expected)


def test_the_order_shows_in_the_bits() -> None:
    """Else the test above proves nothing."""
    a, b, c = values(3, 5001, 1)
    assert not torch.equal((a + b) + c, a + (b + c))


def test_large_sums_go_over_the_wire_as_a_ring_would_send_them() -> None:
    n, numel = 4, 40_000
    tensors = values(n, numel, 3)
    network = on_all(n, lambda messages, rank: messages.all_reduce(tensors[rank], operation(None)))
    assert network.sent == n * 2 * (n - 1) * (numel // n)


def test_sums_of_ever_other_sizes_keep_few_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(messages: Messages, rank: int) -> None:
        for more in range(20):
            tensor = torch.full((2000 + 2 * more,), float(rank + 1))
            messages.all_reduce(tensor, operation(None))
            assert torch.equal(tensor, torch.full_like(tensor, 3.0))
        assert 0 < len(messages._pool) <= 8

    monkeypatch.setattr(message_collectives, "_POOLED_MAX", 8)
    on_all(2, run)


def test_parts_are_scattered_gathered_and_broadcast() -> None:
    n = 3
    own = values(n, 6, 5)
    scattered = [torch.empty(2) for _ in range(n)]
    gathered = [torch.empty(n * 2) for _ in range(n)]
    copies = [value.clone() for value in own]

    def run(messages: Messages, rank: int) -> None:
        messages.reduce_scatter(
            scattered[rank], list(own[rank].clone().view(n, -1).unbind()), operation(None)
        )
        messages.all_gather(list(gathered[rank].view(n, -1).unbind()), scattered[rank])
        messages.broadcast(copies[rank], 1)

    on_all(n, run)
    total = own[0] + own[1] + own[2]
    assert all(torch.equal(result, total) for result in gathered)
    assert all(torch.equal(copy, own[1]) for copy in copies)


def test_two_groups_over_one_network_do_not_take_each_others_messages() -> None:
    """One rank is in the second group's barrier while the other still sums in the first one."""
    network, entered = Network(), threading.Event()
    tensors = values(2, 1, 9)
    expected = tensors[0] + tensors[1]

    def rank(own: int) -> None:
        first, second = (Messages(LocalWire(network, own), own, 2, number) for number in (1, 2))
        barrier = threading.Thread(target=second.barrier)
        if own == 0:
            barrier.start()
            while not network.sent:
                time.sleep(0.001)
            entered.set()
        entered.wait(10)
        first.all_reduce(tensors[own], operation(None))
        if own == 1:
            barrier.start()
        barrier.join(10)

    in_parallel(2, rank)
    assert torch.equal(tensors[0], expected)
    assert torch.equal(tensors[1], expected)
    assert network.left() == 0


def test_a_tensor_that_is_not_contiguous_is_summed_in_place() -> None:
    own = [torch.arange(6.0).reshape(2, 3).t() * (rank + 1) for rank in range(2)]
    expected = own[0] + own[1]
    on_all(2, lambda messages, rank: messages.all_reduce(own[rank], operation(None)))
    assert all(torch.equal(tensor, expected) for tensor in own)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_nobody_leaves_a_barrier_before_all_have_entered(n: int) -> None:
    entered: set[int] = set()
    seen: list[int] = []
    late = threading.Event()

    def run(messages: Messages, rank: int) -> None:
        if rank == n - 1:
            late.wait(0.05)  # nobody sets it: the last one is late
        entered.add(rank)
        messages.barrier()
        seen.append(len(entered))

    on_all(n, run)
    assert seen == [n] * n


def test_who_waits_for_a_runner_that_is_lost_is_freed() -> None:
    runner, stuck, forever = Runner("test"), threading.Event(), threading.Event()

    def lost() -> None:
        stuck.set()
        forever.wait(30)

    tasks = [runner.submit(lost), runner.submit(lambda: None)]
    stuck.wait(10)
    threading.Timer(0.05, runner.stop).start()
    for task in tasks:
        with pytest.raises(Broken):
            task.wait()
    with pytest.raises(Broken):
        runner.submit(lambda: None).wait()
    forever.set()
    runner.join(10)


def test_a_runner_hands_over_what_was_raised_and_goes_on() -> None:
    runner, done = Runner("test"), []

    def fails() -> None:
        raise RuntimeError("Connection closed by peer")

    failed, good = runner.submit(fails), runner.submit(lambda: done.append(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        failed.wait()
    good.wait()
    assert done == [1]
    seen = []
    failed.then(lambda: seen.append(failed.error))
    assert isinstance(seen[0], RuntimeError)
    runner.stop()
    runner.join(10)


class Lost:
    """A message that never arrives."""

    def wait(self) -> None:
        raise RuntimeError("Read error: Connection reset by peer")


class Cut(LocalWire):
    """Of a member that has lost the one at place 2."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        return Lost() if source == 2 else super().recv(tensors, source, tag)


def test_nothing_is_sent_after_a_collective_that_failed() -> None:
    # Rank 1 does not know yet that rank 2 is gone, and waits for rank 0's second half of the first sum.
    network, add = Network(), operation(None)
    alive = Messages(LocalWire(network, 1), 1, 3)
    cut = Messages(Cut(network, 0), 0, 3)
    for _ in range(2):  # what rank 2 has sent to rank 1 before it died
        network.queue(2, 1, first_tag(0) + 1).put(torch.ones(4000))
    result = torch.ones(12000)
    waits = threading.Thread(
        target=lambda: _fails(lambda: alive.carry_out(lambda m: m.all_reduce(result, add)))
    )
    waits.start()
    for size in (12000, 15000):
        with pytest.raises(RuntimeError, match="onnection"):
            cut.carry_out(lambda m, size=size: m.all_reduce(torch.ones(size), add))
    assert network.queue(0, 1, first_tag(0) + 2).empty(), "it would be taken for the second half"
    network.queue(0, 1, first_tag(0) + 2).put(torch.ones(1))  # ends the wait
    waits.join(20)


def _fails(run: Callable[[], None]) -> None:
    with pytest.raises((AssertionError, queue.Empty)):
        run()


def test_a_reduction_without_an_order_is_refused() -> None:
    with pytest.raises(ValueError, match="AVG"):
        operation(torch.distributed.ReduceOp.AVG)
