"""A version that cannot be written: tried again, given up for a newer one, and nothing half-written stays."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from swift_ft.errors import ServiceError
from swift_ft.state import checkpoint_place, checkpoint_store
from swift_ft.state.checkpoint_store import CheckpointStore, Unsaved
from tests.unit.checkpoint.holding import Holding, saved, unexpected

_PATIENCE_S = 30.0
STATE = {"x": torch.arange(1 << 12)}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "_RETRY_FIRST_S", 0.01)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    one = CheckpointStore(tmp_path, 0, Holding())
    yield one
    one.close()


class Told:
    """What a store has said."""

    def __init__(self) -> None:
        self.durable: list[int] = []
        self.failed: list[Unsaved] = []
        self._changed = threading.Condition()

    def is_durable(self, version: int) -> None:
        with self._changed:
            self.durable.append(version)
            self._changed.notify_all()

    def has_failed(self, unsaved: Unsaved) -> None:
        with self._changed:
            self.failed.append(unsaved)
            self._changed.notify_all()

    def until_durable(self, *versions: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.durable == list(versions), _PATIENCE_S)

    def save(self, store: CheckpointStore, version: int) -> None:
        store.save(version, STATE, self.is_durable, self.has_failed)


def in_the_way(directory: Path, version: int) -> Path:
    """A file where the version's folder would be."""
    path = directory / f"v{version:08d}"
    path.write_text("")
    return path


def test_it_is_told_again_until_somebody_hears_it_or_a_newer_one_is_saved(store: CheckpointStore) -> None:
    told: list[int] = []
    again = threading.Event()

    def nobody_hears(version: int) -> bool:
        told.append(version)
        if len(told) == 3:
            again.set()
        return False

    store.save(1, STATE, nobody_hears, unexpected)
    assert again.wait(_PATIENCE_S)
    store.save(2, STATE, lambda version: told.append(version) or len(told) % 2 == 0, unexpected)  # type: ignore[func-returns-value]
    store.wait_saved()
    assert told[:3] == [1, 1, 1]
    assert set(told[told.index(2) :]) == {2}
    assert len(told) % 2 == 0
    store.wait()


def test_it_is_tried_again_until_it_can_be_written(tmp_path: Path, store: CheckpointStore) -> None:
    told = Told()
    blocked = in_the_way(tmp_path, 1)
    told.save(store, 1)
    store.wait_saved()
    assert store.unsaved == told.failed[0]
    assert (told.failed[0].version, told.durable) == (1, [])
    assert str(blocked) in told.failed[0].reason
    blocked.unlink()
    told.until_durable(1)
    assert store.unsaved is None
    assert len(told.failed) == 1, "said once, however often it was tried"
    assert torch.equal(store.load(1)["x"], STATE["x"])


def test_whoever_waits_goes_on_when_it_is_durable_and_does_not_wait_for_who_hears_it(
    tmp_path: Path, store: CheckpointStore
) -> None:
    heard = threading.Event()
    store.save(1, STATE, lambda _version: heard.wait(_PATIENCE_S), unexpected, sync=True)
    assert torch.equal(CheckpointStore(tmp_path, 0, Holding()).load(1)["x"], STATE["x"])
    heard.set()
    store.wait()
    assert store.saved is not None
    assert store.saved.stall_s == store.saved.seconds


def test_whoever_waits_is_not_held_up_by_what_cannot_be_written(
    tmp_path: Path, store: CheckpointStore
) -> None:
    told = Told()
    blocked = in_the_way(tmp_path, 1)
    store.save(1, STATE, told.is_durable, told.has_failed, sync=True)
    assert [unsaved.version for unsaved in told.failed] == [1]
    blocked.unlink()
    told.until_durable(1)


def test_the_snapshot_that_is_written_late_is_the_one_that_was_taken(
    tmp_path: Path, store: CheckpointStore
) -> None:
    told, state = Told(), {"x": torch.ones(8)}
    blocked = in_the_way(tmp_path, 1)
    store.save(1, state, told.is_durable, told.has_failed)
    store.wait_saved()
    state["x"].zero_()
    blocked.unlink()
    told.until_durable(1)
    assert torch.equal(store.load(1)["x"], torch.ones(8))


def test_a_newer_one_takes_its_place(tmp_path: Path, store: CheckpointStore) -> None:
    told = Told()
    blocked = in_the_way(tmp_path, 1)
    told.save(store, 1)
    store.wait_saved()
    told.save(store, 2)
    store.wait()
    blocked.unlink()
    assert store.unsaved is None
    told.save(store, 3)
    store.wait()
    assert told.durable == [2, 3]
    assert not blocked.exists()


def test_whoever_needs_it_hears_of_the_first_failure_and_it_is_not_tried_again(
    tmp_path: Path, store: CheckpointStore
) -> None:
    told = Told()
    blocked = in_the_way(tmp_path, 1)
    told.save(store, 1)
    with pytest.raises(ServiceError, match=f"was not written: .*{blocked}"):
        store.wait()
    assert [thread for thread in threading.enumerate() if thread.name == "swift-checkpoint"] == []
    assert told.durable == []


