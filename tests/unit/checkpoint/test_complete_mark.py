"""Which checkpoints a job without a coordinator's word may go on from."""

import os
from pathlib import Path

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.state import complete_mark
from swift_ft.state.checkpoint_place import MARK, DirectoryPlace
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.text import version_folder
from tests.unit.checkpoint.holding import Holding

CONFIG = {"replicas": "2", "seed": "5"}


def mark(directory: Path, version: int, generation: int = 3, **view: object) -> Path:
    shard = directory / version_folder(version) / "rank0" / f"g{generation}-0123abcd-1"
    shard.mkdir(parents=True, exist_ok=True)
    said = pb.View(job=directory.name, generation=generation, world_size=4, **view)  # type: ignore[arg-type]
    DirectoryPlace(directory).mark(version, complete_mark.mark_of(version, said, CONFIG))
    return directory / version_folder(version) / MARK


def find(own: Path, given: object = "") -> pb.Found:
    return complete_mark.find(DirectoryPlace(own), str(given), 0)


def place_of(own: Path, given: object, version: int) -> str | None:
    place = complete_mark.place_of(DirectoryPlace(own), str(given), version)
    return None if place is None else place.where


def test_the_newest_marked_versions_are_found_with_what_they_depend_on(tmp_path: Path) -> None:
    own = tmp_path / "j"
    assert find(own) == pb.Found()
    mark(own, 0)
    mark(own, 5)
    mark(own, 10, generation=4, inexact_since=7, inexact_reason="an undo")
    (own / version_folder(15) / "rank0" / "g9-0123abcd-1").mkdir(parents=True)
    found = find(own)
    assert found == pb.Found(
        versions=[5, 10],
        generation=9,
        world_size=4,
        config={"replicas": "2"},
        inexact_since=7,
        inexact_reason="an undo",
        place=str(own),
    )
    assert place_of(own, "", 10) == str(own)
    assert place_of(own, "", 15) is None


def test_a_mark_is_whole_after_a_power_cut_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    synced: list[str | bytes] = []

    def noted(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        synced.append(path.name if path.is_dir() else path.read_bytes())
        assert path.is_dir() == (tmp_path / "j" / version_folder(5) / MARK).exists(), (
            "it has its name too soon"
        )
        real(file)

    monkeypatch.setattr(os, "fsync", noted)
    path = mark(tmp_path / "j", 5)
    assert synced == [path.read_bytes(), path.parent.name]


@pytest.mark.parametrize("named", ["", "j"])
def test_another_directory_may_have_a_newer_one(tmp_path: Path, named: str) -> None:
    own, other = tmp_path / "new" / "j", tmp_path / "old" / "j"
    mark(own, 5, generation=7)
    mark(other, 10)
    found = find(own, tmp_path / "old" / named)
    assert (list(found.versions), found.place, found.generation) == ([10], str(other), 7)
    assert place_of(own, tmp_path / "old" / named, 5) == str(own)


@pytest.mark.parametrize(
    "what", ["a flipped digit", "half of it", "nothing", "of another version", "no object"]
)
def test_a_damaged_mark_counts_for_nothing_and_is_named(tmp_path: Path, what: str) -> None:
    own = tmp_path / "j"
    mark(own, 5)
    newest = mark(own, 10)
    content = newest.read_text()
    other = mark(own, 20).read_text()
    (own / version_folder(20) / MARK).unlink()
    newest.write_text(
        {
            "a flipped digit": content.replace('"generation": 3', '"generation": 4'),
            "half of it": content[: len(content) // 2],
            "nothing": "",
            "of another version": other,
            "no object": "[]",
        }[what]
    )
    found = find(own)
    assert list(found.versions) == [5]
    assert f"the mark of version 10 in {own}" in found.problem


def test_a_directory_of_another_job_names_it(tmp_path: Path) -> None:
    mark(tmp_path / "a", 5)
    assert find(tmp_path / "j", tmp_path) == pb.Found()
    found = find(tmp_path / "j", tmp_path / "a")
    assert found.problem == f"{tmp_path / 'a'} has checkpoints of job a: say --job a"


def test_a_mark_goes_before_the_first_shard_of_its_version(tmp_path: Path) -> None:
    own = tmp_path / "j"
    marks = {version: mark(own, version) for version in (5, 10, 15, 20)}
    store = CheckpointStore(own, 0, Holding(entered=3))
    store.prune({10, 15})
    assert [version for version, path in marks.items() if path.exists()] == [10, 15, 20]
    store.unmark(10)
    assert [version for version, path in marks.items() if path.exists()] == [10]
    CheckpointStore(own, 0, Holding(entered=4)).set_aside(lambda: None, above=10)
    assert [path.parent.name for path in own.glob("v*/rank0")] == [version_folder(10)]
