"""Codecs in the writer: what is stored, and that no codec changes what a replay compares."""

import random
import struct

import pytest

from swift_ft.errors import Divergence
from swift_ft.log import codec as codecs
from swift_ft.log.reader import never
from swift_ft.log.record import digest_of
from tests.log_client import LogWriter
from tests.unit.log.clients import TIMEOUT_S, following, key, reading, writing
from tests.unit.log.service import InProcess

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