def test_whoever_is_fenced_leaves_it_to_his_heir(tmp_path: Path) -> None:
    told, store = Told(), CheckpointStore(tmp_path, 0, Holding(fenced=True))
    in_the_way(tmp_path, 1)
    told.save(store, 1)
    store.wait_saved()
    for thread in threading.enumerate():
        if thread.name == "swift-checkpoint":
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()
    assert told.durable == []


def test_whoever_loads_gives_up_what_was_not_written(tmp_path: Path, store: CheckpointStore) -> None:
    told = Told()
    told.save(store, 1)
    store.wait()
    blocked = in_the_way(tmp_path, 2)
    told.save(store, 2)
    store.wait_saved()
    store.load(1)
    assert store.unsaved is None
    blocked.unlink()
    assert [thread for thread in threading.enumerate() if thread.name == "swift-checkpoint"] == []
    assert told.durable == [1]


@pytest.mark.parametrize(
    "fails_at",
    [(checkpoint_store, "write_shard"), (checkpoint_place, "sync_directory")],
    ids=lambda at: at[1],
)
def test_nothing_of_it_stays_and_what_was_there_of_that_version_does(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, fails_at: tuple[ModuleType, str]
) -> None:
    told = Told()
    told.save(store, 1)
    store.wait()

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(*fails_at, full)
        for version in (1, 2):
            store.save(version, {"x": torch.zeros(4)}, told.is_durable, told.has_failed)
            with pytest.raises(ServiceError, match="No space left on device"):
                store.wait()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("v*/*")}
    assert left == {"v00000001/rank0"}
    assert torch.equal(store.load(1)["x"], STATE["x"])
    assert told.durable == [1]


def test_an_older_shard_comes_back_if_the_new_one_cannot_take_its_name(
    tmp_path: Path, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, rename = Told(), Path.rename
    told.save(store, 1)
    store.wait()

    def failing(source: Path, target: Path) -> Path:
        if target.name.startswith("g"):
            raise OSError(5, "Input/output error")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    store.save(1, {"x": torch.zeros(4)}, told.is_durable, told.has_failed)
    with pytest.raises(ServiceError, match="Input/output error"):
        store.wait()
    assert [path.name for path in tmp_path.glob("v*/*")] == ["rank0"]
    assert torch.equal(store.load(1)["x"], STATE["x"])


def test_a_full_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "swift-test", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system may be mounted: {mounted.stderr.decode().strip()}")
    try:
        store, told = CheckpointStore(tmp_path, 0, Holding()), Told()
        told.save(store, 1)
        store.wait()
        large = {"x": torch.ones(1 << 20, dtype=torch.uint8)}
        store.save(2, large, told.is_durable, told.has_failed)
        store.wait_saved()
        assert store.unsaved is not None
        assert "No space left on device" in store.unsaved.reason
        assert CheckpointStore(tmp_path, 0, Holding()).load(1).keys() == STATE.keys()
        subprocess.run(["mount", "-o", "remount,size=8m", str(tmp_path)], check=True)
        told.until_durable(1, 2)
        assert torch.equal(store.load(2)["x"], large["x"])
        store.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_what_a_killed_process_had_begun_goes_with_the_next_write_or_the_version(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 0, Holding(entered=5))
    own, heir, other = (
        tmp_path / "v00000001" / name
        for name in ("rank0/.g4-0123abcd-1", "rank0/.g6-0123abcd-1", "rank1/.g4-0123abcd-1")
    )
    for begun in (own, heir, other, tmp_path / "v00000000" / "rank0" / ".g4-0123abcd-1"):
        begun.mkdir(parents=True)
    told = Told()
    told.save(store, 1)
    store.wait()
    assert not own.exists()
    assert heir.exists()
    assert other.exists()
    store.prune({1})
    assert [path.name for path in tmp_path.glob("v*")] == ["v00000001"]


def test_pruning_removes_what_is_given_up_and_never_what_is_complete(
    tmp_path: Path, store: CheckpointStore
) -> None:
    told = Told()
    for version in (0, 10, 20, 30):
        told.save(store, version)
        store.wait()
        saved(tmp_path, version, STATE, rank=1, generation=0)
    (tmp_path / "v00000005").write_text("no folder")
    store.prune({0, 10}, 21)
    assert sorted(path.parent.name for path in tmp_path.glob("v*/rank0")) == [
        "v00000000",
        "v00000010",
        "v00000030",
    ]
    assert len(list(tmp_path.glob("v*/rank1/g*"))) == 4, "another rank's are its own"
    store.prune(set(), 40)
    assert (tmp_path / "v00000030").exists(), "nothing goes as long as nothing is complete"


def test_pruning_where_nothing_is_any_more(tmp_path: Path) -> None:
    directory = tmp_path / "file"
    directory.write_text("")
    CheckpointStore(directory, 0, Holding()).prune({0}, 0)
    CheckpointStore(tmp_path / "gone", 0, Holding()).prune({0}, 0)


def test_a_process_ends_although_it_could_not_write(tmp_path: Path) -> None:
    in_the_way(tmp_path, 1)
    program = (
        "from swift_ft.state.checkpoint_store import CheckpointStore\n"
        "from tests.unit.checkpoint.holding import Holding\n"
        f"store = CheckpointStore({str(tmp_path)!r}, 0, Holding())\n"
        "store.save(1, {'x': 1}, print, print)\n"
        "store.wait_saved()\n"
        "assert store.unsaved\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=_PATIENCE_S)
