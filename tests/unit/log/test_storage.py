"""Storage: one conformance test for every implementation, then what only files can suffer."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from swift_ft.errors import UsageError
from swift_ft.log.manifest import GRANTED, MANIFEST, JobMeta, ManifestDamaged, StreamMeta, decode_manifest
from swift_ft.log.segment import (
    BLOCK_BYTES,
    SEGMENT_HEADER_BYTES,
    Ending,
    SegmentHeader,
    encode_footer,
    padding,
    scan,
)
from swift_ft_services.logserver.disk import LOCK, RealDisk
from swift_ft_services.logserver.segments import StorageFailed, StorageFull
from swift_ft_services.logserver.storage import RESERVE
from swift_ft_services.logserver.storage_interface import Storage
from tests.unit.log.frames import JOB, STREAM, frame_of
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.storages import (
    FIVE_A_SEGMENT,
    FRAME,
    OnDisk,
    check_frames,
    crash,
    failing_calls,
    files,
    fill,
    firsts,
    frame_in,
    left_by_a_kill,
    on_disk,
    recovered,
    reopened,
    sequences,
    spans,
    write,
)

# -- every implementation ---------------------------------------------------------------------------


def make_memory(path: Path) -> Storage:
    return MemoryStorage()


@pytest.mark.parametrize("make", [make_memory, on_disk], ids=["memory", "directory"])
def test_conformance(make: Callable[[Path], Storage], tmp_path: Path) -> None:
    storage = make(tmp_path / "data")
    storage.save(JOB, JobMeta(generation=1))
    storage.commit([write(0), write(0, "s1.F"), write(1), write(1, "s1.F")], True)
    storage.commit([write(2)], False)
    storage.commit([], True)
    check_frames(storage, 0, 3)
    check_frames(storage, 0, 2, "s1.F")
    for missing in (3, 99):
        with pytest.raises(FileNotFoundError):
            frame_in(storage, STREAM, missing)
    with pytest.raises(FileNotFoundError):
        frame_in(storage, STREAM, 0, job="other")
    # Sequences go on behind a removal, whether or not it freed all of it.
    storage.remove(JOB, STREAM, 3)
    storage.commit([write(3)], True)
    assert frame_in(storage, STREAM, 3) == frame_of(3)[1]
    storage.save(JOB, JobMeta(generation=2, trimmed_below_step=3))


# -- starting again ---------------------------------------------------------------------------------


def test_everything_comes_back_after_close_and_after_a_crash(tmp_path: Path) -> None:
    for how in (OnDisk.close, crash):
        data = tmp_path / how.__name__
        storage = on_disk(data, FIVE_A_SEGMENT, records=12)
        storage.save(JOB, JobMeta(3, 0, {STREAM: StreamMeta(0, 12, "")}))
        how(storage)
        assert firsts(data) == [0, 5, 10]
        again = OnDisk(data, FIVE_A_SEGMENT)
        (job,) = again.recover()
        assert (job.name, job.meta.generation) == (JOB, 3)
        (found,) = job.streams
        assert sequences(found) == list(range(12))
        assert (found.appended, found.holes, job.torn_bytes) == (12, [], {})
        assert [entry.digest for entry in found.by_sequence.values()] == [
            frame_of(i)[0].digest for i in range(12)
        ]
        fill(again, 12, 14)
        assert frame_in(again, STREAM, 13) == frame_of(13)[1]
        again.close()
        assert all(scan(path).ending is Ending.SEALED for path in files(data))


def test_fault_12_damage_in_the_middle_is_a_hole_and_stays_one(tmp_path: Path) -> None:
    path = left_by_a_kill(tmp_path / "data", 4)
    whole = path.read_bytes()
    for at in range(SEGMENT_HEADER_BYTES + FRAME, SEGMENT_HEADER_BYTES + 2 * FRAME, 7):
        changed = bytearray(whole)
        changed[at] ^= 4
        path.write_bytes(bytes(changed))
        found = recovered(tmp_path / "data")
        assert [(hole.sequence, hole.end_sequence, hole.below_step) for hole in found.holes] in (
            [(1, 2, 3)],  # the header is damaged: the next record bounds it
            [(1, 2, 2)],  # the body is: its own step does
        )
        assert found.appended == 4
    # A server goes on in a new file, and the next one finds the same damage.
    again, _ = reopened(tmp_path / "data")
    fill(again, 4, 6)
    again.close()
    found = recovered(tmp_path / "data")
    assert spans(found) == [(1, 2)]
    assert [sequence for sequence in sequences(found) if sequence != 1] == [0, 2, 3, 4, 5]


def emptied(directory: Path) -> None:
    """Its first record is torn: of the file nothing but the header is left."""
    os.truncate(left_by_a_kill(directory, 1), SEGMENT_HEADER_BYTES)


def test_an_empty_file_makes_room_for_later_records_and_for_its_own(tmp_path: Path) -> None:
    """Record 0 was acknowledged and is gone, so its writer goes on with 1; that is lost too, and 0 comes."""
    emptied(tmp_path)
    storage = on_disk(tmp_path)
    fill(storage, 1, 2)
    crash(storage)
    (path,) = files(tmp_path)
    assert path.name.endswith("1.seg")
    path.unlink()
    left_by_a_kill(tmp_path, 1)
    assert sequences(recovered(tmp_path)) == [0]


def test_an_empty_file_that_was_sealed_is_removed_at_the_start(tmp_path: Path) -> None:
    emptied(tmp_path)
    (path,) = files(tmp_path)
    footer = encode_footer(SegmentHeader(JOB, STREAM, 0), 0, SEGMENT_HEADER_BYTES)
    with path.open("ab") as file:
        file.write(padding(SEGMENT_HEADER_BYTES, len(footer)) + footer)
    assert scan(path).ending is Ending.SEALED
    left_by_a_kill(tmp_path, 2)
    assert sequences(recovered(tmp_path)) == [0, 1]


def test_whole_segments_that_are_gone_are_noticed(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=15)
    storage.save(JOB, JobMeta(1, 0, {STREAM: StreamMeta(0, 15, "")}))
    storage.close()
    for path, gone in zip(files(tmp_path / "data"), [(0, 5), (5, 10), (10, 15)], strict=True):
        whole = path.read_bytes()
        path.unlink()
        found = recovered(tmp_path / "data")
        assert spans(found) == [gone]
        path.write_bytes(whole)
    shutil.rmtree(tmp_path / "data" / JOB / STREAM)
    assert spans(recovered(tmp_path / "data")) == [(0, 15)]


# -- removing ---------------------------------------------------------------------------------------


def test_removal_leaves_whole_segments_that_are_needed(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=12)
    assert storage.remove(JOB, STREAM, 9) > 0
    assert firsts(tmp_path / "data") == [5, 10]
    storage.save(JOB, JobMeta(1, 9, {STREAM: StreamMeta(9, 12, "")}))
    # All of it: the manifest says where the stream goes on.
    storage.save(JOB, JobMeta(1, 12, {STREAM: StreamMeta(12, 12, "")}))
    storage.remove(JOB, STREAM, 12)
    assert files(tmp_path / "data") == []
    assert storage.remove(JOB, STREAM, 12) == 0
    crash(storage)
    found = recovered(tmp_path / "data")
    assert (found.appended, found.by_sequence, found.holes) == (12, {}, [])


def test_a_removal_that_a_kill_interrupted_is_finished_at_the_start(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=12)
    storage.save(JOB, JobMeta(1, 10, {STREAM: StreamMeta(10, 12, "")}))
    crash(storage)
    _, found = reopened(tmp_path / "data", FIVE_A_SEGMENT)
    assert firsts(tmp_path / "data") == [10]
    assert sequences(found) == [10, 11]


# -- a disk that fails --------------------------------------------------------------------------------


def test_fault_23_no_space_goes_back_to_the_record_boundary(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=2)
    fill(storage, 0, 1, "s1.F")
    held = {path: path.read_bytes().rstrip(b"\0") for path in tmp_path.rglob("*.seg")}
    real = os.pwritev
    calls = 0

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            return real(fd, buffers, offset)
        if calls == 2:  # a part of the record, then nothing
            os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), bytes(buffers[0])[:600], offset)
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, "pwritev", full), pytest.raises(StorageFull, match="no space left"):
        storage.commit([write(1, "s1.F"), write(2), write(3)], True)
    assert {path: path.read_bytes().rstrip(b"\0") for path in held} == held
    assert frame_in(storage, STREAM, 1) == frame_of(1)[1]
    storage.commit([write(1, "s1.F"), write(2), write(3)], True)
    storage.close()
    assert sequences(recovered(tmp_path / "data")) == [0, 1, 2, 3]
    assert sequences(recovered(tmp_path / "data", "s1.F")) == [0, 1]


def test_no_space_for_a_new_segment_leaves_nothing_half_made(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=5)
    with failing_calls(pwritev=errno.ENOSPC):
        for refused in (write(5), write(0, "s1.F")):
            with pytest.raises(StorageFull):
                storage.commit([refused], True)
    assert len(list(tmp_path.rglob("*.seg"))) == 1
    fill(storage, 5, 7)
    storage.close()
    assert sequences(recovered(tmp_path / "data")) == list(range(7))


def test_a_trim_is_recorded_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = on_disk(tmp_path / "data")
    reserve = tmp_path / "data" / RESERVE
    assert reserve.stat().st_blocks * 512 >= 1 << 20
    real = os.pwritev

    def full_while_reserved(fd: int, buffers: list[memoryview], offset: int) -> int:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", full_while_reserved)
    storage.save(JOB, JobMeta(generation=7))
    storage.close()
    assert (tmp_path / "data" / JOB / MANIFEST).read_text().count('"generation": 7') == 1


def test_a_sync_that_fails_when_a_segment_is_sealed_is_final_too(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT, records=5)
    with (
        failing_calls(fdatasync=errno.ENOSPC),
        pytest.raises(StorageFailed, match="a sync failed"),  # not StorageFull, which is tried again
    ):
        storage.commit([write(5)], False)


# -- the directory ----------------------------------------------------------------------------------


def test_fault_26_the_manifest_is_replaced_in_the_order_that_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written aside, synced, renamed, and the directory synced: in this order."""
    storage = on_disk(tmp_path / "data")
    done: list[str] = []
    for name in ("fdatasync", "fsync", "rename", "pwritev"):
        real = getattr(os, name)

        def spy(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            what = os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])
            done.append(f"{name} {Path(what).name}")
            return real(*args)

        monkeypatch.setattr(os, name, spy)
    storage.save(JOB, JobMeta(generation=2))
    asides = {
        f"{MANIFEST}.new": JOB,
        f"{GRANTED}{JOB}.new": "data",
    }  # the line of the book after the manifest
    assert done == [
        step
        for aside, folder in asides.items()
        for step in (f"pwritev {aside}", f"fdatasync {aside}", f"rename {aside}", f"fsync {folder}")
    ]
    done.clear()
    storage.save(JOB, JobMeta(generation=2, trimmed_below_step=3))
    assert f"rename {GRANTED}{JOB}.new" not in done


