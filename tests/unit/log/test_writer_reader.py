"""The Python API end to end against a server in this process: reader, cursor, admin; and codecs in the writer."""

import random
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from swift_ft._pb import log_pb2
from swift_ft.errors import (
    Divergence,
    LogInterrupted,
    LogUnavailable,
    RecordMissing,
    RecordTrimmed,
    UsageError,
)
from swift_ft.log import admin, sender, sender_core
from swift_ft.log import codec as codecs
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import digest_of
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.log_client import LogWriter, Writer
from tests.patience import eventually
from tests.unit.log.clients import TIMEOUT_S, following, key, make_durable, put, reading, value_of, writing
from tests.unit.log.service import JOB, InProcess


def test_which_streams_a_server_has(server: InProcess) -> None:
    """Where it lacks a stream, its digests are none; where they cannot be had, it does not say so."""
    with writing(server) as writer, reading(server) as reader:
        make_durable(writer, *range(3))
        held = reader.holdings(server.address)
        assert held is not None
        assert (held.lacks("s0.B", 0), held.lacks("s0.F", 0)) == (True, False)
        assert reader.digests("s0.B", 0, cancelled=never) == {}
        admin.trim(server.address, JOB, 2, TIMEOUT_S)
        held = reader.holdings(server.address)
        assert held is not None
        assert (held.lacks("s0.B", 2), held.lacks("s0.B", 1)) == (True, False)
        with pytest.raises(RecordTrimmed):
            reader.digests("s0.B", 1, cancelled=never)
        assert reader.holdings("127.0.0.1:1") is None, "nobody answers"
    other = LogReader([server.address], "other")
    assert other.holdings(server.address) is None, "it does not know the job"
    other.close()


