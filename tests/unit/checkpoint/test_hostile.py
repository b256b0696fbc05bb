"""Checkpoints that no rank has written, or that have changed since: each is refused in one line, nothing of it is
executed, and no memory is taken for what it only claims."""

import json
import os
import pickle
import random
import resource
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.checkpoint_file import DATA, DTYPES, INDEX, digest
from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved
from tests.unit.checkpoint.holding import Holding, keep, load, same, shard_of, store_of, unexpected

# torch's own words on complex32.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def states() -> dict[str, Any]:
    shared = torch.arange(12.0).reshape(3, 4)
    return {
        "each": {
            name: torch.arange(6 * dtype.itemsize, dtype=torch.uint8).view(dtype)
            for name, dtype in DTYPES.items()
            if name not in ("bool", "float4_e2m1fn_x2")
        },
        "bool": torch.tensor([True, False]),
        "nan": torch.tensor([0x7FC00123, -1], dtype=torch.int32).view(torch.float32),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "turned": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "gaps": torch.arange(10)[::3],
        "wide": torch.tensor([1.5]).expand(4),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "tied": [shared, shared, shared[1:]],
        "arrays": [np.arange(3), np.float32(1.5), np.ones((2, 3), order="F")],
        "times": [
            np.zeros(2, dtype="<M8[25s]"),
            np.zeros(2, dtype="V3"),
        ],
        "others": [{1, 2}, b"x", deque([1], 3), torch.float16],
        "plain": [1, "x", None, float("nan"), (True, 1 << 70), {3: 4, "3": 5}],
    }


def refused(directory: Path, why: str = "corrupt") -> None:
    with pytest.raises(ServiceError, match=why) as error:
        load(directory, 1)
    assert "\n" not in str(error.value)


def test_all_kinds_of_tensors_come_back(tmp_path: Path) -> None:
    state = states()
    shard_of(tmp_path, state)
    back = load(tmp_path, 1)
    assert same(state, back)
    assert back["tied"][0] is back["tied"][1], "one tensor under two names is one again"
    assert back["tied"][2].data_ptr() != back["tied"][0].data_ptr()


