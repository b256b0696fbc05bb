"""What the gate acknowledges can be listed, read, inspected and recovered; what could not be is refused by it.

Records are made by hand, as a client in another language would: sound checksums, and fields as it likes."""

from pathlib import Path
from unittest import mock

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swift_ft.errors import ServiceError
from swift_ft.log import admin
from swift_ft.log.manifest import MANIFEST, decode_manifest
from swift_ft.log.protocol import Reason
from swift_ft.log.record import MARK_SLOT, STEP_MAX, RecordKey
from swift_ft.log.segment import SegmentHeader, encode_segment_header
from swift_ft.tools.inspect import DirectoryLog
from swift_ft_services.logserver.storage import DirectoryStorage
from tests.unit.log.append_call import TIMEOUT_S, Call
from tests.unit.log.frames import JOB, STREAM, frame_of, records_of, write_segment
from tests.unit.log.service import InProcess
from tests.unit.log.storages import on_disk, recovered, reopened

MAX_32, MAX_64 = (1 << 32) - 1, (1 << 64) - 1
EDGES_64 = [0, 1, 2, STEP_MAX - 1, STEP_MAX, STEP_MAX + 1, (1 << 63) - 1, 1 << 63, MAX_64]
EDGES_32 = [0, 1, 2, MAX_32 - 1, MAX_32]


def record(sequence: int, key: RecordKey, body: bytes = b"", **fields: object) -> bytes:
    return frame_of(sequence, body=body, key=key, **fields)[1]


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (record(0, RecordKey(2, 5, MARK_SLOT)), "a mark of 6 steps that ends with step 2"),
        (record(0, RecordKey(0, MAX_32, MARK_SLOT)), "a mark of"),
        (record(0, RecordKey(4, 1, MARK_SLOT), b"x"), "a mark holds no tensor"),
        (record(0, RecordKey(4, 1, MARK_SLOT), dtype="int8"), "a mark holds no tensor"),
        (record(0, RecordKey(4, 1, MARK_SLOT), digest=bytes(16)), "a mark's digest"),
        (record(0, RecordKey(STEP_MAX + 1, 0, 0)), "steps are at most"),
        (record(0, RecordKey(MAX_64, 0, MARK_SLOT)), "steps are at most"),
    ],
)
def test_a_record_that_nobody_could_use_is_refused(server: InProcess, frame: bytes, words: str) -> None:
    call = Call(server)
    call.open()
    call.send(frame)
    _, reason, message = call.refused()
    assert reason == Reason.INVALID
    assert words in message
    assert [stream.records for stream in admin.inventory(server.address, JOB, TIMEOUT_S)] == [0]


keys = st.builds(
    RecordKey,
    st.sampled_from(EDGES_64) | st.integers(0, 40),
    st.sampled_from(EDGES_32) | st.integers(0, 40),
    st.sampled_from(EDGES_32) | st.just(MARK_SLOT),
)


def is_possible(key: RecordKey) -> bool:
    return key.step <= STEP_MAX and (key.slot != MARK_SLOT or key.microbatch <= key.step)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(st.tuples(keys, st.binary(max_size=40)), min_size=1, max_size=6))
def test_what_is_acknowledged_can_be_used(
    tmp_path_factory: pytest.TempPathFactory, wanted: list[tuple[RecordKey, bytes]]
) -> None:
    directory = tmp_path_factory.mktemp("log")
    there: dict[RecordKey, bytes] = {}
    with InProcess(DirectoryStorage(directory, 1 << 20)) as server:
        call = Call(server)
        call.open()
        for key, body in wanted:
            body = b"" if key.slot == MARK_SLOT else body
            sequence = len(there)
            call.send(record(sequence, key, body))
            try:
                call.until_acked(sequence + 1)
            except grpc.RpcError:  # the next one begins a call of its own
                assert key in there or not is_possible(key)
                call = Call(server)
                call.open()
            else:
                assert is_possible(key)
                there[key] = body
        (found,) = admin.inventory(server.address, JOB, TIMEOUT_S)
        assert found.records == len(there)
        assert not found.corrupt
        steps = [key.step for key in there]
        assert found.has_records == bool(steps)
        assert (found.first_step, found.last_step) == (min(steps, default=0), max(steps, default=0))
        assert {r.key: bytes(r.body) for r in records_of(server.read())} == there
    facts = DirectoryLog(directory).facts(JOB, verify=True)
    assert facts.verified is not None
    assert not facts.verified.damage
    storage, stream = reopened(directory)
    storage.close()
    assert [entry.key for entry in stream.by_sequence.values()] == list(there)
    assert not stream.holes


def test_a_mark_that_an_older_server_took_is_damage(tmp_path: Path) -> None:
    """Found at the start: the stream says so, and nothing raises."""
    on_disk(tmp_path).close()
    (tmp_path / JOB / STREAM).mkdir()
    impossible = record(1, RecordKey(2, 5, MARK_SLOT))
    uid = decode_manifest((tmp_path / JOB / MANIFEST).read_bytes()).uid
    data = (
        encode_segment_header(SegmentHeader(JOB, STREAM, 0, uid, 1))
        + frame_of(0)[1]
        + impossible
        + frame_of(2)[1]
    )
    write_segment(tmp_path / JOB / STREAM, 0, data)
    found = recovered(tmp_path)
    assert list(found.by_sequence) == [0, 2]
    assert [(hole.sequence, hole.end_sequence) for hole in found.holes] == [(1, 2)]
    assert "a mark of 6 steps" in found.holes[0].reason


def test_a_bug_is_answered_in_one_line(server: InProcess, capfd: pytest.CaptureFixture[str]) -> None:
    bug = mock.Mock(side_effect=ValueError("Value out of range: -3"))
    said = r"internal error in Inventory: ValueError\('Value out of range: -3'\)"
    with mock.patch.object(server.engine.reading, "inventory", bug), pytest.raises(ServiceError, match=said):
        admin.inventory(server.address, JOB, TIMEOUT_S)
