"""Codecs in the writer: what is stored, what `auto` says, and that no codec changes what a replay compares."""

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift import events
from swift.errors import Divergence, UsageError
from swift.log import admin
from swift.log import codec as codecs
from swift.log.choice import LinkRate
from swift.log.link import Link
from swift.log.reader import LogReader, never
from swift.log.record import RecordKey, digest_of
from swift.log.writer import LogWriter
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


@pytest.mark.parametrize("logged", codecs.CHOICES)
@pytest.mark.parametrize("replayed", ["none", "auto"])
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


def test_auto_follows_the_bandwidth(
    server: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(events.ENV_EVENTS_DIR, str(tmp_path))
    stored: list[int] = []
    rates = [None, LinkRate(2e6, 1.0, 1.0), LinkRate(1e12, 1.0, 1.2)]
    monkeypatch.setattr(Link, "rate", lambda _self: rates[min(len(stored) // 2, 2)])
    monkeypatch.setattr("swift.log.choice.SAMPLE_EVERY", 2)
    writer = writer_with(server, "auto")
    for step in range(6):
        before = writer.stats.stored_bytes
        append(writer, step)
        writer.flush(TIMEOUT_S)
        stored.append(writer.stats.stored_bytes - before)
        if step == 2:
            assert writer.codec_choices[STREAM].codec == "bitshuffle"
            assert "the link takes 2 MB/s" in writer.codec_choices[STREAM].reason
    assert writer.stats.bytes == 6 * len(FLOATS)
    writer.close()
    small = [size < len(FLOATS) for size in stored]
    assert small == [False, False, True, True, False, False]
    assert sum(stored) < admin.inventory(server.address, JOB, TIMEOUT_S)[0].bytes < 6 * len(FLOATS)
    events.configure("elsewhere")  # closes the file
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    said = [(line["codec"], line["reason"]) for line in lines if line["event"] == "codec"]
    assert [name for name, _ in said] == ["none", "bitshuffle", "none"]
    assert "not known yet" in said[0][1]
    assert "it pays" in said[1][1]
    assert "does not pay" in said[2][1]


def test_a_link_knows_its_rate_after_some_records(server: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift.log.choice.LinkMeter.WINDOW_S", 0.0)
    writer = writer_with(server, "none")
    (link,) = writer.delivery.links.values()
    assert link.rate() is None
    append(writer, 0)
    writer.flush(TIMEOUT_S)
    rate = link.rate()
    assert rate is not None
    assert rate.bytes_per_s > 0
    assert 0 < rate.busy_share <= 1
    assert rate.raw_per_stored == 1.0
    append(writer, 1)
    writer.flush(TIMEOUT_S)
    assert link.rate() != rate  # it was idle in between, and counts again
    writer.close()


def test_a_codec_that_is_not_there(server: InProcess) -> None:
    with pytest.raises(UsageError, match="give one of none, lz4, bitshuffle, auto"):
        writer_with(server, "zip")
