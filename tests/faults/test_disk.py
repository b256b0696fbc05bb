"""Faults 23 to 29: what a disk and its system calls may do to a real server process."""

import errno
import os
import resource
import threading
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from unittest import mock

import grpc
import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import LogUnavailable, ServiceError, StaleGeneration
from swift_ft.log import admin
from swift_ft.log.protocol import message_of, reason_of
from tests.faults import shim
from tests.faults.shim import Faults
from tests.faults.world import (
    TIMEOUT_S,
    Disk,
    DiskServer,
    Server,
    body_of,
    fill,
    key,
    memory_bytes,
    put,
)
from tests.integration.logserver_world import JOB, run
from tests.log_client import Writer
from tests.patience import eventually
from tests.unit.log.append_call import Call
from tests.unit.log.clients import following, reading
from tests.unit.log.frames import STREAM, frame_of

SMALL_SEGMENTS = ("--segment-bytes", "1000000")


@pytest.fixture
def faulty(tmp_path: Path, faults: Faults) -> Iterator[Server]:
    """A server with the shim in it, and no rule yet; generation 1 is granted."""
    with Server(tmp_path / "log", *SMALL_SEGMENTS, faults=faults) as running:
        running.fence(1)
        yield running


def one(server: Server, sequence: int) -> Call:
    """Sends a record."""
    call = Call(server)
    call.open()
    call.send(frame_of(sequence)[1])
    return call


def closed(server: Server, words: str) -> None:
    """The server takes nothing any more, says why, and still reads."""
    assert not server.serving()
    with pytest.raises(grpc.RpcError) as caught:
        Call(server).open()
    assert (reason_of(caught.value), words in message_of(caught.value)) == ("closed", True)
    with pytest.raises(grpc.RpcError) as caught:
        server.stub.Fence(log_pb2.FenceRequest(job=JOB, generation=9), timeout=TIMEOUT_S)
    assert reason_of(caught.value) == "closed"


# -- 23: no space ---------------------------------------------------------------------------------------------


