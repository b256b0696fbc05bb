"""A reader that wants some microbatches is sent these, and gets everything of the steps behind its share."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swift_ft._pb import log_pb2
from swift_ft.errors import RecordMissing
from swift_ft.log.frame import BODY_BYTES_MAX, Assembler
from swift_ft.log.reader import ReadFilter, never
from swift_ft.log.record import MARK_SLOT, RecordKey
from swift_ft_services.logserver import reading as server_reading
from tests.unit.log.clients import following, reading, writing
from tests.unit.log.service import JOB, InProcess

STREAM = "s0.F"
STEPS, MICROBATCHES, LATER = 4, 5, 65536
SHARE = ReadFilter(first=1, behind=3, of=MICROBATCHES, below_step=3)
KEYS = [RecordKey(step, mb, 0) for step in range(STEPS) for mb in (*range(MICROBATCHES), LATER)]


@pytest.fixture(scope="module")
def server() -> Iterator[InProcess]:
    with InProcess() as running:
        with writing(running) as writer:
            for key in KEYS:
                writer.append(STREAM, key, "uint8", (4,), bytes([key.step, key.microbatch % 256, 1, 2]))
            writer.flush(10.0)
        yield running


def sent(server: InProcess, request: log_pb2.ReadRequest) -> list[RecordKey]:
    """What the server sends in answer."""
    assembler, replies = Assembler(BODY_BYTES_MAX), server.stub.Read(request)
    return [header.key for reply in replies for header, _ in assembler.feed(memoryview(reply.frames))]


@pytest.mark.parametrize("at_once", [1, 2, 4096])
def test_the_server_sends_the_share_only(
    server: InProcess, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it looks at few records before others get its lock: those that it passes end nothing."""
    monkeypatch.setattr(server_reading, "_LOOKED_AT_ONCE", at_once)
    request = log_pb2.ReadRequest(
        job=JOB, stream=STREAM, share={"first": 1, "behind": 3, "of": 5, "below_step": 3}
    )
    wanted = [key for key in KEYS if key.step == 3 or key.microbatch in (1, 2, LATER)]
    assert sent(server, request) == wanted
    assert sent(server, log_pb2.ReadRequest(job=JOB, stream=STREAM)) == KEYS


def test_a_cursor_has_the_share(server: InProcess) -> None:
    with reading(server) as reader, following(reader, STREAM, 0, SHARE) as cursor:
        for key in KEYS:
            if SHARE.has(key):
                assert cursor.get(key, 10.0, never).body[0] == key.step
        with pytest.raises(RecordMissing):
            cursor.get(RecordKey(0, 0, 0), 0.2, never)


def test_a_cursor_keeps_the_share_of_what_an_older_server_sends(
    server: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_reading, "_share_of", lambda _request: None)
    with reading(server) as reader, following(reader, STREAM, 0, SHARE) as cursor:
        cursor.get(KEYS[-1], 10.0, never)
        assert set(cursor._records) == {key for key in KEYS[:-1] if SHARE.has(key)}


@given(key=st.builds(RecordKey, st.integers(0, 5), st.integers(0, 9), st.integers(0, 3)))
def test_shares_of_several_are_everything_once(key: RecordKey) -> None:
    parts = [ReadFilter(first=a, behind=b, of=6, below_step=4) for a, b in ((0, 2), (2, 3), (3, 6))]
    shared = key.step < 4 and key.microbatch < 6
    assert sum(part.has(key) for part in parts) == (1 if shared else 3)


def test_what_declares_records_unlogged_is_everybodys() -> None:
    assert SHARE.has(RecordKey(0, 0, MARK_SLOT))
