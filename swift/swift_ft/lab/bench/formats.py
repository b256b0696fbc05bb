"""`swift-ft bench checkpoint --formats`: what each format of a checkpoint costs, and what it loses.

In each round every format has its turns, beside the machine's limits for the same bytes, so that a busy machine slows
all of them. Times are medians over rounds, ratios those of the rounds. A warm-up round finds what is lost.

A state has a group of leaves for each kind of value that formats treat differently. A leaf is any value other than dict
and list: a tensor, an array, a number, a tuple. It is kept if the loaded leaf has the same type, dtype, shape, strides
and bits.

A format gets the values for which it has a type, as its users pass them: safetensors gets tensors; npz and HDF5 get
arrays and numbers, and bf16, which numpy lacks, as fp32. Other values are left out. A load is not corrected by hand.
Loads read files that the same process saved. Even so, only tensors, arrays and plain values are unpickled.
"""

import argparse
import math
import mmap
import os
import random
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import sync_directory
from swift_ft.lab.bench import output
from swift_ft.lab.bench.output import Rounds
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.export import Reading, alone, load_dcp
from swift_ft.state.tree import split
from swift_ft.text import show, table

# The state that is saved, and the comparison that finds the losses of a format.

State = dict[str, Any]
Keys = tuple[str, ...]

GROUPS: dict[str, Keys] = {
    "bf16": ("model", "bf16"),
    "fp32": ("model", "fp32"),
    "int64": ("model", "int64"),
    "0-dim": ("model", "0-dim"),
    "strided": ("model", "strided"),
    "moments": ("optimizer", "state"),
    "numbers": ("optimizer", "param_groups"),
    "torch rng": ("rng", "torch"),
    "numpy rng": ("rng", "numpy"),
    "python rng": ("rng", "python"),
}
"""Path of each group. "moments" includes the optimizer's step tensors; "numbers" are those of its param_groups."""
GONE, TYPE, DTYPE, SHAPE, BITS, STRIDES = "gone", "type", "dtype", "shape", "bits", "strides"
LOSSES = (GONE, TYPE, DTYPE, SHAPE, BITS, STRIDES)
COLUMNS = 1024
_ROWS_MAX = 1024
"""Largest number of rows of a parameter, which then has 2 MiB in bf16, 4 MiB in fp32."""


