"""Gradients up a line and weights down it, over an in-memory transport: whatever the share, the bits of one process."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from swift_ft.comm.gloo import GlooBackend
from swift_ft.errors import ReplayRefused
from swift_ft.state.tensors import same_bits
from swift_ft.train.gradient_chain import GradientChain, Post, added_in_order, buckets, taken_apart
from swift_ft.train.shared_replay import shares
from tests.local_backend import LocalWire, Network, in_parallel

SHAPES = [
    ((5, 3), torch.float32),
    ((2,), torch.float32),
    ((4, 4), torch.bfloat16),
    ((), torch.float32),
    ((9,), torch.float64),
]


def nothing() -> None:
    pass


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape, dtype in SHAPES]


def addends(microbatches: int, seed: int) -> list[list[list[torch.Tensor]]]:
    """[microbatch][parameter] -> what autograd would add, none or several."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(microbatches):
        counts = torch.randint(0, 3, (len(SHAPES),), generator=generator).tolist()
        found.append(
            [
                [
                    (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(dtype)
                    for _ in range(count)
                ]
                for count, (shape, dtype) in zip(counts, SHAPES, strict=True)
            ]
        )
    return found


@settings(deadline=None, max_examples=40)
@given(
    count=st.integers(1, 4),
    microbatches=st.integers(4, 9),
    seed=st.integers(0, 1 << 30),
    bucket=st.sampled_from([1, 40, 1 << 20]),
)
def test_gradients_have_the_bits_of_one_process(
    count: int, microbatches: int, seed: int, bucket: int
) -> None:
    wanted = [
        added_in_order(None, [a.clone() for mb in addends(microbatches, seed) for a in mb[index]])
        for index in range(len(SHAPES))
    ]
    network = Network()
    each = shares(microbatches, count)
    ranks = [7, 2, 5, 4][-count:]  # in the order of the line, whatever their numbers

    def one(place: int) -> list[torch.Tensor | None]:
        post = Post(LocalWire(network, ranks[place]))
        mine = addends(microbatches, seed)
        line = GradientChain(post, ranks, ranks[place], nothing, bucket)
        sums = line.pass_up(
            parameters(), [[a for mb in each[place] for a in mine[mb][index]] for index in range(len(SHAPES))]
        )
        post.wait_sent()
        return sums

    sums = in_parallel(count, one)[-1]
    for total, value in zip(sums, wanted, strict=True):
        assert (total is None) == (value is None)
        assert value is None or same_bits(total, value)
    assert network.left() == 0


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("bucket", [1, 1 << 20])
def test_weights_go_down_bit_for_bit(count: int, bucket: int) -> None:
    network = Network()
    ranks = list(range(count))

    def tensors() -> list[torch.Tensor]:
        nan = torch.tensor([float("nan"), -0.0])
        strided = torch.randn(4, 6).t()
        small = torch.randn(3).to(torch.float8_e4m3fn)
        return [*parameters(), nan, strided, torch.tensor([True, False]), torch.tensor(5), small]

    torch.manual_seed(4)
    given = tensors()

    def one(place: int) -> list[torch.Tensor]:
        mine = given if place == count - 1 else [torch.zeros_like(tensor) for tensor in given]
        post = Post(LocalWire(network, place))
        with torch.no_grad():
            GradientChain(post, ranks, place, nothing, bucket).pass_down(mine)
        post.wait_sent()
        return mine

    for received in in_parallel(count, one):
        assert all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(received, given, strict=True))
    assert network.left() == 0


@pytest.mark.parametrize("count", [2, 3, 4])
def test_over_gloo(count: int) -> None:
    """More buckets than are under way at once, several steps, and what is sent is used again at once."""
    store = HashStore()
    fabrics = [GlooBackend().open() for _ in range(count)]
    connections = in_parallel(
        count, lambda rank: fabrics[rank].connect(store, rank, count, timedelta(seconds=20))
    )
    microbatches, steps = 7, 3
    each = shares(microbatches, count)

    def gradients(step: int, mb: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(step * 100 + mb)
        return [torch.randn(1000 + 7 * n, generator=generator) for n in range(12)]

    def one(rank: int) -> list[list[torch.Tensor]]:
        post = Post(connections[rank].circuit(range(count), 0, "line"))
        line = GradientChain(post, range(count), rank, nothing, bucket_bytes=1 << 12)
        like = [torch.zeros_like(gradient) for gradient in gradients(0, 0)]
        found = []
        for step in range(steps):
            with torch.no_grad():
                if rank == count - 1:
                    for tensor in like:
                        tensor.fill_(step + 1)
                line.pass_down(like)
                assert all((tensor == step + 1).all() for tensor in like)
                mine = [gradients(step, mb) for mb in each[rank]]
                sums = line.pass_up(like, [[of[n] for of in mine] for n in range(len(like))])
            found.append([total.clone() for total in sums if total is not None])
        post.wait_sent()
        return found

    (*_, sums) = in_parallel(count, one)
    for fabric in fabrics:
        fabric.close()
    for step in range(steps):
        for n, total in enumerate(sums[step]):
            wanted = added_in_order(None, [gradients(step, mb)[n] for mb in range(microbatches)])
            assert wanted is not None
            assert same_bits(total, wanted)


def test_a_sparse_gradient_is_refused() -> None:
    sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    with pytest.raises(ReplayRefused, match="sparse"):
        GradientChain(Post(LocalWire(Network(), 0)), [0], 0, nothing).pass_up([torch.ones(2)], [[sparse]])


def test_buckets_hold_one_type_and_so_many_bytes() -> None:
    tensors = [
        torch.zeros(3),
        torch.zeros(2),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(100),
        torch.zeros(1),
    ]
    assert buckets(tensors, 20) == [[0, 1], [2], [3], [4]]


def test_notes_carry_tensors() -> None:
    network = Network()
    tensors = [torch.randn(2, 3), torch.tensor(-0.0), torch.tensor([1, 2]), torch.randn(3).to(torch.bfloat16)]
    Post(LocalWire(network, 0)).note(1, {"said": [1, "two"]}, tensors)
    value, payload = Post(LocalWire(network, 1)).read(0)
    assert value == {"said": [1, "two"]}
    back = taken_apart(payload, [(tensor.dtype, tensor.shape) for tensor in tensors])
    assert all(same_bits(a, b) and a.shape == b.shape for a, b in zip(back, tensors, strict=True))
