"""What a place of checkpoints promises: a directory, and object stores of two kinds."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from obstore.store import LocalStore, MemoryStore

from swift_ft.errors import ServiceError
from swift_ft.objects import Objects
from swift_ft.state import checkpoint_place, export
from swift_ft.state.checkpoint_file import DATA, INDEX
from swift_ft.state.checkpoint_place import DirectoryPlace, ObjectPlace, Place
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.digests import digest_of
from tests.patience import eventually
from tests.unit.checkpoint.holding import Holding, keep, load, saved, store_of

Make = Callable[[], Place]


@pytest.fixture(params=["directory", "memory", "local"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Opens the same place, as another process would."""
    if request.param == "directory":
        return lambda: DirectoryPlace(tmp_path / "job")
    store = (
        MemoryStore()
        if request.param == "memory"
        else LocalStore(tmp_path / "job", mkdir=True, automatic_cleanup=True)
    )
    return lambda: ObjectPlace(Objects(store), "s3://bucket/job")


def state(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(700, 900, generator=generator)
    return {"w": weights, "t": weights.t(), "same": weights, "n": seed, "empty": torch.empty(0, 3)}


def test_what_was_saved_is_loaded(make: Make) -> None:
    store_of(make()).check()
    assert make().versions() == []
    store = saved(make(), 3, state(1))
    saved(make(), 3, state(2), rank=1)
    saved(make(), 10, state(3))
    assert digest_of(load(make(), 3)) == digest_of(state(1))
    assert digest_of(load(make(), 3, rank=1)) == digest_of(state(2))
    assert (make().versions(), make().ranks()) == ([3, 10], {0, 1})
    assert store.saved is not None
    assert store.saved.file_bytes > store.saved.tensor_bytes > 0
    with pytest.raises(ServiceError, match=r"job/v00000010/rank1 is not whole: there is nothing in it"):
        load(make(), 10, rank=1)


def test_the_bytes_are_those_of_a_directory(make: Make, tmp_path: Path) -> None:
    """So a job's checkpoints can be copied from one to the other."""
    saved(DirectoryPlace(tmp_path / "other"), 3, state(1))
    (shard,) = (tmp_path / "other").glob("v*/rank0/g1-*")
    place = make()
    with place.new(3, 0, shard.name) as create:
        for name in (DATA, INDEX):
            with create(name) as write:
                write(memoryview((shard / name).read_bytes()))
    assert digest_of(load(place, 3)) == digest_of(state(1))


def test_the_newest_generation_counts_and_others_go(make: Make) -> None:
    saved(make(), 3, state(1), generation=2)
    zombie = saved(make(), 3, state(2), generation=1)
    assert digest_of(load(make(), 3)) == digest_of(state(1))
    saved(make(), 3, state(3), generation=3)
    assert digest_of(load(make(), 3)) == digest_of(state(3))
    assert [shard.generation for shard in make().shards(3, 0)] == [3]
    zombie.prune({9})
    zombie.close()
    eventually(lambda: not [thread for thread in threading.enumerate() if thread.name == "swift-prune"])
    assert make().versions() == [3], "it is a replacement's"


def test_what_a_killed_process_has_begun_is_never_loaded_and_goes(make: Make) -> None:
    place = make()
    entered = place.new(3, 0, "g1-01234567-1")
    create = entered.__enter__()
    with create(DATA) as write:
        write(memoryview(b"half of it"))
    assert [(shard.name.lstrip("."), shard.whole) for shard in make().shards(3, 0)] == [
        ("g1-01234567-1", False)
    ]
    with pytest.raises(ServiceError, match="nothing in it"):
        load(make(), 3)
    store = saved(make(), 3, state(1), generation=2)
    assert [shard.whole for shard in make().shards(3, 0)] == [True]
    assert digest_of(load(make(), 3)) == digest_of(state(1))
    saved(make(), 7, state(1), generation=2)
    store.prune({7})
    eventually(lambda: make().versions() == [7])


def test_an_index_is_never_put_over_another(make: Make) -> None:
    saved(make(), 3, state(1))
    (shard,) = make().shards(3, 0)
    with pytest.raises(OSError, match=r"there is another object|File exists|not empty"):
        with make().new(3, 0, shard.name) as create, create(INDEX) as write:
            write(memoryview(b"{}\n"))


def test_an_earlier_jobs_are_set_aside_and_never_loaded(make: Make) -> None:
    saved(make(), 3, state(1))
    saved(make(), 3, state(1), rank=1)
    store = store_of(make(), generation=1)
    store.set_aside(lambda: None)
    with pytest.raises(ServiceError, match="nothing in it"):
        load(make(), 3)
    assert digest_of(load(make(), 3, rank=1)) == digest_of(state(1)), "it is another rank's"
    keep(store, 3, state(2))
    store.set_aside(lambda: None)  # the job begins again
    assert digest_of(load(make(), 3)) == digest_of(state(2))


@pytest.mark.parametrize("name", [INDEX, DATA])
def test_a_flipped_bit_is_found(name: str) -> None:
    memory = MemoryStore()
    objects = Objects(memory)
    saved(ObjectPlace(objects, "s3://bucket/job"), 3, state(1))
    (entry,) = [entry for entry in objects.entries() if entry.path.endswith(name)]
    content = bytearray(objects.read(entry.path, 0, entry.size))
    content[len(content) * 2 // 3] ^= 4
    objects.put(entry.path, content)
    with pytest.raises(ServiceError, match=r"s3://bucket/job/v00000003/rank0/g1-.* is corrupt"):
        load(ObjectPlace(objects, "s3://bucket/job"), 3)


def test_another_object_of_this_name_is_an_error_and_the_same_one_is_none() -> None:
    objects = Objects(MemoryStore())
    objects.create("a", b"1")
    objects.create("a", b"1")  # the answer to the first request was lost
    with pytest.raises(FileExistsError):
        objects.create("a", b"12")
    with pytest.raises(FileNotFoundError):
        objects.read_all("b", 10)
    objects.remove(["b", "a"])
    assert objects.entries() == []


def test_a_write_that_hears_nothing_gives_way_to_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training waits for `_STUCK_S` at most: the stuck write is ended, and said."""
    monkeypatch.setattr(checkpoint_place, "_STUCK_S", 0.2)
    objects, asked = Objects(MemoryStore()), threading.Event()
    place = ObjectPlace(objects, "s3://bucket/job")
    store, told, failed = CheckpointStore(place, 0, Holding(entered=1)), list[int](), list[str]()
    real, stuck = Objects.create, [True]

    async def never() -> None:
        asked.set()
        await asyncio.Event().wait()

    def create(self: Objects, path: str, data: bytes) -> None:
        if stuck.pop() if stuck else False:
            self._done(path, never)
        real(self, path, data)

    monkeypatch.setattr(Objects, "create", create)
    store.save(3, state(1), told.append, lambda unsaved: failed.append(unsaved.reason))
    assert asked.wait(10.0)
    store.save(5, state(2), told.append, lambda unsaved: failed.append(unsaved.reason))
    store.wait()
    assert told == [5]
    assert "called off" in failed[0]
    assert digest_of(load(place, 5)) == digest_of(state(2))


def test_a_job_is_exported_from_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectPlace(Objects(MemoryStore()), "s3://bucket/job")
    monkeypatch.setattr("swift_ft.state.checkpoint_store.place_at", lambda _where: place)
    for rank in range(2):
        part = {"stages": {str(rank): {"w": torch.ones(3) * rank}}, "version": 4, "step": 4}
        saved(place, 4, part, rank=rank)
    assert export.world_size_of("s3://bucket/job") == 2
    version, states = export.newest("s3://bucket/job", 2, lambda _said: None)
    whole = export.assemble(states)
    assert (version, json.dumps(whole["stages"]["1"]["w"].tolist())) == (4, "[1.0, 1.0, 1.0]")
    export.write_dcp(tmp_path / "out", whole)
    assert (tmp_path / "out" / ".metadata").exists()


def test_a_mark_that_is_under_way_does_not_come_back_after_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another history of that version may be saved later."""
    place = ObjectPlace(Objects(MemoryStore()), "s3://bucket/job")
    store = saved(place, 10, state(1))
    begun, go_on = threading.Event(), threading.Event()
    mark = place.mark

    def slow(version: int, data: bytes) -> None:
        begun.set()
        assert go_on.wait(10)
        mark(version, data)

    monkeypatch.setattr(place, "mark", slow)
    store.prune({10}, marks={10: b"complete"})
    assert begun.wait(10)
    restore = threading.Thread(target=store.unmark, args=(5,))
    restore.start()
    restore.join(0.2)  # it waits for the mark; if it did not, it would be done by then
    go_on.set()
    restore.join(10)
    store.wait()
    place.end_background()
    assert place.marked(10) is None


def test_a_version_that_cannot_be_unmarked_keeps_its_shards(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()
    for version in (5, 10):
        store = saved(place, version, state(version))

    def refuse(_version: int) -> None:
        raise OSError("no answer")

    monkeypatch.setattr(place, "unmark", refuse)
    monkeypatch.setattr(place, "in_background", lambda work: work())
    store.prune({10})
    assert place.versions() == [5, 10]


def test_what_cannot_be_listed_is_not_taken_for_unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectPlace(Objects(MemoryStore()), "s3://bucket/job")
    store = saved(place, 10, state(1))

    def away(_self: Objects, _below: str = "") -> list[str]:
        raise OSError(5, "no answer")

    monkeypatch.setattr(Objects, "folders", away)
    with pytest.raises(ServiceError, match="cannot be changed: no answer"):
        store.unmark(5)


def test_small_objects_are_read_several_at_once_and_in_order() -> None:
    objects = Objects(MemoryStore(), 0.1)
    for number in range(1, 100):
        objects.put(f"{number:03d}", b"x" * number)
    entries = sorted(objects.entries(), key=lambda entry: entry.path)
    assert [(entry.path, len(data)) for entry, data in objects.read_each(entries)] == [
        (f"{number:03d}", number) for number in range(1, 100)
    ]
    objects.remove(["050"])
    with pytest.raises(FileNotFoundError):
        list(objects.read_each(entries))