def test_a_server_makes_the_digests_answer_without_keeping_others_waiting(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(server) as writer:
        make_durable(writer, 1)
    changed, free = server.engine.state.changed, []
    make = log_pb2.RecordDigest

    def making(**fields: object) -> log_pb2.RecordDigest:
        def look() -> None:
            free.append(changed.acquire(timeout=1.0))
            if free[-1]:
                changed.release()

        other = threading.Thread(target=look)
        other.start()
        other.join()
        return make(**fields)  # type: ignore[arg-type]

    monkeypatch.setattr(log_pb2, "RecordDigest", making)
    (found,) = server.engine.reading.digests(log_pb2.DigestsRequest(job=JOB, stream="s0.F"))
    assert [record.step for record in found] == [1]
    assert free == [True]


def test_a_writer_without_work_is_never_impatient(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    idle_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + idle_s)
    monkeypatch.setattr("swift_ft.log.sender.time", clock)
    with writing(server, patience_s=TIMEOUT_S) as writer:
        make_durable(writer, 0)
        idle_s = 3 * TIMEOUT_S
        make_durable(writer, 1)


def test_bad_writers_and_readers() -> None:
    with pytest.raises(UsageError):
        Writer(["a:1"], "a/b", 1)
    with pytest.raises(UsageError, match=r"give one of none, lz4, bitshuffle$"):
        Writer(["a:1"], JOB, 1, codec="zip")
    with pytest.raises(UsageError):
        LogReader([], JOB)
    with pytest.raises(UsageError):
        LogReader(["a:1"], "")


# -- cursors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
def test_large_records_travel_in_pieces_between_small_ones(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes around that of a message; over files that end between them; read in order and verified."""
    if elsewhere:
        monkeypatch.setattr("swift_ft.log.reader.ask_for_files", lambda *_: None)
    sizes = [10, 4 << 20, (4 << 20) + 1, 70_000, 3, (9 << 20) + 5, 0, *[900_000] * 9, (13 << 20) - 7, 1]
    bodies = [random.Random(size).randbytes(size) for size in sizes]
    storage = DirectoryStorage(tmp_path, 6 << 20)
    storage.recover()
    with InProcess(storage) as server, writing(server) as writer, reading(server) as reader:
        for step, body in enumerate(bodies):
            writer.append("s0.F", key(step), "uint8", (len(body),), body)
            writer.flush(TIMEOUT_S)  # a commit goes into one file
        assert len(list(tmp_path.rglob("*.seg"))) > 3
        with following(reader, "s0.F", 0) as cursor:
            for step, body in enumerate(bodies):
                assert cursor.get(key(step), TIMEOUT_S, never).body == body


def test_missing_cancelled_closed(server: InProcess) -> None:
    with reading(server) as reader:
        cursor = reader.follow("s0.F", 0)
        with pytest.raises(RecordMissing, match=r"s0.F step 0 microbatch 0 slot 0 did not come within 0.1 s"):
            cursor.get(key(0), 0.1, never)
        cancel_at = time.monotonic() + 0.2
        with pytest.raises(LogInterrupted):
            cursor.get(key(0), TIMEOUT_S, lambda: time.monotonic() > cancel_at)
        assert time.monotonic() - cancel_at < TIMEOUT_S / 2
        cursor.close()
        with pytest.raises(LogUnavailable, match="closed"):
            cursor.get(key(0), TIMEOUT_S, never)


def test_a_link_knows_its_pace_after_some_records(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_ft.log.sender_core.LinkMeter.WINDOW_S", 0.0)
    with writing(server) as writer:
        (link,) = writer.sending.links.values()
        assert link.pace() is None
        make_durable(writer, 0)
        pace = link.pace()
        assert pace is not None
        assert pace > 0
        make_durable(writer, 1)
        assert link.pace() != pace  # it was idle in between, and counts again


def test_following_a_stream_that_is_being_written(server: InProcess) -> None:
    with reading(server) as reader, following(reader, "s0.F", 2) as cursor, writing(server) as writer:
        got = []

        def consume() -> None:
            for step in range(2, 30):
                got.append(value_of(cursor.get(key(step), TIMEOUT_S, never).body))

        thread = threading.Thread(target=consume)
        thread.start()
        for step in range(30):
            put(writer, step)
            time.sleep(0.002)
        thread.join(TIMEOUT_S)
        assert got == [step * 100 for step in range(2, 30)]


def test_prefetch_is_bounded_but_never_deadlocks(server: InProcess) -> None:
    body = bytes(100_000)
    with writing(server) as writer, reading(server, prefetch_bytes=300_000) as reader:
        for step in range(100):
            writer.append("a", key(step), "uint8", (100_000,), body)
        writer.flush(TIMEOUT_S)
        with following(reader, "a", 0) as cursor:
            eventually(lambda: cursor._held_bytes >= 300_000)
            time.sleep(0.2)
            assert cursor._held_bytes <= 300_000 + 2_200_000  # what one message more may bring
            cursor.get(key(99), TIMEOUT_S, never)  # the last one: everything before it must come
            cursor.get(key(0), TIMEOUT_S, never)
            cursor.drop_below(50)
            assert cursor._held_bytes == 49 * 100_000
            with pytest.raises(RecordMissing):
                cursor.get(key(10), 0.1, never)
            for step in range(50, 99):
                cursor.get(key(step), TIMEOUT_S, never)
            assert cursor._held_bytes == 0


def test_a_new_generation_does_not_wait_for_the_pause_after_the_call_that_its_fence_has_ended(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sender, sender_core):
        monkeypatch.setattr(module, "RETRY_S", 10 * TIMEOUT_S)
    with writing(server) as writer:
        make_durable(writer, 0)
        server.engine.administration.fence(JOB, 2)
        link = writer.sending.links[server.address]
        eventually(lambda: link._call is None)
        put(writer, 1)
        writer.set_generation(2)
        writer.flush(TIMEOUT_S)


# -- codecs --------------------------------------------------------------------------------------------


_random = random.Random(3)
FLOATS = b"".join(struct.pack("<f", _random.gauss(0, 1))[2:] for _ in range(1 << 15))  # bfloat16
SHAPE = (1 << 15,)
STREAM = "s0.F"


def append(writer: LogWriter, step: int, body: bytes = FLOATS) -> None:
    writer.append(STREAM, key(step), "bfloat16", SHAPE, body)


@pytest.mark.parametrize("logged", codecs.NAMES)
@pytest.mark.parametrize("replayed", ["none", "bitshuffle"])
def test_no_codec_changes_what_a_replay_compares(server: InProcess, logged: str, replayed: str) -> None:
    with writing(server, codec=logged) as before:
        append(before, 0)
        before.flush(TIMEOUT_S)
    with reading(server) as reader, following(reader, STREAM, 0) as cursor:
        digests = reader.digests(STREAM, 0, cancelled=never)
        assert digests == {key(0): digest_of("bfloat16", SHAPE, FLOATS)}
        assert cursor.get(key(0), TIMEOUT_S, never).body == FLOATS
    with writing(server, codec=replayed) as after:
        after.expect(STREAM, digests)
        append(after, 0)
        after.flush(TIMEOUT_S)
        assert (after.stats.verified, after.stats.records) == (1, 0)
        append(after, 0, b"\x80" + FLOATS[1:])  # an element's lowest bit, or some more
        with pytest.raises(Divergence):
            after.flush(TIMEOUT_S)