def make(parameter_bytes: int, seed: int) -> State:
    """Creates about that many bytes of parameters, half of them in bf16, and for each the two moments of AdamW: three
    times the bytes in all."""
    generator = torch.Generator().manual_seed(seed)

    def parameters(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        rows = max(1, parameter_bytes // 2 // (COLUMNS * dtype.itemsize))
        parts = math.ceil(rows / _ROWS_MAX)
        sizes = [rows // parts + (part < rows % parts) for part in range(parts)]
        return {
            f"{part}.weight": torch.randn(size, COLUMNS, generator=generator).to(dtype)
            for part, size in enumerate(sizes)
        }

    model: State = {
        "bf16": parameters(torch.bfloat16),
        "fp32": parameters(torch.float32),
        "int64": {"seen": torch.tensor([2**53 + 1, seed, -1])},
        "0-dim": {"scale": torch.tensor(math.pi)},
        "strided": {"table": torch.randn(3, 5, generator=generator).t()},
    }
    trained = [*model["bf16"].values(), *model["fp32"].values()]
    moments = {
        index: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.randn(p.shape, generator=generator).to(p.dtype),
            "exp_avg_sq": torch.rand(p.shape, generator=generator).to(p.dtype),
        }
        for index, p in enumerate(trained)
    }
    groups = [
        {
            "lr": 0.1 + 0.2,
            "betas": (0.9, 0.95),
            "weight_decay": 0,
            "amsgrad": False,
            "foreach": None,
            "decoupled": "yes",
            "params": list(range(len(trained))),
        }
    ]
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": groups},
        "rng": {
            "torch": generator.get_state(),
            "numpy": np.random.RandomState(seed).get_state(),
            "python": random.Random(seed).getstate(),
        },
    }


def leaves(value: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """Yields every leaf with its path: keys and positions as text."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            yield from leaves(item, (*path, str(key)))
    else:
        yield path, value


def nested(flat: dict[Keys, Any]) -> State:
    """Returns nested dicts of the leaves that `leaves` yields."""
    state: State = {}
    for path, value in flat.items():
        place = state
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return state


def nbytes(state: State) -> int:
    """Returns the bytes of the state's tensors."""
    return sum(value.nbytes for _, value in leaves(state) if isinstance(value, torch.Tensor))


def losses(saved: State, loaded: State) -> dict[str, list[str]]:
    """Returns by group the kinds of losses (in the order of `LOSSES`); empty if all leaves are kept."""
    there = dict(leaves(loaded))
    found: dict[str, set[str]] = {group: set() for group in GROUPS}
    for path, value in leaves(saved):
        group = next(group for group, prefix in GROUPS.items() if path[: len(prefix)] == prefix)
        found[group] |= lost(value, there[path]) if path in there else {GONE}
    return {group: [what for what in LOSSES if what in of] for group, of in found.items()}


def lost(saved: Any, loaded: Any) -> set[str]:
    """Returns the kinds of losses of a leaf."""
    if type(saved) is not type(loaded):
        return {TYPE}
    if isinstance(saved, torch.Tensor):
        return _lost_of_tensor(saved, loaded)
    if isinstance(saved, np.ndarray):  # copies: strides of arrays are not compared
        return _lost_of_tensor(torch.from_numpy(saved.copy()), torch.from_numpy(loaded.copy()))
    if isinstance(saved, tuple | list):
        if len(saved) != len(loaded):
            return {SHAPE}
        return set().union(*map(lost, saved, loaded))
    if isinstance(saved, float):
        return set() if struct.pack("d", saved) == struct.pack("d", loaded) else {BITS}
    return set() if saved == loaded else {BITS}


def _lost_of_tensor(saved: torch.Tensor, loaded: torch.Tensor) -> set[str]:
    if saved.shape != loaded.shape:
        return {SHAPE}
    found = set()
    if saved.dtype != loaded.dtype:
        found.add(DTYPE)
        loaded = loaded.to(saved.dtype)
    if not torch.equal(bytes_of(saved), bytes_of(loaded)):
        found.add(BITS)
    if saved.stride() != loaded.stride():
        found.add(STRIDES)
    return found


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements in order as bytes; shares the tensor's memory if it is contiguous."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def write_tensors(path: Path, tensors: Iterable[torch.Tensor], *, fsync: bool) -> None:
    """Writes the bytes of tensors to one file: the least that a save can do. Raises OSError."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            left = memoryview(bytes_of(tensor).numpy().data)
            while left:
                left = left[file.write(left) :]
        if fsync:
            os.fsync(file)


# The formats: how each saves a state into its own folder, and loads it.

Wait = Callable[[], None]
"""Returns when the saved state is complete, and durable if requested. Raises the format's own errors."""


class Format(NamedTuple):
    save: Callable[[State, Path, bool], Wait]
    """save(state, place, fsync) returns when the state may change again."""
    load: Callable[[Path, State], State]
    """load(place, like): `like` is the saved state; formats that load in place get its structure, not its content."""
    fsync: tuple[bool, ...] = (False, True)
    """Supported choices of fsync: without (False), with (True), or both."""


def _one_file(write: Callable[[State, Path], None], read: Callable[[Path], State]) -> Format:
    """Makes a format of a function that writes a file and one that reads it."""

    def save_file(state: State, place: Path, fsync: bool) -> Wait:
        path = place / "state"
        write(state, path)
        if fsync:
            with path.open("rb") as file:
                os.fsync(file)
            sync_directory(place)
        return lambda: None

    return Format(save_file, lambda place, _like: read(place / "state"))


def _swift(*, sync: bool) -> Format:
    """swift's own checkpoints. They are always durable, by contract."""

    def save_checkpoint(state: State, place: Path, fsync: bool) -> Wait:
        store = CheckpointStore(place, 0, Reading())
        store.save(1, state, lambda _version: None, lambda _unsaved: None, sync=sync)
        return store.wait

    return Format(save_checkpoint, lambda place, _like: CheckpointStore(place, 0, Reading()).load(1), (True,))


def _save_dcp(state: State, place: Path, fsync: bool, *, asynchronous: bool) -> Wait:
    """Saves by torch.distributed.checkpoint, in one process alone."""
    writer = FileSystemWriter(place, sync_files=fsync)
    future: Any = None
    with alone():
        if asynchronous:
            future = async_save(state, storage_writer=writer, no_dist=True)
        else:
            save(state, storage_writer=writer, no_dist=True)

    def wait() -> None:
        if future is not None:
            future.result()
        if fsync:
            sync_directory(place)

    return wait


def _load_dcp(place: Path, like: State) -> State:
    into: State = _blank(like)
    with _arrays_too():
        load_dcp(into, place)
    return into


def _blank(value: Any) -> Any:
    """Returns the same structure with zeroed tensors and None for other values."""
    if isinstance(value, dict):
        return {key: _blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_blank(item) for item in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


@contextmanager
def _arrays_too() -> Iterator[None]:
    """Lets torch's `weights_only` load numpy's arrays of numbers in addition to tensors and plain values."""
    numbers = "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    known: list[Any] = [np.zeros(0).__reduce__()[0], np.ndarray, np.dtype, bytes]
    known += {type(np.dtype(code)) for code in numbers}
    with torch.serialization.safe_globals(known):
        yield


def _read_torch(file: Any) -> State:
    with _arrays_too():
        loaded: State = torch.load(file, weights_only=True)
    return loaded


def _tensors(state: State) -> dict[str, torch.Tensor]:
    """Returns the tensors by name, contiguous as safetensors requires; it takes no other values."""
    found = ((path, value) for path, value in leaves(state) if isinstance(value, torch.Tensor))
    return {"/".join(path): value.contiguous() for path, value in found}


def _write_safetensors(state: State, path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_file(_tensors(state), path)


def _read_safetensors(path: Path) -> State:
    import safetensors.torch

    return _of_names(safetensors.torch.load_file(path))


def _of_names(flat: dict[str, Any]) -> State:
    return nested({tuple(name.split("/")): value for name, value in flat.items()})


def _array(value: Any) -> "np.ndarray[Any, Any] | None":
    """Converts to a numpy array; None if the value has no such form."""
    if isinstance(value, torch.Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # a tuple of mixed shapes
        return None
    return None if array.dtype.hasobject else array


def _value(array: "np.ndarray[Any, Any]") -> Any:
    """Converts a loaded array as a reader without further knowledge does: to a tensor, if torch has its type."""
    return torch.from_numpy(array) if array.dtype.kind in "biufc" else array


def _arrays(state: State) -> dict[str, "np.ndarray[Any, Any]"]:
    found = {"/".join(path): _array(value) for path, value in leaves(state)}
    return {name: array for name, array in found.items() if array is not None}


def _write_npz(state: State, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **_arrays(state))


def _read_npz(path: Path) -> State:
    with np.load(path, allow_pickle=False) as found:
        return _of_names({name: _value(found[name]) for name in found.files})


def _write_hdf5(state: State, path: Path) -> None:
    """A dataset for each array; strings and numbers as attributes, as usual. Values for which it has no type are left
    out."""
    import h5py

    with h5py.File(path, "w") as file:
        for at, value in leaves(state):
            if isinstance(value, bool | int | float | str):
                file.require_group("/".join(at[:-1])).attrs[at[-1]] = value
            elif (array := _array(value)) is not None:
                file.create_dataset("/".join(at), data=array)


def _read_hdf5(path: Path) -> State:
    import h5py

    flat: dict[str, Any] = {}

    def visit(name: str, found: Any) -> None:
        if isinstance(found, h5py.Dataset):
            flat[name] = _value(np.asarray(found[()]))
        else:
            flat.update({f"{name}/{key}": value for key, value in found.attrs.items()})

    with h5py.File(path, "r") as file:
        file.visititems(visit)
    return _of_names(flat)


FORMATS: dict[str, Format] = {
    "swift sync": _swift(sync=True),
    "swift async": _swift(sync=False),
    "dcp": Format(partial(_save_dcp, asynchronous=False), _load_dcp),
    "dcp async": Format(partial(_save_dcp, asynchronous=True), _load_dcp),
    "torch": _one_file(torch.save, _read_torch),
    "safetensors": _one_file(_write_safetensors, _read_safetensors),
    "npz": _one_file(_write_npz, _read_npz),
    "hdf5": _one_file(_write_hdf5, _read_hdf5),
}


# The measurement, and what comes out.

MIB = 1 << 20
SIZE_MAX = 1 << 20
LIMITS = "limits"
LIMIT_NAMES = ("copy_s", "write_s", "write_fsync_s", "read_s")
Losses = dict[str, dict[str, list[str]]]


def measure(size: int, rounds: int, names: Sequence[str], place: Path) -> tuple[dict[str, Any], Losses]:
    """Returns the case of a model with so many bytes of parameters, and what each format loses. Raises ServiceError if
    a save or a load fails."""
    state, found, lost = make(size, seed=0), Rounds(), Losses()
    kinds = [(name, fsync) for name in names for fsync in FORMATS[name].fsync]
    for number in range(-1, rounds):
        if number == 0:
            found = Rounds()  # the first one was a warm-up
        with _folder(place, "nothing can be saved") as folder:
            found.note_all(LIMITS, limits(state, folder / "limit"))
        for name, fsync in kinds:
            with _folder(place, f"{name} cannot save or load") as folder:
                figures, loaded = save_and_load(state, folder, name, fsync)
            found.note_all(f"{name} {fsync}", figures)
            if number < 0:
                lost[name] = losses(state, loaded)
    return case(size, rounds, kinds, found), lost


@contextmanager
def _folder(place: Path, failed: str) -> Iterator[Path]:
    """Gives an empty folder, which is gone afterwards. Turns any error into a ServiceError in one line."""
    try:
        with TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever a format's library raises)
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ServiceError(f"bench checkpoint: {failed}: {said}") from None


def save_and_load(state: State, folder: Path, name: str, fsync: bool) -> tuple[dict[str, float], State]:
    began, worked = time.monotonic(), time.process_time()
    wait = FORMATS[name].save(state, folder, fsync)
    blocked = time.monotonic() - began
    wait()
    total, worked = time.monotonic() - began, time.process_time() - worked
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    began = time.monotonic()
    loaded = FORMATS[name].load(folder, state)
    touch(loaded)
    measured = {"blocked_s": blocked, "total_s": total, "cpu_s": worked, "load_s": time.monotonic() - began}
    return measured | {"bytes": size, "state_bytes": nbytes(state)}, loaded


def touch(state: State) -> None:
    """Reads a byte of each page, because a file that is only mapped into memory is not loaded before that."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            bytes_of(value)[:: mmap.PAGESIZE].sum()


def limits(state: State, path: Path) -> dict[str, float]:
    """Measures the same bytes copied in memory, written to one file, written and synced, read again: the seconds of
    each. Raises OSError."""
    rounds = Rounds()
    tensors = [tensor for tensor in split(state)[0].values() if tensor.nbytes]
    with rounds.timed("copy_s"):
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for name, fsync in (("write_s", False), ("write_fsync_s", True)):
        path.unlink(missing_ok=True)
        with rounds.timed(name):
            write_tensors(path, copies, fsync=fsync)
    with rounds.timed("read_s"), path.open("rb", buffering=0) as file:
        for tensor in copies:
            into = memoryview(bytes_of(tensor).numpy().data)
            while into:
                into = into[file.readinto(into) :]
    path.unlink()
    return {name: seconds for name, (seconds,) in rounds.values.items()}


def case(size: int, rounds: int, kinds: Sequence[tuple[str, bool]], found: Rounds) -> dict[str, Any]:
    def row(name: str, fsync: bool) -> dict[str, Any]:
        at, written = f"{name} {fsync}", "write_fsync_s" if fsync else "write_s"
        return {
            "format": name,
            "fsync": fsync,
            **{key: found.median(f"{at} {key}") for key in ("blocked_s", "total_s", "cpu_s", "load_s")},
            "bytes": round(found.median(f"{at} bytes")),
            "size": found.ratio(f"{at} bytes", f"{at} state_bytes"),
            "blocked_over_copy": found.ratio(f"{at} blocked_s", f"{LIMITS} copy_s"),
            "total_over_write": found.ratio(f"{at} total_s", f"{LIMITS} {written}"),
            "load_over_read": found.ratio(f"{at} load_s", f"{LIMITS} read_s"),
        }

    return {
        "parameter_bytes": size,
        "state_bytes": max(found.median(f"{name} {fsync} state_bytes") for name, fsync in kinds),
        "rounds": rounds,
        "limits": {name: found.median(f"{LIMITS} {name}") for name in LIMIT_NAMES},
        "formats": [row(name, fsync) for name, fsync in kinds],
    }


def text(case: Mapping[str, Any]) -> list[str]:
    limits = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in case["limits"].items()}
    rows = [["", "fsync", "blocked ms", "total ms", "CPU ms", "load ms", "size"]]
    rows[0] += ["blocked / copy", "total / write", "load / read"]
    for row in case["formats"]:
        times = [f"{1e3 * row[name]:.1f}" for name in ("blocked_s", "total_s", "cpu_s", "load_s")]
        ratios = ("size", "blocked_over_copy", "total_over_write", "load_over_read")
        fsync = "yes" if row["fsync"] else "no"
        rows.append([row["format"], fsync, *times, *(f"{row[name]:.2f}" for name in ratios)])
    return [
        f"{case['parameter_bytes'] / MIB:g} MiB of parameters ({case['state_bytes'] / MIB:.1f} MiB of state)",
        f"limits: copied in memory {limits['copy_s']}, written {limits['write_s']}, with fsync "
        f"{limits['write_fsync_s']}, read {limits['read_s']}",
        *table(rows),
    ]


def losses_text(losses: Losses) -> list[str]:
    """Formats what each format loses, a column per group."""
    groups = list(next(iter(losses.values())))
    rows = [[name, *(",".join(of[group]) or "-" for group in groups)] for name, of in losses.items()]
    return ["what is lost (-: nothing):", *table([["", *groups], *rows])]


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group(
        "formats", "What each format of a checkpoint costs and loses, instead of what a save costs training."
    )
    names = f"measure these formats (without names: all): {', '.join(FORMATS)}"
    group.add_argument("--formats", nargs="?", const=",".join(FORMATS), metavar="NAME,...", help=names)
    group.add_argument("--sizes", default="1,8", metavar="MIB,...", help="of parameters (%(default)s)")


def run(given: argparse.Namespace) -> dict[str, Any]:
    names = output.some(given.formats, FORMATS, "--formats")
    sizes = _sizes(given.sizes)
    machine = output.machine()
    print(f"{machine}; medians of {given.rounds} rounds", flush=True)
    cases, lost = [], Losses()
    torch.set_num_threads(1)
    with output.place(given.directory) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        for size in sizes:
            found, lost = measure(int(size * MIB), given.rounds, names, Path(place))
            cases.append(found)
            show(["", *text(found)])
    show(["", *losses_text(lost)])
    about = {"bench": "checkpoint --formats", "machine": machine, "rounds": given.rounds}
    return {**about, "cases": cases, "losses": lost}


def _sizes(words: str) -> list[float]:
    """Parses comma-separated numbers: ascending, without duplicates. Raises UsageError."""
    try:
        sizes = sorted({float(word) for word in words.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= SIZE_MAX for size in sizes):
        raise UsageError(f"--sizes {words}: give numbers above 0 and up to {SIZE_MAX}, with commas between")
    return sizes
