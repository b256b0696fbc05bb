"""Directories of `torch.distributed.checkpoint` (DCP), read without running anything that they say.

DCP's index, the file ``.metadata``, is a pickle, and torch unpickles whatever is in it. Here it may name DCP's own data
classes and nothing else, and it may change nothing but the data that it makes. All that is in its other files goes
through torch's `weights_only` unpickler. Files are those of the directory itself.
"""

import io
import os
import pickle
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from swift.errors import UsageError

METADATA = ".metadata"
METADATA_BYTES_MAX = 256 << 20


def _size(*values: Any) -> torch.Size:
    return torch.Size(*values)


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise pickle.UnpicklingError(f"the layout {name[:40]!r}")
    return torch.strided


_DATA = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    filesystem._StorageInfo,
)
"""What is made of the file, and belongs to whoever loads it alone."""
_NAMED: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        **{(cls.__module__, cls.__qualname__): cls for cls in (*_DATA, metadata._MEM_FORMAT_ENCODING)},
        **{
            ("torch", str(dtype).removeprefix("torch.")): dtype
            for dtype in vars(torch).values()
            if isinstance(dtype, torch.dtype)
        },
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): _layout,
        # The directory in which it was written; nothing is done with it.
        ("pathlib", "PosixPath"): PurePath,
        ("pathlib", "WindowsPath"): PurePath,
        ("pathlib._local", "PosixPath"): PurePath,
        ("pathlib._local", "WindowsPath"): PurePath,
    }
)


class _Unpickler(pickle._Unpickler):
    """Finds what DCP names, and gives attributes to DCP's data alone. What was found is the process's own: if the file
    gave attributes to a class, the class would have them everywhere. (pickle's in Python; that in C lets nobody look.)
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _NAMED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}") from None

    def load_build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if type(target) not in _DATA:
            raise pickle.UnpicklingError(f"it gives attributes to {str(target)[:80]}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class Reader(filesystem.FileSystemReader):
    """Of a directory that DCP has written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Raises UsageError: it is none of DCP's, or says what DCP does not say."""
        path = Path(self.path) / METADATA
        try:
            with path.open("rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UsageError(f"{path} is no file")
                content = file.read(METADATA_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(
                f"{path}: {error.strerror}; name a directory that torch.distributed.checkpoint has written"
            ) from None
        if len(content) > METADATA_BYTES_MAX:
            raise UsageError(f"{path} has more than {METADATA_BYTES_MAX} bytes")
        found = _unpickled(content, path)
        for info in found.storage_data.values():
            name = getattr(info, "relative_path", None)
            if not isinstance(name, str) or not _is_plain(name) or (path.parent / name).is_symlink():
                raise UsageError(f"{path} names a file outside of its directory: {str(name)[:80]!r}")
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and Path(name).name == name


def _unpickled(content: bytes, path: Path) -> metadata.Metadata:
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  (whatever a stranger's bytes lead to)
        why = " ".join(str(error).split())[:200]
        raise UsageError(f"{path} is not what torch.distributed.checkpoint writes: {why}") from None
    if not isinstance(found, metadata.Metadata) or not isinstance(getattr(found, "storage_data", None), dict):
        raise UsageError(f"{path} is not what torch.distributed.checkpoint writes for a directory of files")
    return found


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)  # what torch unpickles next is ours
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_dcp(state_dict: dict[str, Any], directory: str | os.PathLike[str]) -> None:
    """Loads into `state_dict` what `torch.distributed.checkpoint.save` has written, as its `load` does, but in this
    process alone (also beside a session), and without unpickling anything but tensors and plain values.

    (a trainer, before its first step) For a run that was begun without swift-ft. `state_dict`: nested dicts whose
    tensors are filled in place, each DTensor with its shard; other values are replaced. Raises UsageError: the
    directory is none of DCP's, lacks a key, or holds what is neither tensor nor plain.
    """
    reader = Reader(directory)
    reader.read_metadata()
    try:
        with alone():
            load(state_dict, storage_reader=reader, planner=_Planner(), no_dist=True)
    except CheckpointException as error:  # no Exception
        why = "; ".join(str(cause) for cause, _trace in error.failures.values())
        raise UsageError(f"{os.fspath(directory)} cannot be loaded: {' '.join(why.split())[:300]}") from error


@contextmanager
def alone() -> Iterator[None]:
    """torch warns whoever loads or saves in one process, even those who ask for it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