def take_all(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        with pytest.raises(OSError, match="No space left"):
            file.writelines(repeat(bytes(1024)))


def test_f23_full_disk_goes_back_to_the_record_boundary_and_still_reads_and_trims(tmp_path: Path) -> None:
    """A file system of 16 MiB, filled to its end by the log itself."""
    count = 1000
    disk = Disk(tmp_path / "image", 16 << 20)
    with DiskServer(tmp_path / "log", disk, *SMALL_SEGMENTS) as server:
        server.fence(1)
        writer = server.writer(patience_s=2.0)
        for step in range(count):
            put(writer, step)
        with pytest.raises(LogUnavailable, match="no space left"):
            writer.flush(TIMEOUT_S)
        assert not server.serving()
        eventually(lambda: server.said("disk_full"), "the event is written")  # after the refusal
        held = server.inventory().durable_sequence
        assert 100 < held < count
        with reading(server.address) as reader, following(reader, STREAM, held - 3) as cursor:
            for step in range(held - 3, held):
                assert cursor.get(key(step), TIMEOUT_S, lambda: False).body == body_of(step)
        # Somebody else takes the very last block. A fence and a trim are recorded all the same; then the writer
        # goes on by itself, again and again.
        take_all(Path(f"/proc/{server.pid}/root{server.directory}") / "junk+")
        server.fence(2)
        writer.set_generation(2)
        while (begin := server.inventory().next_sequence) < count:
            eventually(
                lambda: admin.trim(server.address, JOB, begin, TIMEOUT_S) == begin, "nobody reads the steps"
            )
            eventually(lambda: server.inventory().next_sequence > begin, "the writer goes on")
        eventually(lambda: writer.sending.trouble() is None, "the writer hears that all is taken")
        writer.flush(TIMEOUT_S)
        writer.close()
        eventually(server.serving, "it serves again")
        server.kill()
        server.start()
        after = server.inventory()
        assert not after.corrupt, after.reason
        assert after.next_sequence == count
        server.check(after.first_step if after.has_records else count, count)


def test_f23_disk_that_fills_up_in_the_middle_of_a_record(faulty: Server, faults: Faults) -> None:
    """The system takes 8192 bytes of a larger write, and then no more."""
    writer = faulty.writer(patience_s=1.0)
    put(writer, 0)
    writer.flush(TIMEOUT_S)
    short = faults.rule(shim.WRITE, shim.RECORDS, shim.SHORT, amount=8192, limit=1)
    full = faults.rule(shim.WRITE, shim.RECORDS, shim.FAIL, error=errno.ENOSPC)
    put(writer, 1)
    with pytest.raises(LogUnavailable, match="no space left"):
        writer.flush(TIMEOUT_S)
    assert (short.hits, full.hits > 0) == (1, True)
    assert not faulty.serving()
    assert faulty.inventory().durable_sequence == 1
    with reading(faulty.address) as reader, following(reader, STREAM, 0) as cursor:
        assert cursor.get(key(0), TIMEOUT_S, lambda: False).body == body_of(0)
    full.clear()
    eventually(lambda: not writer.sending.links[faulty.address].core.pending, "the writer goes on by itself")
    writer.close()
    eventually(faulty.serving, "it serves again")
    faulty.check(0, 2)
    faulty.kill()
    faulty.start()
    faulty.check(0, 2)


# -- 24: a failed sync ----------------------------------------------------------------------------------------


def test_f24_failed_fsync_is_never_tried_again_and_closes_the_server(faulty: Server, faults: Faults) -> None:
    one(faulty, 0).until_acked(1)
    assert faulty.serving()
    failing = faults.rule(shim.SYNC, shim.RECORDS, shim.FAIL, error=errno.EIO, limit=1)
    later = faults.rule(shim.SYNC, shim.RECORDS, shim.COUNT)
    call = one(faulty, 1)
    code, reason, message = call.refused()
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "closed")
    assert "a sync failed" in message
    assert call.acked.get(STREAM, 0) <= 1  # the record was never acknowledged
    assert failing.hits == 1
    closed(faulty, "a sync failed")  # although the next sync would do
    eventually(lambda: faulty.said("storage_failed"), "the event is written")  # after the refusal
    replies = list(faulty.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM), timeout=TIMEOUT_S))
    assert b"".join(reply.frames for reply in replies) == frame_of(0)[1]
    assert faulty.stop() == 0
    assert later.hits == 0, "the sync was tried again"
    faulty.start()  # a person has seen to it
    assert faulty.serving()
    begin = faulty.inventory().next_sequence  # what was not acknowledged may be there
    assert begin in (1, 2)
    one(faulty, begin).until_acked(begin + 1)


# -- 25: killed, or without power, between write and sync -----------------------------------------------------


def test_f25_killed_between_write_and_sync_loses_nothing_acked(faulty: Server, faults: Faults) -> None:
    writer = faulty.writer()
    for step in range(5):
        put(writer, step)
    writer.flush(TIMEOUT_S)
    at_sync = faults.rule(shim.SYNC, shim.RECORDS, shim.STOP, limit=1)
    for step in range(5, 9):
        put(writer, step)
    faulty.wait_stopped()  # written, not synced
    # Nothing of it is acknowledged.
    eventually(lambda: writer.sending.links[faulty.address].core.pending == 4, "all are on their way")
    faulty.kill()
    at_sync.clear()
    faulty.start()
    found = faulty.inventory()
    assert 5 <= found.next_sequence <= 9  # what was not acknowledged may be there
    assert not found.corrupt
    writer.close()
    faulty.check(0, 9)


def test_f25_power_lost_between_write_and_sync_loses_nothing_acked(tmp_path: Path, faults: Faults) -> None:
    """The disk is copied while the server stands before its sync: what only the kernel holds is lost."""
    disk = Disk(tmp_path / "image", 32 << 20)
    with DiskServer(tmp_path / "log", disk, *SMALL_SEGMENTS, faults=faults) as server:
        server.fence(1)
        writer = server.writer()
        for step in range(20):
            put(writer, step)
        writer.flush(TIMEOUT_S)
        at_sync = faults.rule(shim.SYNC, shim.RECORDS, shim.STOP, limit=1)
        for step in range(20, 25):
            put(writer, step)
        server.wait_stopped()
        after = disk.copy(tmp_path / "image-after")
        server.kill()
        at_sync.clear()
        server.power_is_back(after)
        found = server.inventory()
        assert not found.corrupt, found.reason
        assert 20 <= found.next_sequence <= 25
        writer.close()
        server.check(0, 25)