def test_a_damaged_or_missing_manifest_is_refused(tmp_path: Path) -> None:
    on_disk(tmp_path / "data", records=2).close()
    manifest = tmp_path / "data" / JOB / MANIFEST
    whole = manifest.read_bytes()
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 2
        with pytest.raises(ManifestDamaged):
            decode_manifest(changed)
    manifest.write_bytes(changed)
    with pytest.raises(AssertionError, match=f"job {JOB} is set apart.* is damaged.*--drop-job {JOB}"):
        recovered(tmp_path / "data")
    manifest.unlink()
    with pytest.raises(AssertionError, match=f"job {JOB} is set apart.* is missing"):
        recovered(tmp_path / "data")


def test_a_path_that_is_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below"):
        with pytest.raises(UsageError, match="cannot use directory"):
            OnDisk(path)
    (tmp_path / LOCK).symlink_to(file)
    with pytest.raises(UsageError, match="cannot use directory"):
        OnDisk(tmp_path)


@pytest.mark.parametrize("most", [1 << 62, 3 << 20, 1000])
@pytest.mark.parametrize("direct", [True, False])
def test_parts_of_any_size_are_written_however_little_the_system_takes_at_once(
    most: int, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [0, 5, (9 << 20) + 3, 4 << 20, 1, (4 << 20) + 1] if most > 1000 else [0, 5, 4096, 700, 1]
    parts = [bytes([65 + index]) * size for index, size in enumerate(sizes)]
    parts.append(padding(sum(sizes)))
    real = os.pwritev
    used: set[bool] = set()

    def takes_little(fd: int, views: Sequence[memoryview], offset: int) -> int:
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and not direct:
            raise OSError(errno.EINVAL, "this file system has no O_DIRECT")
        used.add(is_direct)
        return real(fd, [views[0][: max(most, 1)]], offset)

    monkeypatch.setattr(os, "pwritev", takes_little)
    disk = RealDisk(tmp_path)
    file = disk.create(tmp_path / "file")
    file.reserve(64 << 20)
    file.write(2 * BLOCK_BYTES, parts)
    file.sync()
    assert file.size == 2 * BLOCK_BYTES + sum(map(len, parts))
    file.close()
    disk.close()
    assert (tmp_path / "file").read_bytes() == bytes(2 * BLOCK_BYTES) + b"".join(parts)
    assert used <= {direct, False}


def test_what_was_reserved_is_given_back(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=3)
    (path,) = files(tmp_path / "data")
    assert path.stat().st_blocks * 512 > 8 * BLOCK_BYTES
    storage.close()
    assert path.stat().st_blocks * 512 <= 2 * BLOCK_BYTES
    assert len(scan(path).records) == 3


def test_a_job_that_nobody_writes_gives_back_what_it_took_ahead(tmp_path: Path) -> None:
    """And goes on as before; after a kill as well, of which the new process knows nothing."""
    storage = on_disk(tmp_path / "data", records=3)
    (path,) = files(tmp_path / "data")
    ahead = path.stat().st_blocks
    storage.give_back("another")
    assert path.stat().st_blocks == ahead > 16 * BLOCK_BYTES // 512
    storage.give_back(JOB)
    assert path.stat().st_blocks * 512 <= 2 * BLOCK_BYTES
    assert sequences(recovered(tmp_path / "data")) == [0, 1, 2]
    fill(storage, 3, 5)
    assert path.stat().st_blocks >= ahead
    crash(storage)
    again, _ = reopened(tmp_path / "data")
    assert path.stat().st_blocks >= ahead
    again.give_back(JOB)
    assert path.stat().st_blocks * 512 <= 2 * BLOCK_BYTES
    fill(again, 5, 6)
    again.close()
    assert sequences(recovered(tmp_path / "data")) == [0, 1, 2, 3, 4, 5]


def test_a_damaged_segment_header_behind_a_trim_is_a_hole_not_a_short_log(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", records=2)
    storage.save(JOB, JobMeta(1, 1, {STREAM: StreamMeta(1, 2, "")}))
    fill(storage, 2, 4)
    crash(storage)
    (path,) = files(tmp_path / "data")
    changed = bytearray(path.read_bytes())
    changed[40] ^= 4
    path.write_bytes(bytes(changed))
    holes = recovered(tmp_path / "data").holes
    assert (holes[0].sequence, holes[-1].end_sequence) == (0, 4)
    assert all(one.end_sequence == other.sequence for one, other in pairwise(holes))


def test_a_sync_covers_what_was_written_since_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = on_disk(tmp_path / "data", FIVE_A_SEGMENT)
    for stream in ("s0.F", "s1.F", "s2.F"):
        fill(storage, 0, 1, stream)
    storage.commit([write(1, "s0.F"), write(1, "s2.F")], False)
    synced: list[str] = []
    real = os.fdatasync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).parent.name)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", noted)
    storage.commit([write(1, "s1.F")], True)
    assert sorted(synced) == ["s0.F", "s1.F", "s2.F"]
    storage.commit([], True)
    assert len(synced) == 3
    # What was sealed was synced with it, what was dropped needs none.
    storage.commit([write(2, "s0.F"), write(2, "s1.F")], False)
    for sequence in range(3, 6):
        storage.commit([write(sequence, "s0.F")], False)
    storage.remove(JOB, "s1.F", 3)
    synced.clear()
    storage.commit([], True)
    assert synced == ["s0.F"]


