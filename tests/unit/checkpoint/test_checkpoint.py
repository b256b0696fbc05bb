import json
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.checkpoint_file import empty_tensors
from swift_ft.state.tree import join, split
from tests.unit.checkpoint.holding import keep, load, same, saved, store_of

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars | st.builds(torch.arange, st.integers(0, 3)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_split_and_join_are_inverse(value: Any) -> None:
    tensors, skeleton = split(value)
    assert same(join(json.loads(json.dumps(skeleton)), tensors), value)


def test_the_skeleton_names_shape_and_dtype_of_every_tensor() -> None:
    state = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": [torch.tensor(1)]}
    _, skeleton = split(state)
    found = sorted((tuple(t.shape), t.dtype) for t in empty_tensors(skeleton).values())
    assert found == sorted([((2, 3), torch.bfloat16), ((), torch.int64)])


def test_what_is_neither_tensor_nor_plain_is_refused() -> None:
    for value in (object(), {torch.ones(1)}, {object(): 1}, np.array([object()])):
        with pytest.raises(UsageError, match=r"the state at state\.a"):
            split({"a": value})


@pytest.mark.parametrize(
    "value",
    [
        {1, "a", (2, None)},
        frozenset({1.5}),
        deque([1, [2]], maxlen=3),
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("aab"),
        defaultdict(list, {"a": [1]}),
        {(0, 1): "pair", None: "none", 2.5: "half", b"x": 1},
        b"\x00\xff",
        1 + 2j,
        torch.bfloat16,
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.float32(0.1),
        np.int64(7),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.asfortranarray(np.random.default_rng(0).random((2, 3))),
        np.array(["a", "bc"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_people_keep_comes_back_with_its_type(value: Any) -> None:
    tensors, skeleton = split({"a": value})
    again = join(json.loads(json.dumps(skeleton)), {name: t.clone() for name, t in tensors.items()})["a"]
    assert type(again) is type(value)
    assert getattr(again, "maxlen", None) == getattr(value, "maxlen", None)
    if isinstance(value, np.ndarray):
        assert (again.dtype, again.flags.f_contiguous) == (value.dtype, value.flags.f_contiguous)
        assert (again == value).all()
    else:
        assert again == value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last),  # contiguous either way; kernels look
        torch.randn(4, 6).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(3, 1).expand(3, 4),
        torch.empty(0, 3).t(),
        torch.zeros(()),
    ],
)
def test_strides_come_back_where_they_can(tensor: torch.Tensor, tmp_path: Path) -> None:
    again = saved(tmp_path, 1, {"x": tensor}).load(1)["x"]
    assert torch.equal(again, tensor)
    if 0 in tensor.stride() and tensor.numel():
        assert again.is_contiguous()  # elements that were one are apart
    else:
        assert again.stride() == tensor.stride()


def test_a_directory_that_cannot_be_written_is_one_clear_line() -> None:
    with pytest.raises(UsageError, match="name one you can write"):
        store_of("/proc/self/checkpoints").check()


def test_what_a_rank_lacks_of_a_version_is_read_from_a_twin(tmp_path: Path) -> None:
    saved(tmp_path, 3, {"w": torch.ones(2)}, rank=1)
    assert torch.equal(store_of(tmp_path, twins=(1,)).load(3)["w"], torch.ones(2))
    with pytest.raises(ServiceError, match="there is nothing in it"):
        load(tmp_path, 3)


def test_a_rank_that_was_away_does_not_load_what_was_given_up_meanwhile(tmp_path: Path) -> None:
    """Of one version: its own of generation 1, and its twin's of generation 2, which had gone back behind it."""
    own = store_of(tmp_path, 0, generation=1, twins=(1,))
    twin = store_of(tmp_path, 1, generation=2, twins=(0,))
    for store, value in ((own, 1.0), (twin, 2.0)):
        keep(store, 3, {"w": torch.full((2,), value)})
    for store in (own, twin):
        assert store.load(3)["w"].tolist() == [2.0, 2.0]
