"""A disk in memory behind the storage's `Disk` seam: what a crash leaves of its files, and how it fails.

A killed process loses nothing that it wrote. A power cut keeps what was synced; of what came later, in each file, it
keeps a part: as a rule the first writes up to any byte, now and then any of the blocks. A name whose directory was not
synced may be there or not. A crash may come before any operation (`crash_in`). Space runs out, syncs fail, bytes rot.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from swift_ft.log.segment import BLOCK_BYTES
from swift_ft_services.logserver.shared_memory import Part
from tests.sim.kernel import Kernel

ROOT = Path("/log")


class PowerCut(BaseException):
    """The machine or the process is gone. Nothing catches it but the world."""


class SimFile:
    """An inode, and any descriptor of it."""

    def __init__(self, disk: "SimDisk", path: str) -> None:
        self._disk = disk
        self.path = path
        self.content = bytearray()
        self._safe: bytes | None = None
        """What a power cut leaves for certain; None: all of it."""
        self._unsynced: list[tuple[int, bytes | None]] = []
        """(offset, bytes written), or (size, None) for a new size."""
        self._partial = False  # one of them ended within a block

    @property
    def size(self) -> int:
        return len(self.content)

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self.content[offset : offset + size])

    def read_into(self, offset: int, buffer: memoryview) -> int:
        found = self.content[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def write(self, offset: int, parts: Sequence[Part]) -> bytes:
        data = b"".join(map(bytes, parts))
        assert offset % BLOCK_BYTES == 0
        assert len(data) % BLOCK_BYTES == 0
        self._disk.step()
        if self._disk.no_space_for(self.path):
            data = data[: self._disk.kernel.random.randrange(len(data))]
            self._change(offset, data)
            self._partial = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._change(offset, data)
        return data[-BLOCK_BYTES:]

    def reserve(self, size: int) -> None:
        if self._disk.no_space_for(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def resize(self, size: int) -> None:
        self._disk.step()
        self._change(size, None)

    def sync(self) -> None:
        self._disk.step()
        if self._disk.failing:
            self._disk.kernel.count("sync failed")
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self._safe = None
        self._unsynced.clear()
        self._partial = False

    def note(self, offset: int, data: bytes) -> None:
        if self._disk.no_space_for(self.path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._change(offset, data)

    def close(self) -> None:
        pass

    def _change(self, offset: int, data: bytes | None) -> None:
        if self._safe is None:
            self._safe = bytes(self.content)
        self._unsynced.append((offset, data))
        _apply(self.content, offset, data)

    def power_cut(self) -> str:
        """What became of the writes that were not synced; empty: there were none."""
        if self._safe is None:
            return ""
        chance = self._disk.kernel.random
        content = bytearray(self._safe)
        fate = "torn within a block" if self._partial else "kept"
        if chance.random() < 0.1:
            fate = "any of its blocks"
            for offset, data in self._unsynced:
                if data is None:
                    _apply(content, offset, None)
                    continue
                for at in range(0, len(data), BLOCK_BYTES):
                    if chance.random() < 0.5:
                        _apply(content, offset + at, data[at : at + BLOCK_BYTES])
        else:
            for offset, data in self._unsynced[: chance.randint(0, len(self._unsynced))]:
                _apply(content, offset, data)
            left = self._unsynced[-1]
            if chance.random() < 0.7 and left[1]:
                fate = "torn"
                # Most of a block is padding, or was there before: torn is what matters.
                was, filled = content[left[0] :], left[1].rstrip(b"\0")
                same = next(
                    (at for at, (a, b) in enumerate(zip(was, filled)) if a != b), min(len(was), len(filled))
                )
                tear = chance.randint(min(same, len(filled)), len(filled))
                _apply(content, left[0], left[1][:tear])
                if tear % BLOCK_BYTES and tear < len(filled):
                    # What was written there before, zeros as a rule, is behind it: not a short file.
                    fate = "torn within a block"
        self.content = content
        self._safe = None
        self._unsynced.clear()
        return fate

    def rot(self, at: int) -> None:
        self.content[at] ^= 0x41
        if self._safe is not None and at < len(self._safe):
            safe = bytearray(self._safe)
            safe[at] ^= 0x41
            self._safe = bytes(safe)


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
    else:
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + len(data)] = data


class SimDisk:
    """A `Disk` that outlives the servers that use it."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.full = False
        self.failing = False
        self.crash_in = -1
        """So many operations until the process is gone; negative: it is not."""
        self._uids = 0
        self._folders: dict[str, dict[str, SimFile | None]] = {str(ROOT): {}}
        """directory -> name -> its file, None for a directory"""
        self._safe: dict[str, dict[str, SimFile | None]] = {}
        """Of directories that were changed since they were synced: what they were then."""
        self._moved: list[tuple[Path, Path]] = []
        """Directories that have another name, which is not synced."""

    def step(self) -> None:
        if self.crash_in >= 0:
            if self.crash_in == 0:
                self.crash_in = -1
                raise PowerCut
            self.crash_in -= 1

    def no_space_for(self, path: str) -> bool:
        """A manifest fits where the reserve was given up."""
        if not self.full:
            return False
        small = path.endswith(".manifest.new") or ".granted-" in path
        return not (small and ".reserve" not in self._folders[str(ROOT)])

    def new_uid(self) -> bytes:
        self._uids += 1
        return self._uids.to_bytes(16, "big")

    def free_bytes(self) -> int:
        return 0 if self.full else 1 << 30

    # -- Disk -----------------------------------------------------------------------------------------

    def names(self, path: Path) -> list[tuple[str, bool]]:
        return sorted((name, file is None) for name, file in self._folders.get(str(path), {}).items())

    def make_directory(self, path: Path) -> None:
        if str(path) not in self._folders:
            self.step()
            self._folders[str(path)] = {}
            self._folders[str(path.parent)][path.name] = None
            if str(path.parent) in self._safe:
                self._safe[str(path.parent)][path.name] = None

    def create(self, path: Path) -> SimFile:
        self.step()
        folder = self._changed(path)
        if path.name in folder:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        file = SimFile(self, str(path))
        folder[path.name] = file
        return file

    def descriptor(self, path: Path) -> int:
        raise OSError("the simulation lends no files")

    def open(self, path: Path) -> SimFile:
        file = self._folders.get(str(path.parent), {}).get(path.name)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file

    def sync_names(self, path: Path) -> None:
        self.step()
        self._safe.pop(str(path), None)
        self._moved = [(old, new) for old, new in self._moved if new.parent != path]

    def rename(self, path: Path, target: Path) -> None:
        self.step()
        if str(path) in self._folders:
            self._move_folder(path, target)
            self._moved.append((path, target))
            return
        folder = self._changed(path)
        file = folder.pop(path.name, None)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        file.path = str(target)
        folder[target.name] = file

    def remove(self, path: Path) -> None:
        self.step()
        if path.name in self._folders.get(str(path.parent), {}):
            del self._changed(path)[path.name]
            if path.suffix == ".seg":
                self.kernel.count("segment removed")
                self.full = self.full and self.kernel.chance(0.5)

    def remove_tree(self, path: Path) -> None:
        for name, is_dir in self.names(path):
            if is_dir:
                self.remove_tree(path / name)
            else:
                self.remove(path / name)
        self.step()
        for kept in (self._folders, self._safe):
            kept.pop(str(path), None)
            kept.get(str(path.parent), {}).pop(path.name, None)

    def close(self) -> None:
        pass

    def _move_folder(self, path: Path, target: Path) -> None:
        for kept in (self._folders, self._safe):
            for old in [old for old in kept if Path(old).is_relative_to(path)]:
                kept[str(target / Path(old).relative_to(path))] = kept.pop(old)
            names = kept.get(str(path.parent), {})
            if path.name in names:
                names[target.name] = names.pop(path.name)

    def _changed(self, path: Path) -> dict[str, SimFile | None]:
        parent = str(path.parent)
        folder = self._folders[parent]
        if parent not in self._safe:
            self._safe[parent] = dict(folder)
        return folder

    # -- faults ---------------------------------------------------------------------------------------

    def power_cut(self) -> tuple[set[str], set[str]]:
        """The streams that lost something not synced, and those of which what is left may look damaged."""
        chance = self.kernel.random
        moved, self._moved = self._moved, []
        for old, new in reversed(moved):
            if str(new) in self._folders and chance.random() < 0.5:
                self.kernel.count("name lost or back after a power cut")
                self._move_folder(new, old)
        for parent, safe in self._safe.items():
            now = self._folders[parent]
            for name in sorted({*safe, *now}):
                if safe.get(name) is not now.get(name) and chance.random() < 0.5:
                    self.kernel.count("name lost or back after a power cut")
                    if safe.get(name) is None:
                        now.pop(name)
                    else:
                        now[name] = safe[name]
        self._safe.clear()
        lost, shuffled = set(), set()
        for parent, folder in self._folders.items():
            for file in folder.values():
                fate = file.power_cut() if file is not None else ""
                if fate:
                    self.kernel.count(f"unsynced writes: {fate}")
                    lost.add(Path(parent).name)
                    if fate in ("any of its blocks", "torn within a block"):
                        shuffled.add(Path(parent).name)
        return lost, shuffled

    def rot(self) -> str:
        """A byte of a random segment is another one now. The stream; empty: there is no segment."""
        segments = [
            (Path(parent).name, file)
            for parent, folder in self._folders.items()
            for name, file in sorted(folder.items())
            if file is not None and name.endswith(".seg") and file.content
        ]
        if not segments:
            return ""
        stream, file = self.kernel.random.choice(segments)
        filled = len(file.content.rstrip(b"\0"))
        at = self.kernel.random.randrange(max(1, filled))
        file.rot(at)
        self.kernel.count("byte damaged")
        self.kernel.note("{}: byte {} of {} rots", self.name, at, file.path)
        return stream