def test_f25_power_lost_right_after_an_acknowledgement_loses_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "image", 32 << 20)
    with DiskServer(tmp_path / "log", disk, *SMALL_SEGMENTS) as server:
        server.fence(1)
        writer = server.writer()
        for step in range(60):  # over two segments
            put(writer, step)
            writer.flush(TIMEOUT_S)
        after = disk.copy(tmp_path / "image-after")
        server.kill()
        server.power_is_back(after)
        server.check(0, 60)
        writer.close()


# -- 26: the manifest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "path", "action"),
    [
        (shim.SYNC, ".manifest", shim.STOP),  # written aside, not synced
        (shim.RENAME, ".manifest", shim.STOP),  # synced, not renamed
        (shim.RENAME, ".manifest", shim.STOP_AFTER),  # renamed, the directory not synced
    ],
    ids=["before-sync", "before-rename", "before-directory-sync"],
)
def test_f26_power_lost_while_the_manifest_is_replaced(
    tmp_path: Path, faults: Faults, calls: int, path: str, action: int
) -> None:
    """An answered fence is there, one that was not answered may be: never is there no manifest, nor half a one."""
    disk = Disk(tmp_path / "image", 16 << 20)
    with DiskServer(tmp_path / "log", disk, *SMALL_SEGMENTS, faults=faults) as server:
        fill(server, 3)
        server.fence(4)
        rule = faults.rule(calls, path, action, limit=1)
        outcome: list[BaseException] = []

        def fence() -> None:
            try:
                server.fence(5)
            except ServiceError as error:
                outcome.append(error)

        fencing = threading.Thread(target=fence)
        fencing.start()
        server.wait_stopped()
        after = disk.copy(tmp_path / "image-after")
        server.kill()
        rule.clear()
        fencing.join(TIMEOUT_S)
        assert len(outcome) == 1, "the fence was answered before it was durable"
        server.power_is_back(after)
        generation = server.stub.Inventory(log_pb2.InventoryRequest(job=JOB)).generation
        assert generation in (4, 5)
        server.check(0, 3)
        with pytest.raises(StaleGeneration):
            server.fence(3)
        server.fence(5)


def test_f26_power_lost_after_a_fence_was_answered(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "image", 16 << 20)
    with DiskServer(tmp_path / "log", disk, *SMALL_SEGMENTS) as server:
        fill(server, 3)
        for generation in range(2, 6):
            server.fence(generation)
            after = disk.copy(tmp_path / f"image-{generation}")
        server.kill()
        server.power_is_back(after)
        assert server.stub.Inventory(log_pb2.InventoryRequest(job=JOB)).generation == 5
        server.check(0, 3)


# -- 27: a slow disk ------------------------------------------------------------------------------------------