def test_streams_that_are_idle_keep_no_files_open(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data", open_max=4)
    streams = [f"s{index}.F" for index in range(10)]

    def open_files() -> set[str]:
        links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        return {Path(link).parent.name for link in links if link.startswith(str(tmp_path)) and ".seg" in link}

    for sequence in range(2):
        for stream in streams:
            fill(storage, sequence, sequence + 1, stream)
            assert stream in open_files()
            assert len(open_files()) <= 4
    assert open_files() == set(streams[-4:])
    # What is written stays open, however much it is; and nothing of it is sealed in the midst of it.
    storage.commit([write(2, stream) for stream in streams], True)
    assert open_files() == set(streams)
    storage.commit([write(3, "s0.F")], True)
    assert open_files() == {"s0.F", *streams[-3:]}
    for stream in streams:
        check_frames(storage, 0, 3, stream)
    crash(storage)
    again = OnDisk(tmp_path / "data", open_max=4)
    (job,) = again.recover()
    assert len(open_files()) <= 4
    for found in job.streams:
        assert (sequences(found), found.holes) == (list(range(4 if found.name == "s0.F" else 3)), [])
    again.close()
    assert open_files() == set()


def test_a_full_disk_at_the_start_leaves_idle_streams_open(tmp_path: Path) -> None:
    storage = on_disk(tmp_path / "data")
    for index in range(4):
        fill(storage, 0, 1, f"s{index}.F")
    crash(storage)
    again = OnDisk(tmp_path / "data", open_max=2)
    with failing_calls(pwritev=errno.ENOSPC):
        (job,) = again.recover()
    assert [sequences(found) for found in job.streams] == [[0]] * 4
    fill(again, 1, 2, "s0.F")
    assert frame_in(again, "s0.F", 1) == frame_of(1, stream="s0.F")[1]
