"""Copying a state over an in-memory transport: what is cut, what is packed, what is refused."""

import json
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import ReplayRefused, ReplicaDiffers, UsageError
from swift_ft.state import transfer as receive_buffers
from swift_ft.state.checkpoint_file import Described
from swift_ft.state.tensors import as_bytes, digest
from swift_ft.state.transfer import (
    CHUNK_BYTES_MAX,
    CHUNK_BYTES_MIN,
    Manifest,
    Received,
    Sent,
    Transfer,
    first_difference,
    manifest_of,
    plan_chunks,
    receive_state,
    send_state,
)
from swift_ft.state.tree import split
from tests.local_backend import LocalWire, Network


class Memory(Network):
    """What travels may be altered on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[int, int] = defaultdict(int)
        self.alter: Callable[[int, torch.Tensor], None] = lambda tag, data: None

    def at(self, rank: int) -> "End":
        return End(self, rank)


class End(LocalWire):
    def __init__(self, memory: Memory, rank: int) -> None:
        super().__init__(memory, rank)
        self._memory = memory

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        (data,) = tensors
        assert data.dtype == torch.uint8
        copy = data.clone()
        self._memory.alter(tag, copy)
        self._memory.bytes[self._own] += len(copy) if tag >= 16 else 0
        return super().send([copy], to, tag)


def never() -> None:
    pass


def copy(
    states: list[dict[str, Any]],
    into: dict[str, torch.Tensor] | None = None,
    memory: Memory | None = None,
    version: int = 3,
    **options: Any,
) -> tuple[Received, list[Sent]]:
    """One source per state, the joiner after them."""
    memory = memory or Memory()
    transfer = Transfer(joiner=len(states), sources=tuple(range(len(states))), version=version)
    sent: dict[int, Sent] = {}

    for rank in transfer.sources:  # a send of this transport waits for nobody
        sent[rank] = send_state(transfer, rank, states[rank], never, wire=memory.at(rank))
    received = receive_state(
        transfer, transfer.joiner, {} if into is None else into, never, wire=memory.at(len(states)), **options
    )
    return received, [sent[rank] for rank in transfer.sources]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    (tensors, rest), (others, other_rest) = split(one), split(other)
    return digest(tensors, json.dumps(rest)) == digest(others, json.dumps(other_rest))


# --- the plan ---

mixes = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 300_000), st.integers(0, 3 * CHUNK_BYTES_MAX)), max_size=30
)


def entries(sizes: list[int]) -> list[Described]:
    return [Described(str(number), "uint8", (size,), (), size, size) for number, size in enumerate(sizes)]


@given(sizes=mixes, sources=st.integers(1, 4))
def test_every_byte_is_sent_exactly_once(sizes: list[int], sources: int) -> None:
    chunks = plan_chunks(entries(sizes), sources)
    at = [0] * len(sizes)
    for chunk in chunks:
        for piece in chunk.pieces:
            assert piece.begin == at[piece.tensor] < piece.end
            at[piece.tensor] = piece.end
        assert 0 < chunk.bytes <= CHUNK_BYTES_MAX
    assert at == sizes
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.source for chunk in chunks} == set(range(min(sources, len(chunks))))


@given(sizes=mixes, sources=st.integers(1, 4))
def test_small_tensors_go_together(sizes: list[int], sources: int) -> None:
    chunks = plan_chunks(entries(sizes), sources)
    limit = max(chunk.bytes for chunk in chunks) if chunks else 0
    packs = [chunk for chunk in chunks if len(chunk.pieces) > 1]
    assert all(chunk.bytes * 4 > 3 * limit or chunk is packs[-1] for chunk in packs) or limit * 4 <= 65536 * 5


def test_packs_are_no_larger_than_other_chunks() -> None:
    chunks = plan_chunks(entries([1000] * 300), 2)
    assert max(chunk.bytes for chunk in chunks) <= CHUNK_BYTES_MIN
    assert len(chunks) == 5


def test_a_big_state_is_shared_evenly() -> None:
    chunks = plan_chunks(entries([100 << 20, 60 << 20, 1000]), 3)
    shares = [sum(c.bytes for c in chunks if c.source == source) for source in range(3)]
    assert max(shares) - min(shares) <= CHUNK_BYTES_MAX


# --- whole copies ---

dtypes = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]
)
shapes = st.lists(st.integers(0, 50), max_size=3).map(tuple)
looks = st.sampled_from(["plain", "transposed", "sliced", "tied"])


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tensors: dict[str, Any] = {}
    for index, (dtype, shape, look) in enumerate(
        draw(st.lists(st.tuples(dtypes, shapes, looks), max_size=12))
    ):
        tensor = torch.randint(0, 100, shape, generator=generator).to(dtype)
        if look == "tied" and tensors:
            tensor = next(iter(tensors.values()))
        elif look == "transposed" and tensor.ndim == 2:
            tensor = tensor.t()
        elif look == "sliced" and tensor.ndim:
            tensor = tensor[..., ::2]
        tensors[f"t{index}"] = tensor
    if draw(st.booleans()):
        tensors["large"] = torch.randn(draw(st.integers(0, 200_000)), generator=generator)
    return {"version": 3, "stages": tensors, "objects": [1.5, None, {"x": (True, "y", math.inf)}]}


@settings(max_examples=60, deadline=None)
@given(state=states(), sources=st.integers(1, 4), data=st.data())
def test_any_state_arrives(state: dict[str, Any], sources: int, data: st.DataObject) -> None:
    named = split(state)[0]
    there = data.draw(st.sets(st.sampled_from(sorted(named)))) if named else set()
    clones = {  # laid out as they are: what lies otherwise is made anew
        id(t): torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).zero_() for t in named.values()
    }
    into = {path: clones[id(named[path])] for path in there}
    pointers = {path: tensor.data_ptr() for path, tensor in into.items()}
    memory = Memory()
    received, sent = copy([state] * sources, into, memory)
    assert same(received.state, state)
    assert {s.digest for s in sent} == {received.digest}
    assert [s.bytes for s in sent] == [memory.bytes[rank] for rank in range(sources)]
    assert sum(s.bytes for s in sent) == received.bytes
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in named.values() if tensor.numel()}
    assert received.bytes == sum(distinct.values())
    out = split(received.state)[0]
    for path, tensor in into.items():
        assert out[path] is tensor
        assert tensor.data_ptr() == pointers[path]
    for path, tensor in named.items():  # what is tied there is tied here, as far as it was made here
        for other, twin in named.items():
            if tensor is twin and tensor.numel() and not there & {path, other}:
                assert out[path] is out[other]


def test_the_digest_is_of_every_bit() -> None:
    state = {"version": 3, "w": torch.zeros(100_000), "lr": 0.1}
    one = copy([state])[0].digest
    state["w"][99_999] = -0.0
    assert copy([state])[0].digest != one
    state["w"][99_999] = 0.0
    assert copy([state])[0].digest == one
    state["lr"] = 0.2
    assert copy([state])[0].digest != one


def test_chunks_are_counted_on_both_sides() -> None:
    state = {"version": 3, "w": torch.randn(300_000)}
    memory = Memory()
    transfer = Transfer(joiner=1, sources=(0,), version=3)
    sending: list[tuple[int, int]] = []
    arriving: list[tuple[int, int]] = []
    send_state(transfer, 0, state, never, lambda *at: sending.append(at), wire=memory.at(0))
    receive_state(transfer, 1, {}, never, lambda *at: arriving.append(at), wire=memory.at(1))
    total = len(plan_chunks(entries([1_200_000]), 1))
    assert total > 4
    assert sending == arriving == [(done, total) for done in range(total + 1)]


@pytest.mark.parametrize("joiner", [False, True])
def test_check_is_asked_between_chunks(joiner: bool) -> None:
    class Stop(Exception):
        pass

    state = {"version": 3, "w": torch.randn(300_000)}
    total = len(plan_chunks(entries([1_200_000]), 1))
    memory = Memory()
    transfer = Transfer(joiner=1, sources=(0,), version=3)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == total:
            raise Stop

    if joiner:
        send_state(transfer, 0, state, never, wire=memory.at(0))
        with pytest.raises(Stop):
            receive_state(transfer, 1, {}, check, wire=memory.at(1))
    else:
        with pytest.raises(Stop):
            send_state(transfer, 0, state, check, wire=memory.at(0))


# --- what shares memory ---


def test_a_conjugate_is_not_what_it_is_the_conjugate_of() -> None:
    whole = torch.tensor([1 + 2j, 3 - 4j])
    for into in ({}, {"state.a": (own := torch.zeros_like(whole)), "state.b": own.conj()}):
        received, _ = copy([{"a": whole, "b": whole.conj()}], into)
        assert torch.equal(received.state["a"], whole)
        assert torch.equal(received.state["b"], whole.conj())


def test_tied_tensors_travel_once_and_stay_tied() -> None:
    tied = torch.randn(100, 10)
    received, _ = copy([{"version": 3, "a": tied, "b": tied, "c": tied.t()}])
    assert received.state["a"] is received.state["b"]
    assert received.bytes == 2 * tied.nbytes  # the transposed one is another tensor
    here = torch.zeros(100, 10)
    received, _ = copy([{"version": 3, "a": tied, "b": tied}], {"state.a": here, "state.b": here})
    assert torch.equal(here, tied)
    apart = {"state.a": torch.zeros(100, 10), "state.b": torch.zeros(100, 10)}
    received, _ = copy([{"version": 3, "a": tied, "b": tied}], apart)
    assert all(torch.equal(tensor, tied) for tensor in apart.values())
    only = {"state.b": torch.zeros(100, 10)}
    received, _ = copy([{"version": 3, "a": tied, "b": tied}], only)
    assert received.state["b"] is only["state.b"]
    assert same(received.state, {"version": 3, "a": tied, "b": tied})


def test_views_of_one_buffer() -> None:
    flat, here = torch.randn(1000), torch.zeros(1000)

    def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "flat": buffer,
            "head": buffer[:100],
            "tail": buffer[100:],
            "even": buffer[::2],
            "odd": buffer[1::2],
        }

    copy([{"version": 3, **views(flat)}], {f"state.{name}": view for name, view in views(here).items()})
    assert torch.equal(flat, here)


@pytest.mark.parametrize("joined", ["tied", "overlapping", "strided"])
def test_memory_that_is_shared_only_here_is_refused(joined: str) -> None:
    here = torch.zeros(12)
    parts = {
        "tied": (here[:6], here[:6]),
        "overlapping": (here[:6], here[3:9]),
        "strided": (here[0:12:2], here[4:10]),
    }[joined]
    into = {"state.a": parts[0], "state.b": parts[1]}
    with pytest.raises(ReplicaDiffers, match=r"state\.[ab] shares memory on rank 1"):
        copy([{"version": 3, "a": torch.ones(6), "b": torch.full((6,), 2.0)}], into)


# --- what is refused ---


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises(ReplicaDiffers) as caught:
        copy(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda s: s["stages"].update(w=torch.zeros(2, 2)), "state.stages.w"),
        (lambda s: s["stages"].update(w=torch.zeros(4, dtype=torch.int32)), "state.stages.w"),
        (lambda s: s["stages"].pop("w"), "state.stages.w"),
        (lambda s: s["stages"].update(x=torch.zeros(4)), "state.stages.x"),
        (lambda s: s["objects"].update(epoch=4), "state.objects.epoch"),
        (lambda s: s["objects"].update(more=4), "state.objects"),
        (lambda s: s["objects"].update(list=[1, 2, 9]), "state.objects.list.2"),
        (lambda s: s["stages"]["w"].fill_(2), "state.stages.w"),
    ],
)
def test_where_replicas_differ_is_named(change: Callable[[dict[str, Any]], object], path: str) -> None:
    def state() -> dict[str, Any]:
        tensors = {"v": torch.ones(3), "w": torch.zeros(4), "z": torch.ones(1)}
        return {"version": 3, "stages": tensors, "objects": {"epoch": 3, "list": [1, 2, 3]}}

    other = state()
    change(other)
    both = [state(), other, state()]
    expected = f"ranks 0, 2 and rank 1 hold different states, first at {path}"
    assert refused(both) == expected


def test_the_first_of_several_differences_is_named() -> None:
    def state(small: float, large: float) -> dict[str, Any]:  # the small one travels later, in a pack
        return {"version": 3, "a": torch.full((3,), small), "b": torch.full((90_000,), large)}

    assert "first at state.a" in refused([state(1, 1), state(2, 2)])
    assert "first at state.b" in refused([state(1, 1), state(1, 2)])


def test_nan_equals_nan_and_zero_has_a_sign() -> None:
    def state(zero: float) -> dict[str, Any]:
        return {"version": 3, "w": torch.tensor([math.nan, zero]), "loss": math.nan}

    copy([state(0.0), state(0.0)])
    assert "state.w" in refused([state(0.0), state(-0.0)])


@pytest.mark.parametrize("tag", [16, 17, 19])
def test_a_bit_that_flips_on_the_way(tag: int) -> None:
    memory = Memory()

    def alter(at: int, data: torch.Tensor) -> None:
        if at == tag:
            data[len(data) // 2] ^= 16

    memory.alter = alter
    state = {"version": 3, "w": torch.randn(100_000), "z": torch.randn(9)}
    source = (tag - 16) % 2
    message = refused([state, state], memory=memory)
    assert message == f"what rank 2 received from rank {source} is not what it sent, first at state.w"


def test_a_bit_that_flips_in_the_manifest_or_the_header() -> None:
    for tag, word in ((1, "run one version of swift"), (2, "checksum differs")):
        memory = Memory()

        def alter(at: int, data: torch.Tensor, tag: int = tag) -> None:
            if at == tag:
                data[0] ^= 1

        memory.alter = alter
        assert word in refused([{"version": 3, "w": torch.ones(3)}], memory=memory)


def test_another_version_is_refused() -> None:
    assert refused([{"version": 3}, {"version": 4}]) == "rank 1 holds version 4, the plan says 3"


def test_room_of_another_shape_or_type_is_refused() -> None:
    state = {"version": 3, "w": torch.ones(2, 3)}
    for room in (torch.ones(3, 2), torch.ones(2, 3, dtype=torch.float64)):
        message = refused([state], {"state.w": room})
        assert message.startswith("state.w: rank 0 holds float32[2, 3], rank 1 has room for float")


def test_a_sparse_tensor_is_refused_at_the_source() -> None:
    with pytest.raises(UsageError, match=r"state\.w holds a sparse or nested tensor"):
        manifest_of({"w": torch.ones(3).to_sparse()}, 3)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match=r"both called state\.a\.b"):
        manifest_of({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, 3)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1]},
        {"shape": [1.5]},
        {"shape": [True]},
        {"dtype": "Tensor"},
        {"dtype": "nothing"},
        {"tensor": 3},
        {"unknown": 1},
        {"stride": [1 << 40]},
        {"shape": 3},
    ],
)
def test_a_manifest_that_makes_no_sense(change: dict[str, Any]) -> None:
    manifest, _ = manifest_of({"w": torch.ones(3)}, 3)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    value = json.loads(manifest.to_bytes())
    value["skeleton"]["dict"][0][1].update(change)
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_bytes(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"3", b'{"version": 1}', b"\xff"])
def test_no_manifest_at_all(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Manifest.from_bytes(data)


def test_a_tensor_is_the_same_as_one_that_is_sent() -> None:
    tied = torch.ones(3)
    manifest, _ = manifest_of({"a": tied, "b": tied, "c": tied}, 3)
    value = json.loads(manifest.to_bytes())
    assert value["same"] == {"state.b": "state.a", "state.c": "state.a"}
    for wrong in ("state.b", "state.c", "state.later", 3):
        value["same"]["state.c"] = wrong
        with pytest.raises(ValueError, match=r"state\.c is said to be"):
            Manifest.from_bytes(json.dumps(value).encode())


def test_a_tensor_is_not_the_same_as_a_later_one() -> None:
    tied = torch.ones(3)
    manifest, _ = manifest_of({"a": tied, "b": tied}, 3)
    value = json.loads(manifest.to_bytes())
    value["same"] = {"state.a": "state.b"}
    with pytest.raises(ValueError, match=r"state\.a is said to be state\.b"):
        Manifest.from_bytes(json.dumps(value).encode())


def test_equal_manifests_have_no_difference_but_the_version() -> None:
    manifest, _ = manifest_of({"w": torch.ones(3), "x": {"y": [1]}}, 3)
    assert first_difference(manifest, manifest) == "state.version"


def test_memory_that_is_not_there_is_said_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive_buffers, "available_memory", lambda: 1 << 20)
    state = {"version": 3, "w": torch.zeros(1 << 19)}
    with pytest.raises(ReplayRefused, match="needs 2 MiB, 1 MiB are free"):
        copy([state])
    copy([state], {"state.w": torch.ones(1 << 19)})
    tied = {"version": 3, "w": state["w"], "v": state["w"]}
    here = torch.ones(1 << 19)
    copy([tied], {"state.w": here, "state.v": here})


def test_available_memory_is_known_here() -> None:
    assert receive_buffers.available_memory() not in (None, 0)


def test_large_new_tensors_are_like_others() -> None:
    entry = Described("w", "bfloat16", (1200, 1024), (), 2 * 1200 * 1024, 2 * 1200 * 1024)
    tensor = receive_buffers.fresh(entry)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((1200, 1024), torch.bfloat16, True)
    tensor.fill_(2)
    assert tensor.sum(dtype=torch.float64) == 2 * tensor.numel()


def test_bytes_of_a_tensor() -> None:
    tensor = torch.arange(6, dtype=torch.int16).view(2, 3)
    as_bytes(tensor)[2] = 7
    assert tensor[0, 1] == 7
    assert bytes(as_bytes(tensor.t()).tolist()) == tensor.t().contiguous().numpy().tobytes()
    assert as_bytes(torch.empty(0, 3)).shape == (0,)
    assert as_bytes(torch.tensor(1.0)).shape == (4,)
    value = torch.tensor([1 + 2j])
    assert torch.equal(as_bytes(value.conj()), as_bytes(torch.tensor([1 - 2j])))


@pytest.mark.parametrize("sources", [(), (1, 1), (2, 0)])
def test_a_transfer_has_sources_of_its_own(sources: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sources"):
        Transfer(joiner=2, sources=sources, version=0)


@pytest.mark.parametrize("logged", [(True, True), (False, True), (True, False), (False, False)])
def test_a_source_says_whether_its_log_is_whole(logged: tuple[bool, bool]) -> None:
    memory = Memory()
    transfer = Transfer(joiner=2, sources=(0, 1), version=3)
    for rank in transfer.sources:
        send_state(transfer, rank, {"a": torch.ones(3)}, never, wire=memory.at(rank), logged=logged[rank])
    received = receive_state(transfer, 2, {}, never, wire=memory.at(2))
    assert received.witnesses == tuple(rank for rank in (0, 1) if logged[rank])


def test_an_empty_tensor_arrives_whatever_its_strides() -> None:
    empty = torch.empty(0, 37, 56)[:, ::2, ::2].permute(0, 2, 1)[:, :, :19]
    assert empty.stride() == (2072, 2, 112)

    received, _ = copy([{"version": 3, "stages": {"t0": empty}, "objects": []}], {}, Memory())

    assert received.state["stages"]["t0"].shape == (0, 28, 19)
