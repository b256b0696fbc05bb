"""Damage to a stopped log server's files, by seed: what bad disks, backups and people do to them."""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from swift_ft.log.directory import NAME as ACKED
from swift_ft.log.segment import BLOCK_BYTES, SUFFIX, walk

OLDER, ELSEWHERE = "older", "elsewhere"


@dataclass
class Scene:
    """A directory that may be spoiled, an older copy of it, and another server's."""

    directory: Path
    older: Path
    elsewhere: Path
    draw: random.Random
    did: list[str] = field(default_factory=list)
    touched: set[str] = field(default_factory=set)
    """Paths, as in the directory."""
    overlaps: bool = False
    """A file was put in that begins with a record which another one has, or has one which another one begins with."""

    def files(self, root: Path | None = None) -> list[Path]:
        root = root or self.directory
        return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())

    def pick(self) -> Path:
        """Segments mostly: they are most of what there is."""
        found = self.files()
        small = [path for path in found if path.suffix != SUFFIX]
        return self.draw.choice(small if small and self.draw.random() < 0.4 else found)

    def say(self, what: str, *paths: Path) -> None:
        names = [str(path.relative_to(self.directory)) for path in paths]
        self.did.append(f"{what} {' '.join(names)}")
        self.touched.update(names)

    def touches(self, job: str) -> bool:
        return any(name.split("/")[0] in (job, f".granted-{job}") for name in self.touched)

    @property
    def acked_is_spoiled(self) -> bool:
        return any(name.split("/")[0] == ACKED for name in self.touched)


def flip(scene: Scene) -> None:
    path = scene.pick()
    data = bytearray(path.read_bytes())
    if data:
        for _ in range(scene.draw.choice([1, 1, 1, 8])):
            data[scene.draw.randrange(len(data))] ^= 1 << scene.draw.randrange(8)
        path.write_bytes(data)
        scene.say("flip", path)


def cut(scene: Scene) -> None:
    path = scene.pick()
    size = path.stat().st_size
    os.truncate(path, scene.draw.choice([0, size // 2, max(0, size - 1), scene.draw.randrange(size + 1)]))
    scene.say("cut", path)


def cut_on_a_boundary(scene: Scene) -> None:
    path = scene.draw.choice([path for path in scene.files() if path.suffix == SUFFIX])
    records = walk(path).records
    if records:
        os.truncate(path, scene.draw.choice(records).offset)
        scene.say("cut on a boundary", path)


def extend(scene: Scene) -> None:
    path = scene.pick()
    data = path.read_bytes()
    count = scene.draw.choice([1, 100, 5000, 70_000])
    more = scene.draw.choice([bytes(count), scene.draw.randbytes(count), data[-count:], data])
    path.write_bytes(data + more)
    scene.say("extend", path)


def swap(scene: Scene) -> None:
    one, other = scene.pick(), scene.pick()
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)
    scene.say("swap", one, other)


def swap_blocks(scene: Scene) -> None:
    path = scene.pick()
    data = path.read_bytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    if len(blocks) > 2:
        one, other = scene.draw.sample(range(len(blocks) - 1), 2)
        blocks[one], blocks[other] = blocks[other], blocks[one]
        path.write_bytes(b"".join(blocks))
        scene.say("swap blocks", path)


def lose_a_block(scene: Scene) -> None:
    path = scene.pick()
    data = path.read_bytes()
    at = scene.draw.randrange(0, len(data) + 1, BLOCK_BYTES)
    lost = scene.draw.choice([b"", bytes(BLOCK_BYTES)])
    path.write_bytes(data[:at] + lost + data[at + BLOCK_BYTES :])
    scene.say("lose a block", path)


def duplicate(scene: Scene) -> None:
    path, near = scene.pick(), scene.pick()
    number = scene.draw.choice([0, 1, 7, 15, 16, 100, (1 << 62) - 1, (1 << 62) + 1, 10**20 - 1])
    name = scene.draw.choice([path.name, f"{number:020d}{SUFFIX}", f"{path.name}.new", "readme.txt"])
    target = near.parent / name
    if target != path and not target.is_dir():
        _copy_over(path, target)
        scene.say("duplicate", path, target)
        scene.overlaps = True
        scene.touched.discard(str(path.relative_to(scene.directory)))


def _copy_over(path: Path, target: Path) -> None:
    """Something else may have been put in its place: a link, which leads out of the directory, or a pipe."""
    if target.is_symlink() or not target.is_file():
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    shutil.copyfile(path, target)


def copy_of(kind: str) -> Callable[[Scene], None]:
    def copy(scene: Scene) -> None:
        root = scene.older if kind == OLDER else scene.elsewhere
        path = scene.draw.choice(scene.files(root))
        target = scene.directory / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == SUFFIX:  # another server's segments are cut at other records
            plain = target.is_file() and not target.is_symlink()
            scene.overlaps |= not plain or walk(target).end != walk(path).end
        _copy_over(path, target)
        scene.say(f"copy, {kind},", target)

    return copy


def copy_a_job(scene: Scene) -> None:
    """All of its directory, from before or from another server; or under another name."""
    folders = sorted(path for path in scene.directory.iterdir() if path.is_dir())
    folder = scene.draw.choice(folders)
    source = scene.draw.choice([scene.older, scene.elsewhere]) / folder.name
    if scene.draw.random() < 0.3:
        source = scene.draw.choice(folders)
    aside = scene.directory.with_name("aside")
    if source.is_dir():
        shutil.copytree(source, aside)
        shutil.rmtree(folder)
        aside.rename(folder)
        scene.say("copy a job", folder)


def lose(scene: Scene) -> None:
    path = scene.pick()
    path.unlink()
    scene.say("lose", path)


def lose_a_folder(scene: Scene) -> None:
    folder = scene.draw.choice(sorted(path for path in scene.directory.rglob("*") if path.is_dir()))
    shutil.rmtree(folder)
    scene.say("lose a folder", folder)


def swap_folders(scene: Scene) -> None:
    folders = sorted(path for path in scene.directory.rglob("*") if path.is_dir())
    one, other = scene.draw.sample(folders, 2)
    if one in other.parents or other in one.parents:
        return
    aside = scene.directory.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)
    scene.say("swap folders", one, other)


def put_in_its_place(scene: Scene) -> None:
    path = scene.pick()
    path.unlink()
    kind = scene.draw.choice(["directory", "link", "pipe", "dangling"])
    match kind:
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(scene.older / path.relative_to(scene.directory))
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to("nowhere")
    scene.say(f"a {kind} in place of", path)


def change_mode(scene: Scene) -> None:
    path = scene.pick()
    path.chmod(scene.draw.choice([0, 0o200, 0o400, 0o444, 0o666, 0o777]))
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    scene.say("change the mode of", path)


DAMAGES: Sequence[Callable[[Scene], None]] = (
    *(flip, flip, cut, cut_on_a_boundary, cut_on_a_boundary, extend, swap, swap_blocks, lose_a_block),
    *(duplicate, copy_of(OLDER), copy_of(OLDER), copy_of(ELSEWHERE), copy_a_job, lose, lose_a_folder),
    *(swap_folders, put_in_its_place, change_mode),
)


def spoil(scene: Scene) -> None:
    """One to three things."""
    for damage in _drawn(scene.draw):
        if scene.files():
            damage(scene)


def _drawn(draw: random.Random) -> Iterator[Callable[[Scene], None]]:
    for _ in range(draw.choice([1, 1, 2, 3])):
        yield draw.choice(DAMAGES)
