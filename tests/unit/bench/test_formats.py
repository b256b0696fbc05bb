"""The benchmark of formats: what a round trip finds lost, what is counted."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.bench import formats
from swift_ft.lab.bench.formats import FORMATS, LIMITS, limits
from swift_ft.lab.bench.output import Rounds

# torch warns in the thread of an asynchronous save.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ALL_KEPT = {group: [] for group in formats.GROUPS}
EXACT = [name for name in FORMATS if name.split()[0] in ("swift", "dcp", "torch")]


def trip(name: str, state: formats.State, fsync: bool = False) -> formats.State:
    """Saved and loaded."""
    kind = FORMATS[name]
    with tempfile.TemporaryDirectory() as place:
        kind.save(state, Path(place), fsync or kind.fsync == (True,))()
        return kind.load(Path(place), state)


# What is lost.


@pytest.mark.parametrize("name", FORMATS)
def test_the_rng_and_the_numbers_of_the_optimizer_are_what_formats_lose(name: str) -> None:
    state = formats.make(1 << 16, seed=1)
    found = formats.losses(state, trip(name, state, fsync=True))
    family = name.split()[0]
    rngs = {"numpy rng": ["gone"], "python rng": ["gone"]}
    arrays = {"bf16": ["dtype"], "moments": ["dtype"], "numbers": ["gone", "type"]}
    expected: dict[str, dict[str, list[str]]] = {
        "safetensors": {"strided": ["strides"], "numbers": ["gone"], **rngs},
        "npz": {**arrays, **rngs},
        "hdf5": {"strided": ["strides"], **arrays, **rngs},
    }
    assert found == ALL_KEPT | expected.get(family, {})


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    """Of any bits, NaN among them."""
    dtype, shape = draw(st.sampled_from(dtypes)), draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not raw:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
PLAIN = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text("xyzäß", max_size=5)
)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        tensors(DTYPES) | PLAIN | st.tuples(PLAIN, PLAIN) | st.builds(np.arange, st.integers(0, 5)),
        lambda inner: (
            st.dictionaries(KEYS, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=6,
    ),
    min_size=1,
    max_size=3,
)


def lost_of(saved: formats.State, loaded: formats.State) -> set[str]:
    there = dict(formats.leaves(loaded))
    of = [
        formats.lost(value, there[path]) if path in there else {formats.GONE}
        for path, value in formats.leaves(saved)
    ]
    return set().union(*of)


@pytest.mark.parametrize("name", EXACT)
@settings(deadline=None, max_examples=10)
@given(state=TREES)
def test_a_format_that_keeps_all_keeps_any_state(name: str, state: formats.State) -> None:
    assert lost_of(state, trip(name, state)) == set()


@pytest.mark.parametrize("name", ["safetensors", "npz", "hdf5"])
@settings(deadline=None, max_examples=10)
@given(
    state=st.dictionaries(KEYS, st.dictionaries(KEYS, tensors(DTYPES), min_size=1), min_size=1, max_size=3)
)
def test_the_others_keep_the_bits_of_tensors(name: str, state: formats.State) -> None:
    loaded = dict(formats.leaves(trip(name, state)))
    for path, tensor in formats.leaves(state):
        if tensor.dtype == torch.bfloat16 and not name.startswith("safetensors"):
            # As fp32: a NaN stays one, with other bits perhaps.
            assert torch.equal(loaded[path].nan_to_num(), tensor.float().nan_to_num())
            assert formats.lost(tensor, loaded[path]) >= {formats.DTYPE}
        else:
            assert formats.lost(tensor, loaded[path]) <= {formats.STRIDES}


@pytest.mark.parametrize(
    ("saved", "loaded", "lost"),
    [
        (1, 1.0, {"type"}),
        (True, 1, {"type"}),
        (0.0, -0.0, {"bits"}),
        (math.nan, math.nan, set()),
        ((1, (2.0, None)), (1, (2.0, None)), set()),
        ((1, (2.0, None)), (1, (2, None)), {"type"}),
        ((1, 2), (1,), {"shape"}),
        ("a", "b", {"bits"}),
        (np.arange(3), np.arange(3), set()),
        (np.arange(3), np.arange(3.0), {"dtype"}),
        (np.arange(3), np.arange(3)[None], {"shape"}),
        (np.arange(3), np.arange(3)[::-1], {"bits"}),
        (torch.arange(3), torch.arange(3), set()),
        (torch.tensor(math.nan), torch.tensor(math.nan), set()),
        (torch.tensor(0.0), torch.tensor(-0.0), {"bits"}),
        (torch.zeros(()), torch.zeros(1), {"shape"}),
        (torch.tensor(1.0), 1.0, {"type"}),
        (torch.ones(2, dtype=torch.bfloat16), torch.ones(2), {"dtype"}),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), {"dtype"}),
        (torch.tensor([1.0, 1e-20]), torch.tensor([1.0, 0.0], dtype=torch.float16), {"dtype", "bits"}),
        (torch.ones(2, 3).t(), torch.ones(3, 2), {"strides"}),
    ],
)
def test_what_is_lost(saved: Any, loaded: Any, lost: set[str]) -> None:
    assert formats.lost(saved, loaded) == lost


def test_a_group_tells_of_any_of_its_leaves() -> None:
    state = formats.make(1 << 14, seed=2)
    flat = dict(formats.leaves(state))
    del flat["rng", "python"]
    flat["optimizer", "state", "0", "step"] = torch.tensor(8.0)
    flat["optimizer", "param_groups", "0", "lr"] = np.float64(0.3)
    found = formats.losses(state, formats.nested(flat))
    assert found == ALL_KEPT | {"python rng": ["gone"], "moments": ["bits"], "numbers": ["type"]}


@pytest.mark.parametrize("size", [1 << 14, 1 << 20, 9 << 20])
def test_a_state_is_as_large_as_it_was_asked_for(size: int) -> None:
    state = formats.make(size, seed=0)
    model = state["model"]
    assert formats.nbytes({"a": model["bf16"], "b": model["fp32"]}) == pytest.approx(size, rel=0.01)
    assert formats.nbytes(state) == pytest.approx(3 * size, rel=0.5 if size < 1 << 20 else 0.01)
    assert formats.nbytes({"a": model["bf16"]}) == formats.nbytes({"b": model["fp32"]})
    assert {path[:2] for path, _ in formats.leaves(state)} == set(formats.GROUPS.values())


@pytest.mark.parametrize("name", ["swift async", "dcp async"])
def test_the_state_may_change_when_an_asynchronous_save_returns(name: str, tmp_path: Path) -> None:
    state, same = formats.make(4 << 20, seed=3), formats.make(4 << 20, seed=3)
    wait = FORMATS[name].save(state, tmp_path, True)
    for _, value in formats.leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()
    wait()
    assert formats.losses(same, FORMATS[name].load(tmp_path, same)) == ALL_KEPT


# The report.

BASE = {"copy_s": 0.1, "write_s": 0.2, "write_fsync_s": 0.5, "read_s": 0.05}


def made_up(fsync: bool = True) -> dict[str, Any]:
    """A case of three rounds, each as many times slower as its number for all alike."""
    measured = {"blocked_s": 0.3, "total_s": 1.0, "cpu_s": 0.7, "load_s": 0.1}
    rounds = Rounds()
    for slow in (2, 4, 6):
        rounds.note_all(LIMITS, {name: slow * value for name, value in BASE.items()})
        rounds.note_all(f"torch {fsync}", {name: slow * value for name, value in measured.items()})
        rounds.note_all(f"torch {fsync}", {"bytes": 8, "state_bytes": 6})
    return formats.case(2, 3, [("torch", fsync)], rounds)


def test_times_are_medians_and_ratios_those_of_the_rounds() -> None:
    case = made_up()
    assert (case["parameter_bytes"], case["state_bytes"], case["rounds"]) == (2, 6, 3)
    assert case["limits"]["copy_s"] == pytest.approx(0.4)
    (row,) = case["formats"]
    assert (row["format"], row["fsync"], row["bytes"]) == ("torch", True, 8)
    expected = {
        "blocked_s": 1.2,
        "total_s": 4.0,
        "cpu_s": 2.8,
        "load_s": 0.4,
        "size": 4 / 3,
        "blocked_over_copy": 3.0,
        "total_over_write": 2.0,
        "load_over_read": 2.0,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert formats.text(case)[-1].split() == [
        *("torch", "yes", "1200.0", "4000.0", "2800.0", "400.0", "1.33", "3.00", "2.00", "2.00"),
    ]


def test_without_fsync_the_limit_is_a_write_without() -> None:
    assert made_up(fsync=False)["formats"][0]["total_over_write"] == pytest.approx(5.0)


def test_the_losses_are_told() -> None:
    losses = {"torch": ALL_KEPT, "npz": ALL_KEPT | {"numbers": ["gone", "type"]}}
    told = formats.losses_text(losses)
    assert told[2].split() == ["torch", *["-"] * len(formats.GROUPS)]
    assert "gone,type" in told[3]


# The limits.


def test_the_limits_leave_nothing(tmp_path: Path) -> None:
    took = limits(formats.make(1 << 14, seed=0), tmp_path / "limit")
    assert set(took) == {"copy_s", "write_s", "write_fsync_s", "read_s"}
    assert all(seconds > 0 for seconds in took.values())
    assert list(tmp_path.iterdir()) == []