def test_f27_slow_disk_blocks_the_writer_and_bounds_memory_on_both_sides(
    tmp_path: Path, faults: Faults
) -> None:
    """The disk stands still: a sync does not return. The policy is to block.

    What waits is many times what the server may take, and all of it could be on its way."""
    queue_bytes, credit_bytes, size, slack_bytes = 128 << 20, 2 << 20, 1_000_000, 8 << 20
    with Server(tmp_path / "log", "--credit-bytes", str(credit_bytes), faults=faults) as server:
        server.fence(1)
        writer = Writer([server.address], JOB, 1, queue_bytes=queue_bytes)
        writer.await_ready()
        put(writer, 0, size=size)
        writer.flush(TIMEOUT_S)
        resting = server.peak_memory_bytes()
        resting_here = {pid: memory_bytes(pid, "VmRSS") for pid in (os.getpid(), writer.pid)}
        slow = faults.rule(shim.SYNC, shim.RECORDS, shim.HOLD, limit=1)
        count = 150
        appended = [1]

        def append() -> None:
            for step in range(1, count):
                put(writer, step, size=size)
                writer.wait_copied()
                appended[0] = step + 1

        appending = threading.Thread(target=append)
        appending.start()
        slow.wait()
        eventually(lambda: writer.queued_bytes + size > queue_bytes, "the queue is full")
        # It stays so: the writer is blocked for as long as the disk is.
        appending.join(1.0)
        assert appending.is_alive()
        waiting = appended[0]
        assert 100 < waiting <= queue_bytes // size + 1
        assert writer.queued_bytes <= queue_bytes
        assert server.peak_memory_bytes() - resting < credit_bytes + size + slack_bytes
        for pid, before in resting_here.items():  # the ring is in the memory of both
            assert memory_bytes(pid, "VmRSS") - before < queue_bytes + size + slack_bytes
        appending.join(1.0)
        assert appended[0] == waiting
        assert server.inventory().durable_sequence == 1
        assert server.serving()  # slow is not broken
        slow.clear()
        appending.join(TIMEOUT_S)
        assert not appending.is_alive()
        writer.close()
        server.check(0, count, size=size)


# -- 28: read-only, too many files ------------------------------------------------------------------------------


def test_f28_read_only_file_system_is_named_and_not_serving(faulty: Server, faults: Faults) -> None:
    one(faulty, 0).until_acked(1)
    faults.rule(shim.WRITE | shim.ALLOCATE, shim.RECORDS, shim.FAIL, error=errno.EROFS)
    assert one(faulty, 1).refused()[:2] == (grpc.StatusCode.UNAVAILABLE, "closed")
    closed(faulty, "Read-only file system")
    replies = list(faulty.stub.Read(log_pb2.ReadRequest(job=JOB, stream=STREAM), timeout=TIMEOUT_S))
    assert b"".join(reply.frames for reply in replies) == frame_of(0)[1]


def test_f28_too_many_open_files_are_named_and_the_writer_comes_again(server: Server) -> None:
    """The process's own limit is lowered to what it has open."""
    one(server, 0).until_acked(1)
    call = Call(server)
    call.open("s1.F")  # its first record needs a file
    in_use = max(int(name) for name in os.listdir(f"/proc/{server.pid}/fd")) + 1
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (in_use, hard))
    call.send(frame_of(0, stream="s1.F")[1])
    code, reason, message = call.refused()
    assert (code, reason) == (grpc.StatusCode.UNAVAILABLE, "busy")
    assert "Too many open files" in message
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert server.serving()
    again = Call(server)
    again.open("s1.F")
    again.send(frame_of(0, stream="s1.F")[1])
    again.until_acked(1, "s1.F")
    server.kill()
    server.start()
    assert server.serving()
    assert [server.inventory(stream).records for stream in ("s0.F", "s1.F")] == [1, 1]


def test_f28_read_only_file_system_at_the_start_is_one_line(tmp_path: Path, faults: Faults) -> None:
    with Server(tmp_path / "log") as server:
        fill(server, 1)
    faults.rule(shim.OPEN, ".lock", shim.FAIL, error=errno.EROFS)
    with mock.patch.dict(os.environ, faults.env):
        done = run(tmp_path / "log")
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


# -- 29: two servers ------------------------------------------------------------------------------------------


def test_f29_second_server_on_one_directory_is_refused(server: Server, tmp_path: Path) -> None:
    writer = server.writer()
    put(writer, 0)
    second = run(tmp_path / "log")
    assert (second.returncode, second.stdout) == (3, "")
    assert "in use by another log server" in second.stderr
    assert second.stderr.count("\n") == 1, second.stderr
    link = tmp_path / "other-name"
    link.symlink_to(tmp_path / "log")
    assert run(link).returncode == 3
    writer.close()  # the first one has noticed nothing
    server.check(0, 1)
    # A dead one holds nothing.
    server.kill()
    with Server(tmp_path / "log") as successor:
        successor.check(0, 1)
