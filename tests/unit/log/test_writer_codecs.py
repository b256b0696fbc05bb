"""Codecs in the writer: what is stored, and that no codec changes what a replay compares."""

import random
import struct
from collections.abc import Iterator

import pytest

from swift_ft.errors import Divergence
from swift_ft.log import codec as codecs
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey, digest_of
from tests.log_client import LogWriter
from tests.unit.log.service import JOB, InProcess

TIMEOUT_S = 10.0
_random = random.Random(3)
FLOATS = b"".join(struct.pack("<f", _random.gauss(0, 1))[2:] for _ in range(1 << 15))  # bfloat16
SHAPE = (1 << 15,)
STREAM = "s0.F"


@pytest.fixture
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        yield running


def writer_with(server: InProcess, codec: str) -> LogWriter:
    return LogWriter([server.address], JOB, 1, codec=codec)


def append(writer: LogWriter, step: int, body: bytes = FLOATS) -> None:
    writer.append(STREAM, RecordKey(step, 0, 0), "bfloat16", SHAPE, body)


@pytest.mark.parametrize("logged", codecs.NAMES)
@pytest.mark.parametrize("replayed", ["none", "bitshuffle"])
def test_no_codec_changes_what_a_replay_compares(server: InProcess, logged: str, replayed: str) -> None:
    before = writer_with(server, logged)
    append(before, 0)
    before.flush(TIMEOUT_S)
    before.close()
    reader = LogReader([server.address], JOB)
    digests = reader.digests(STREAM, 0, cancelled=never)
    assert digests == {RecordKey(0, 0, 0): digest_of("bfloat16", SHAPE, FLOATS)}
    cursor = reader.follow(STREAM, 0)
    assert cursor.get(RecordKey(0, 0, 0), TIMEOUT_S, lambda: False).body == FLOATS
    cursor.close()
    reader.close()
    after = writer_with(server, replayed)
    after.expect(STREAM, digests)
    append(after, 0)
    after.flush(TIMEOUT_S)
    assert (after.stats.verified, after.stats.records) == (1, 0)
    append(after, 0, b"\x80" + FLOATS[1:])  # an element's lowest bit, or some more
    with pytest.raises(Divergence):
        after.flush(TIMEOUT_S)
    after.close(0.0)


def test_a_link_knows_its_pace_after_some_records(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_ft.log.sender_core.LinkMeter.WINDOW_S", 0.0)
    writer = writer_with(server, "none")
    (link,) = writer.sending.links.values()
    assert link.pace() is None
    append(writer, 0)
    writer.flush(TIMEOUT_S)
    pace = link.pace()
    assert pace is not None
    assert pace > 0
    append(writer, 1)
    writer.flush(TIMEOUT_S)
    assert link.pace() != pace  # it was idle in between, and counts again
    writer.close()
