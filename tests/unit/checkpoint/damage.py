"""What can become of a rank's checkpoint on a disk, and what is said of it then."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from swift_ft.state.checkpoint_file import DATA, INDEX


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = _shard(folder) / name
        os.truncate(path, int(path.stat().st_size * share))

    return damage


def _flip(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = _shard(folder) / name
        content = bytearray(path.read_bytes())
        content[len(content) * 2 // 3] ^= 4
        path.write_bytes(content)

    return damage


def _replace(name: str, by: Callable[[Path], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = _shard(folder) / name
        path.unlink()
        by(path)

    return damage


def _link(path: Path) -> None:
    path.symlink_to("/dev/null")


def _link_folder(folder: Path) -> None:
    aside = folder.with_name(f"aside-{folder.name}")
    folder.rename(aside)
    folder.symlink_to(aside, target_is_directory=True)


def _empty_newer(folder: Path) -> None:
    """A newer one is there by its name, and there is nothing in it."""
    whole = _shard(folder)
    newer = folder / f"{whole.name.partition('-')[0]}-00000000-1"
    newer.mkdir()
    later = whole.stat().st_mtime_ns + 10**9  # clocks of file systems are coarse
    os.utime(newer, ns=(later, later))


def _shard(folder: Path) -> Path:
    (shard,) = folder.glob("g*")
    return shard


DAMAGES: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "index cut": (_cut(INDEX, 0.5), "is corrupt: the index is not what its checksum says"),
    "index empty": (_cut(INDEX, 0), "is corrupt: the index has no first line"),
    "bit in the index": (_flip(INDEX), "is corrupt: "),
    "no index": (_replace(INDEX, lambda _path: None), "is not whole: No such file"),
    "index is a folder": (_replace(INDEX, Path.mkdir), f"is corrupt: {INDEX} is no file"),
    "index is a pipe": (_replace(INDEX, os.mkfifo), f"is corrupt: {INDEX} is no file"),
    "index is a link": (_replace(INDEX, _link), "is not whole: Too many levels of symbolic links"),
    "tensors cut": (_cut(DATA, 0.5), rf"is corrupt: {DATA} has \d+ bytes instead of \d+"),
    "tensors empty": (_cut(DATA, 0), rf"is corrupt: {DATA} has 0 bytes instead of \d+"),
    "bit in the tensors": (_flip(DATA), "is corrupt: tensor '.*' is not what its checksum says"),
    "no tensors": (_replace(DATA, lambda _path: None), "is not whole: No such file"),
    "tensors are a folder": (_replace(DATA, Path.mkdir), f"is corrupt: {DATA} is no file"),
    "tensors are a pipe": (_replace(DATA, os.mkfifo), f"is corrupt: {DATA} is no file"),
    "tensors are a link": (_replace(DATA, _link), "is not whole: Too many levels of symbolic links"),
    "no folder of the rank": (shutil.rmtree, "is not whole: there is nothing in it"),
    "folder is a link": (_link_folder, "is a link; nothing is read through it"),
    "newer and empty": (_empty_newer, "is not whole: No such file"),
}
"""name -> (what is done to a rank's folder of a version, what is said of it, as a pattern). See `unreadable` too."""


def unreadable(folder: Path) -> None:
    """For anybody but root."""
    for path in _shard(folder).iterdir():
        path.chmod(0)
