"""Saves that are killed before each of their operations on files, and what the next process finds.

    python -m tests.unit.checkpoint.crashing DIRECTORY [SABOTAGE]     one line of JSON for each case

Each case is a forked process that saves one version over older ones, and removes what is not needed any more. Before
its n-th operation it does to its files what the crash would do, and kills itself:

``killed``    nothing: the kernel has all that was written
``torn``      of a write, the first half is done
``data``      what was written and not synced is gone: these files are empty
``names``     what was made, renamed or removed in a folder that was not synced since then did not happen
``power``     both

SABOTAGE takes a part of the save away, to show that these cases find it. Nothing is really synced: what a crash would
leave is worked out here.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from swift_ft.errors import ServiceError
from swift_ft.state.checkpoint_store import CheckpointStore
from tests.unit.checkpoint.holding import Holding, unexpected

MODES = ("killed", "torn", "data", "names", "power")
SCENARIOS = ("new", "again")
"""The version is saved for the first time; or it is there from before a recovery, and is saved anew."""
SABOTAGES = ("no sync of files", "no sync of folders", "no name of its own")
_REAL = {name: getattr(os, name) for name in ("open", "write", "rename", "mkdir", "unlink", "rmdir")}


class Disk:
    """The operations of one process below `root`, and what of them would outlast a crash."""

    def __init__(self, root: Path, mode: str, at: int, tell: Callable[[str], None]) -> None:
        self._root, self._mode, self._at, self._tell = root, mode, at, tell
        self._number = 0
        self._grave = root.with_name("grave")
        self._unsynced: set[int] = set()  # files, by inode
        self._names: list[tuple[int, Callable[[Path], None]]] = []  # (folder's inode, how to take it back)

    def install(self) -> None:
        for name in (*_REAL, "fsync"):
            setattr(os, name, getattr(self, name))

    # --- the operations ---

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        there = _absolute(path, dir_fd)
        if not flags & os.O_CREAT or there.exists():
            return int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))
        self._count("open", there)
        file = int(_REAL["open"](path, flags, mode, dir_fd=dir_fd))
        self._unsynced.add(os.fstat(file).st_ino)
        self._made(there, lambda folder: _REAL["unlink"](folder / there.name))
        return file

    def write(self, file: int, data: Any) -> int:
        if not self._is_below(path := _path_of(file)):
            return int(_REAL["write"](file, data))
        if self._count("write", path, tears=True):
            _REAL["write"](file, bytes(data)[: len(data) // 2])
            self._die()
        self._unsynced.add(os.fstat(file).st_ino)
        return int(_REAL["write"](file, data))

    def fsync(self, file: int) -> None:
        self._count("fsync", _path_of(file))
        inode = os.fstat(file).st_ino
        self._unsynced.discard(inode)
        self._names = [(folder, back) for folder, back in self._names if folder != inode]

    def rename(self, source: Any, target: Any) -> None:
        old, new = Path(source), Path(target)
        self._count("rename", new)
        assert not new.exists(), "what it would replace is not kept here"
        _REAL["rename"](old, new)
        self._made(new, lambda folder: _REAL["rename"](folder / new.name, folder / old.name))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        there = Path(path)
        if there.exists() or not there.parent.exists():
            _REAL["mkdir"](path, mode)  # which fails
        self._count("mkdir", there)
        _REAL["mkdir"](path, mode)
        self._made(there, lambda folder: shutil.rmtree(folder / there.name))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._take_away("unlink", _absolute(path, dir_fd))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        there = _absolute(path, dir_fd)
        if there.is_dir() and not any(there.iterdir()):
            self._take_away("rmdir", there)
        else:
            _REAL["rmdir"](path, dir_fd=dir_fd)  # which fails

    def _take_away(self, operation: str, there: Path) -> None:
        """Put aside, so that it can come back."""
        self._count(operation, there)
        aside = self._grave / str(self._number)
        folder = there.parent.stat().st_ino
        _REAL["rename"](there, aside)
        self._names.append((folder, lambda parent: _REAL["rename"](aside, parent / there.name)))

    # --- the crash ---

    def _count(self, operation: str, path: Path, *, tears: bool = False) -> bool:
        """Does not return if this is the operation before which it comes. True: half of it is to be done."""
        if not self._is_below(path):
            return False
        number, self._number = self._number, self._number + 1
        self._tell(f"{operation} {path.relative_to(self._root)}")
        if number != self._at:
            return False
        if self._mode == "torn" and tears:
            return True
        self._die()
        return False

    def _die(self) -> None:
        if self._mode in ("data", "power"):
            for path in _files(self._root):
                if path.stat().st_ino in self._unsynced:
                    os.truncate(path, 0)
        if self._mode in ("names", "power"):
            for name in _REAL:
                setattr(os, name, _REAL[name])
            for inode, back in reversed(self._names):
                for folder in (self._root, *_folders(self._root)):
                    if folder.stat().st_ino == inode:
                        back(folder)
                        break
        os.kill(os.getpid(), signal.SIGKILL)

    def _made(self, there: Path, back: Callable[[Path], None]) -> None:
        self._names.append((there.parent.stat().st_ino, back))

    def _is_below(self, path: Path) -> bool:
        return path == self._root or self._root in path.parents


def _absolute(path: Any, dir_fd: int | None) -> Path:
    return Path(path) if dir_fd is None else _path_of(dir_fd) / os.fspath(path)


def _path_of(file: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{file}"))


def _files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def _folders(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_dir()]


# --- the cases ---


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(value)), "step": value, "b": torch.full((7,), value)}


def save(directory: Path, generation: int, version: int, value: int, tell: Callable[[int], None]) -> None:
    store = CheckpointStore(directory, 0, Holding(entered=generation))
    store.save(version, state(value), tell, unexpected)
    store.wait()
    store.close()


def prune(directory: Path, generation: int, *keep: int) -> None:
    CheckpointStore(directory, 0, Holding(entered=generation)).prune(set(keep))


def found(directory: Path, version: int) -> str:
    """The value that is loaded, why none is, or that it is of several."""
    try:
        loaded = CheckpointStore(directory, 0, Holding(entered=9)).load(version)
    except ServiceError as error:
        return f"refused: {error}"
    values = {*loaded["w"].tolist(), *loaded["b"].tolist(), loaded["step"]}
    return str(loaded["step"]) if len(values) == 1 else f"mixed: {sorted(values)}"


def prepare(directory: Path, scenario: str) -> None:
    """What is there before: versions 0 and 1; and 2, if that is saved again."""
    for version in range(3 if scenario == "again" else 2):
        save(directory, 1, version, version, lambda _version: None)


def victim(directory: Path, scenario: str, tell: Callable[[str], None]) -> None:
    generation, value = (2, 22) if scenario == "again" else (1, 2)
    save(directory, generation, 2, value, lambda version: tell(f"durable {version}"))
    prune(directory, generation, 1, 2)


def sabotage(kind: str) -> None:
    """(the victim)"""
    synced = os.fsync
    if kind == "no name of its own":
        shard_name = Path.with_name
        Path.with_name = lambda self, name: shard_name(self, name.removeprefix("."))  # type: ignore[method-assign]
        Path.rename = lambda self, _target: self  # type: ignore[method-assign, assignment]
    elif kind:
        files = kind == "no sync of files"
        os.fsync = lambda file: None if files == _path_of(file).is_file() else synced(file)


def case(base: Path, scenario: str, mode: str, at: int, sabotaged: str) -> dict[str, Any]:
    """What one of them has told, and what is found after it. `at` < 0: it is not killed."""
    shutil.rmtree(base, ignore_errors=True)
    directory = base / "job"
    (base / "grave").mkdir(parents=True)
    shutil.copytree(base.with_name(f"before {scenario}"), directory)
    reading, writing = os.pipe()
    if not (child := os.fork()):

        def tell(said: str) -> None:
            _REAL["write"](writing, f"{said}\n".encode())

        with suppress(BaseException):
            Disk(directory, mode, at, tell).install()
            sabotage(sabotaged)
            victim(directory, scenario, tell)
            os._exit(0)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read().splitlines()
    _, status = os.waitpid(child, 0)
    result = {
        "scenario": scenario,
        "mode": mode,
        "at": at,
        "ended": os.waitstatus_to_exitcode(status),
        "told": told,
        "found": {str(version): found(directory, version) for version in (1, 2)},
    }
    for version in (2, 3):
        save(directory, 3, version, 10 * version, lambda _version: None)
    prune(directory, 3, 2, 3)
    again = {str(version): found(directory, version) for version in (2, 3)}
    return {
        **result,
        "again": again,
        "left": sorted(str(p.relative_to(directory)) for p in _files(directory)),
    }


def cases(base: Path, sabotaged: str) -> Iterator[dict[str, Any]]:
    modes = ("killed", "power") if sabotaged else MODES
    for scenario in SCENARIOS:
        prepare(base.with_name(f"before {scenario}"), scenario)
        whole = case(base, scenario, "killed", -1, "")
        yield whole
        operations = [said for said in whole["told"] if not said.startswith("durable")]
        for at, operation in enumerate(operations):
            for mode in modes:
                if mode != "torn" or operation.startswith("write"):
                    yield case(base, scenario, mode, at, sabotaged)


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda _file: None
    for result in cases(Path(sys.argv[1]).resolve() / "crashes", *(sys.argv[2:] or [""])):
        print(json.dumps(result), flush=True)