def test_others_can_take_the_weights_out(tmp_path: Path) -> None:
    shard = shard_of(
        tmp_path, {"w": torch.arange(6.0).reshape(2, 3).t(), "b": torch.ones(3, dtype=torch.bfloat16)}
    )
    found = load_file(shard / DATA)
    assert torch.equal(found["state.w"], torch.arange(6.0).reshape(2, 3).t())
    assert found["state.b"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"x": torch.ones(3).to_sparse()}, "sparse or nested tensor"),
        ({"x": torch.ones(3, device="meta")}, "meta tensor"),
        ({"x": torch.empty(3, dtype=torch.uint3)}, "torch.uint3"),
        ({"x": np.zeros(2, dtype=[("a", "<i4")])}, "array of"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        keep(store_of(tmp_path), 1, state)


def test_a_state_that_is_nested_too_deep_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    for depth in (400, 100_000):
        state: Any = 1
        for _ in range(depth):
            state = [state]
        with pytest.raises(UsageError, match="nested"):
            keep(store_of(tmp_path), 1, state)


class Opens:
    """Unpickled, it makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = str(tmp_path / "executed")
    shard = shard_of(tmp_path, states())
    for name in (".metadata", "tensors/.metadata", "x.pt"):
        path = shard / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(Opens(trap)))
    assert same(load(tmp_path, 1), states())
    for name in (INDEX, DATA):
        (shard / name).write_bytes(pickle.dumps(Opens(trap)))
        refused(tmp_path)
    assert not Path(trap).exists()


def test_any_bit_and_any_length(tmp_path: Path) -> None:
    """Whatever changes is found; nothing but a ServiceError comes of it."""
    shard = shard_of(tmp_path, states())
    chance = random.Random(11)
    for name in (INDEX, DATA):
        whole = (shard / name).read_bytes()
        for _ in range(60):
            content = bytearray(whole)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            (shard / name).write_bytes(content)
            refused(tmp_path)
        for length in (0, 1, 7, 8, chance.randrange(len(whole)), len(whole) - 1):
            (shard / name).write_bytes(whole[:length])
            refused(tmp_path)
        (shard / name).write_bytes(whole + b"\n")
        refused(tmp_path)
        (shard / name).write_bytes(whole)
    assert same(load(tmp_path, 1), states())


def forge(shard: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Another index, with the checksum that belongs to it."""
    body = json.loads((shard / INDEX).read_bytes().splitlines()[1])
    changed = change(body)
    write_index(shard, json.dumps(body if changed is None else changed).encode())


def write_index(shard: Path, body: bytes) -> None:
    first = {"swift_checkpoint": 1, "bytes": len(body), "xxh3_128": digest(body)}
    (shard / INDEX).write_bytes(json.dumps(first).encode() + b"\n" + body)


def tensor(body: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = body["state"]["dict"][0][1]
    return described


def put(where: Callable[[dict[str, Any]], dict[str, Any]], **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: where(body).update(fields)


def first(body: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = body["tensors"][0]
    return entry


def top(body: dict[str, Any]) -> dict[str, Any]:
    return body


HUGE = 1 << 50


@pytest.mark.parametrize(
    "change",
    [
        put(tensor, shape=[HUGE]),
        put(tensor, shape=[HUGE, HUGE]),
        put(tensor, shape=[-4]),
        put(tensor, shape=[4.0]),
        put(tensor, shape=[True] * 4),
        put(tensor, shape=[1] * 5000 + [4]),
        put(tensor, shape="4"),
        put(tensor, shape=[HUGE, 0]),
        put(tensor, dtype="int32"),
        put(tensor, dtype="Tensor"),
        put(tensor, dtype="quint8"),
        put(tensor, dtype=["float32"]),
        put(tensor, stride=[HUGE]),
        put(tensor, stride=[-1]),
        put(tensor, stride=[2, 2]),
        put(tensor, tensor="../../x"),
        put(tensor, tensor=7),
        put(tensor, more=1),
        put(first, at=-8),
        put(first, at=0),
        put(first, at=HUGE),
        put(first, bytes=HUGE),
        put(first, bytes=-16),
        put(first, name="state.b"),
        put(first, name="../../../etc/passwd"),
        put(first, xxh3_128="0"),
        put(first, file="/etc/passwd"),
        lambda body: body["tensors"].append(body["tensors"][0]),
        lambda body: body["tensors"].pop(),
        lambda body: body["tensors"].append({"name": "state.b", "same_as": "state.a"}),
        lambda body: body["tensors"].__setitem__(1, {"name": "state.b", "same_as": "state.b"}),
        put(top, tensors={}),
        put(top, tensors=[7]),
        put(top, tensors=[[]]),
        put(top, version=2),
        put(top, version=True),
        put(top, rank=1),
        put(top, data={"bytes": HUGE, "head_bytes": HUGE, "head_xxh3_128": ""}),
        put(top, data={"bytes": 1, "head_bytes": -1, "head_xxh3_128": ""}),
        put(top, data=None),
        put(top, more=None),
        put(top, state=[1]),
        put(top, state={}),
        put(top, state={"dict": [["a"]]}),
        put(top, state={"dict": [[["a"], 1]]}),
        put(top, state={"dict": [["a", 1], ["a", 2]]}),
        put(top, state={"pickle": []}),
        put(top, state={"array": "x"}),
        put(top, state={"array": "x", "bytes": HUGE, "shape": [1], "dtype": "O", "order": "C"}),
        put(top, state={"list": {}}),
        put(top, state={"list": [], "tuple": []}),
        put(top, state={"tensor": "x"}),
        put(top, state={"tensor": "x", "shape": [1], "stride": [1]}),
        lambda _body: [],
    ],
)
def test_a_forged_index_is_refused_before_anything_is_allocated(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    shard = shard_of(tmp_path, {"a": torch.arange(4), "b": torch.ones(4)})
    forge(shard, lambda body: None)
    load(tmp_path, 1)
    forge(shard, change)
    refused(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"state":' * 50_000,
        b"",
        b"\xff\xfe",
        b'{"version":' + b"9" * 10_000 + b"}",
        b'{"version":1,"version":1}',
        b'{"version":1,"rank":0,"rank":0,"data":{},"tensors":[],"state":null}',
        json.dumps({"list": [1] * 10}).encode(),
    ],
    ids=range(8),
)
def test_json_that_nobody_wrote_for_this(tmp_path: Path, body: bytes) -> None:
    write_index(shard_of(tmp_path, {"a": torch.arange(4)}), body)
    refused(tmp_path)


def test_files_that_only_look_large(tmp_path: Path) -> None:
    """Holes of a terabyte: neither read nor allocated."""
    shard = shard_of(tmp_path, {"a": torch.arange(4)})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.truncate(shard / DATA, 1 << 40)
    refused(tmp_path)

    def claims(body: dict[str, Any]) -> None:
        grown = (1 << 40) - body["data"]["head_bytes"]
        body["data"]["bytes"] = 1 << 40
        body["tensors"][0]["bytes"] = grown - grown % 8
        tensor(body)["shape"] = [grown // 8]

    forge(shard, claims)
    refused(tmp_path, "more than this machine has memory")
    os.truncate(shard / INDEX, 1 << 40)
    refused(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("level", ["v00000001", "v00000001/rank0", "shard"])
def test_folders_are_not_followed_elsewhere(tmp_path: Path, level: str) -> None:
    shard = shard_of(tmp_path, {"a": torch.arange(4)})
    path, aside = (shard if level == "shard" else tmp_path / level), tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside, target_is_directory=True)
    refused(tmp_path, r"a link|corrupt|not whole|nothing in it")


@pytest.mark.parametrize("level", ["v00000001", "v00000001/rank0"])
def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path, level: str) -> None:
    of_another = shard_of(tmp_path / "other", {"a": torch.arange(4)})
    path = tmp_path / "job" / level
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "other" / level, target_is_directory=True)
    store = store_of(tmp_path / "job", generation=9)
    durable: list[int] = []
    failed: list[Unsaved] = []
    store.save(1, {"a": torch.ones(4)}, durable.append, failed.append)
    store.wait_saved()
    assert durable == []
    assert store.unsaved is not None
    assert "a link" in store.unsaved.reason
    store.prune({5})
    store.close()
    assert [shard.name for shard in of_another.parent.iterdir()] == [of_another.name]
    assert torch.equal(load(tmp_path / "other", 1)["a"], torch.arange(4))


# --- zombie and heir ---


def test_a_zombie_that_is_fenced_while_it_writes_publishes_nothing(tmp_path: Path) -> None:
    asked: list[int] = []

    class Fenced(Holding):
        @property
        def fenced(self) -> bool:
            asked.append(1)
            return True

        @fenced.setter
        def fenced(self, _value: bool) -> None: ...

    store = CheckpointStore(tmp_path, 0, Fenced())
    told: list[int] = []
    store.save(1, {"x": torch.ones(4)}, told.append, unexpected, generation=1)
    store.wait_saved()
    store.close()
    assert asked
    assert told == []
    assert list(tmp_path.glob("v*/rank0/*")) == []


def test_a_zombie_removes_nothing_of_its_heir(tmp_path: Path) -> None:
    zombie = store_of(tmp_path, generation=3)
    heirs = shard_of(tmp_path, {"x": torch.zeros(4)}, generation=4)
    begun = heirs.with_name(".g4-0123abcd-7")
    begun.mkdir()
    keep(zombie, 1, {"x": torch.ones(4)})
    zombie.prune({5}, 9)
    assert heirs.is_dir()
    assert begun.is_dir()
    assert list(heirs.parent.glob("g3-*")) == []


@pytest.mark.parametrize(
    "told",
    [
        {"scalar": "00" * 8, "dtype": "O", "shape": []},
        {"scalar": "zz", "dtype": "<f4", "shape": []},
        {"scalar": "00", "dtype": [["a", "O"]], "shape": [1 << 60]},
        {"scalar": "00" * 8, "dtype": "f4,(1", "shape": []},  # numpy reads these as Python
        {"scalar": "00" * 8, "dtype": ",", "shape": []},
        {"scalar": "00" * 8, "dtype": [["a", "(2)f4"]], "shape": []},
        {"device": "no such device"},
        {"dtype": "Tensor"},
        {"dtype": "load"},
        {"complex": ["x"]},
        {"deque": [[], -1]},
        {"set": [{"list": []}]},
        {"size": ["x"]},
        {"bytes": 7},
        {"dict": [[{"list": []}, 1]]},
        {},
    ],
)
def test_a_state_that_no_join_can_put_together(tmp_path: Path, told: Any) -> None:
    shard = shard_of(tmp_path, {"a": None})
    forge(shard, put(top, state=told))
    refused(tmp_path)
