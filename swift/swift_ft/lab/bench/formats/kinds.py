"""The formats: how each saves a state into its own folder, and loads it.

A format gets the values for which it has a type, as its users pass them: safetensors gets tensors; npz and HDF5 get
arrays and numbers, and bf16, which numpy lacks, as fp32. Other values are left out. A load is not corrected by hand:
the losses are measured (`swift_ft.lab.bench.formats.states`).

Loads read files that the same process saved. Even so, only tensors, arrays and plain values are unpickled.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from swift_ft.files import sync_directory
from swift_ft.lab.bench.formats.states import State, leaves, nested
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.export import Reading, alone, load_dcp

Wait = Callable[[], None]
"""Returns when the saved state is complete, and durable if requested. Raises the format's own errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format(ABC):
    fsync: tuple[bool, ...] = (False, True)
    """Supported choices of fsync: without (False), with (True), or both."""

    @abstractmethod
    def save(self, state: State, place: Path, fsync: bool) -> Wait:
        """Saves, and returns when the state may change again."""

    @abstractmethod
    def load(self, place: Path, like: State) -> State:
        """Loads the state. `like` is the saved one; formats that load in place get its structure, not its content."""


@dataclass(frozen=True, slots=True)
class OneFile(Format):
    """A format with one function that writes a file and one that reads it."""

    write: Callable[[State, Path], None]
    read: Callable[[Path], State]

    def save(self, state: State, place: Path, fsync: bool) -> Wait:
        path = place / "state"
        self.write(state, path)
        if fsync:
            with path.open("rb") as file:
                os.fsync(file)
            sync_directory(place)
        return lambda: None

    def load(self, place: Path, like: State) -> State:
        return self.read(place / "state")


@dataclass(frozen=True, slots=True)
class Swift(Format):
    """swift's own checkpoints. They are always durable, by contract."""

    sync: bool

    def save(self, state: State, place: Path, fsync: bool) -> Wait:
        store = CheckpointStore(place, 0, Reading())
        store.save(1, state, lambda _version: None, lambda _unsaved: None, sync=self.sync)
        return store.wait

    def load(self, place: Path, like: State) -> State:
        loaded: State = CheckpointStore(place, 0, Reading()).load(1)
        return loaded


@dataclass(frozen=True, slots=True)
class Dcp(Format):
    """torch.distributed.checkpoint, by one process alone."""

    asynchronous: bool

    def save(self, state: State, place: Path, fsync: bool) -> Wait:
        writer = FileSystemWriter(place, sync_files=fsync)
        with alone():
            if not self.asynchronous:
                save(state, storage_writer=writer, no_dist=True)
                return lambda: _sync_if(place, fsync)
            future: Any = async_save(state, storage_writer=writer, no_dist=True)

        def wait() -> None:
            future.result()
            _sync_if(place, fsync)

        return wait

    def load(self, place: Path, like: State) -> State:
        into: State = _blank(like)
        with _arrays_too():
            load_dcp(into, place)
        return into


def _sync_if(place: Path, fsync: bool) -> None:
    if fsync:
        sync_directory(place)


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
    "swift sync": Swift(sync=True, fsync=(True,)),
    "swift async": Swift(sync=False, fsync=(True,)),
    "dcp": Dcp(asynchronous=False),
    "dcp async": Dcp(asynchronous=True),
    "torch": OneFile(torch.save, _read_torch),
    "safetensors": OneFile(_write_safetensors, _read_safetensors),
    "npz": OneFile(_write_npz, _read_npz),
    "hdf5": OneFile(_write_hdf5, _read_hdf5),
}
