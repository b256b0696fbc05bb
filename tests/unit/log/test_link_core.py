"""What a writer does with a server's answers, and how quick it is: `LinkCore` and `LinkMeter`, without a connection."""

from dataclasses import replace

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft._pb import log_pb2
from swift_ft.errors import LogUnavailable, SequenceConflict, ServiceError, StaleGeneration, UsageError
from swift_ft.log.frame import BODY_BYTES_MAX, MESSAGE_BYTES, Assembler, decode_header
from swift_ft.log.protocol import MESSAGE_BYTES_MAX, Reason, split_frames
from swift_ft.log.record import stream_tag
from swift_ft.log.sender_core import BATCH_BYTES, FULL_RETRY_S, RETRY_S, LinkCore, LinkMeter, Outgoing
from swift_ft.log.shared_memory import PLACE
from tests.unit.log.frames import JOB, STREAM, body_of, frame_of

SIZES = [1, BATCH_BYTES - 1000, BATCH_BYTES, MESSAGE_BYTES - 1, MESSAGE_BYTES, MESSAGE_BYTES + 1]
ZEROS = {size: crc32c.crc32c(bytes(size)) for size in (*SIZES, 2 * MESSAGE_BYTES)}


def outgoing(step: int) -> Outgoing:
    header, frame = frame_of(step)
    return Outgoing(
        stream=STREAM,
        key=header.key,
        dtype=header.dtype,
        shape=header.shape,
        raw_bytes=header.raw_bytes,
        codec=header.codec,
        stored=frame[header.header_bytes :],
        body_crc=header.body_crc,
        digest=header.digest,
    )


def sized(step: int, size: int, stream: str = STREAM) -> Outgoing:
    fields = {"stored": bytes(size), "body_crc": ZEROS[size], "raw_bytes": size, "shape": (size,)}
    return replace(outgoing(step), stream=stream, **fields)


def opened(
    core: LinkCore, next_sequence: int, credit: int = 1 << 20, now: float = 0.0
) -> tuple[int, log_pb2.Open]:
    """A call whose stream the server has opened; what the writer asked for."""
    number = core.begin_call(now)
    message = core.next_message(number)
    assert message is not None
    (asked,) = log_pb2.AppendRequest.FromString(message).opens
    reply = log_pb2.AppendReply(
        credit_bytes=credit, opened=[log_pb2.Opened(stream=STREAM, next_sequence=next_sequence)]
    )
    core.on_reply(number, reply, now)
    return number, asked


def acked(core: LinkCore, number: int, durable: int, now: float = 0.0) -> int:
    reply = log_pb2.AppendReply(acked=[log_pb2.Acked(stream=STREAM, durable_sequence=durable)])
    return core.on_reply(number, reply, now)


def sequences(message: bytes | None) -> list[int]:
    frames = split_frames(message) if message is not None else None
    found = []
    while frames:
        header = decode_header(frames)
        found.append(header.sequence)
        frames = frames[header.frame_bytes :]
    return found


@pytest.fixture
def core() -> LinkCore:
    core = LinkCore("here", JOB, 1, 0.0, "")
    for step in range(3):
        core.enqueue(outgoing(step), 0.0)
    return core


def test_what_was_not_acknowledged_is_sent_again_under_its_sequences(core: LinkCore) -> None:
    first, _ = opened(core, 5)
    assert sequences(core.next_message(first)) == [5, 6, 7]
    assert acked(core, first, 6) == 1
    assert core.on_failure(first, "", "gone", ServiceError("gone")) == RETRY_S
    again, asked = opened(core, 6)
    assert asked.acked_sequence == 6
    assert sequences(core.next_message(again)) == [6, 7]
    assert acked(core, first, 8) == 0  # of a call that is over
    assert core.pending == 2
    assert acked(core, again, 8) == 2
    assert core.pending == 0


def in_memory(message: bytes | None) -> list[tuple[int, int]]:
    """Sequence and place of each frame."""
    assert message is not None
    shared, found = log_pb2.AppendRequest.FromString(message).shared, []
    while shared:
        header = decode_header(shared)
        shared = shared[header.header_bytes :]
        found.append((header.sequence, *PLACE.unpack_from(shared)))
        shared = shared[PLACE.size :]
    return found


def test_bodies_that_the_server_can_read_are_not_sent(core: LinkCore) -> None:
    places = [100, -1, 300, 400]  # the second one is compressed
    core.enqueue(outgoing(3), 0.0)
    for record, place in zip(core._streams[STREAM].unsent, places, strict=True):
        record.place = place
    number, _ = opened(core, 0)
    core.share(number)
    assert in_memory(core.next_message(number)) == [(0, 100)]
    assert sequences(core.next_message(number)) == [1]
    assert in_memory(core.next_message(number)) == [(2, 300), (3, 400)]
    assert core._credit == (1 << 20) - sum(len(frame_of(sequence)[1]) for sequence in range(4))
    core.on_failure(number, "", "gone", ServiceError("gone"))
    again, _ = opened(core, 0)
    core.share(number)  # of a call that is over
    assert sequences(core.next_message(again)) == [0, 1, 2, 3]


def test_a_body_in_memory_is_as_large_as_one_that_is_sent(core: LinkCore) -> None:
    number, _ = opened(core, 0, credit=1 << 30)
    core.share(number)
    core.next_message(number)
    for step in range(4):
        core.enqueue(replace(sized(step, BATCH_BYTES), place=step * BATCH_BYTES), 0.0)
    assert [len(in_memory(core.next_message(number))) for _ in range(4)] == [1, 1, 1, 1]
    core.on_reply(number, log_pb2.AppendReply(welcome=log_pb2.Welcome(body_bytes_max=BATCH_BYTES - 1)), 0.0)
    core.enqueue(replace(sized(4, BATCH_BYTES), place=0), 0.0)
    assert core.next_message(number) is None
    with pytest.raises(UsageError, match="are more than log server here accepts"):
        raise core.error(0.0, 0.0) or AssertionError


def test_nothing_is_sent_without_credit(core: LinkCore) -> None:
    number, _ = opened(core, 0, credit=1)
    assert sequences(core.next_message(number)) == [0]
    assert core.next_message(number) is None


def test_after_a_reset_the_writer_claims_nothing(core: LinkCore) -> None:
    """The server need not have kept what it acknowledged once: it has been dropped, and is no hole."""
    number, _ = opened(core, 0)
    core.next_message(number)
    acked(core, number, 2)
    core.set_generation(2, discard=True, now=0.0)
    assert core.pending == 0
    core.enqueue(outgoing(9), 0.0)
    number, asked = opened(core, 1)
    assert (asked.generation, asked.acked_sequence) == (2, 0)
    assert sequences(core.next_message(number)) == [1]


def test_a_successor_goes_on_where_a_writer_was_killed() -> None:
    core = LinkCore("here", JOB, 1, 0.0, "")
    core.resume(STREAM, 4, 7)
    waiting = []
    for sequence in (3, 5, 6, -1):
        record = outgoing(max(sequence, 0))
        record.sequence = sequence
        waiting.append(core.enqueue(record, 0.0))
    assert waiting == [False, True, True, True]  # what is durable is not sent again
    number, asked = opened(core, 6)
    assert asked.acked_sequence == 4
    assert sequences(core.next_message(number)) == [5, 6, 7]
    acked(core, number, 8)
    assert (core.pending, core.acked(STREAM)) == (0, 8)
    assert core.acked("another") == 0


def test_a_record_is_not_let_go_before_its_last_message(core: LinkCore) -> None:
    """Another writer's copy of it may be durable while this one is still sent: its memory is in use."""
    core.enqueue(sized(3, 2 * MESSAGE_BYTES), 0.0)
    number, _ = opened(core, 0, credit=1 << 30)
    assert sequences(core.next_message(number)) == [0, 1, 2]
    core.next_message(number)
    acked(core, number, 4)
    assert core.pending == 0
    assert core.acked(STREAM) == 3
    core.next_message(number)
    assert core.acked(STREAM) == 4


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from([STREAM, "other"])), min_size=1, max_size=6)
)
def test_no_message_is_larger_than_a_server_takes(records: list[tuple[int, str]]) -> None:
    """And all frames come whole, in the order of their streams."""
    core = LinkCore("here", JOB, 1, 0.0, "")
    for step, (size, stream) in enumerate(records):
        core.enqueue(sized(step, size, stream), 0.0)
    number = core.begin_call(0.0)
    opens = log_pb2.AppendRequest.FromString(core.next_message(number) or b"").opens
    reply = [log_pb2.Opened(stream=asked.stream, next_sequence=0) for asked in opens]
    core.on_reply(number, log_pb2.AppendReply(credit_bytes=1 << 30, opened=reply), 0.0)
    assembler, came = Assembler(BODY_BYTES_MAX), []
    while (message := core.next_message(number)) is not None:
        assert len(message) <= MESSAGE_BYTES_MAX
        frames = split_frames(message)
        assert frames is not None
        came += [
            (header.stream_tag, header.key.step, header.raw_bytes) for header, _ in assembler.feed(frames)
        ]
    assembler.finish()
    sent = [(stream_tag(JOB, stream), step, size) for step, (size, stream) in enumerate(records)]
    assert sorted(came) == sorted(sent)


def test_the_pace_is_of_the_time_in_which_something_waits(core: LinkCore) -> None:
    number, _ = opened(core, 0)
    core.next_message(number)
    assert core.meter.pace() is None
    acked(core, number, 3, now=2.0)
    raw = sum(len(body_of(step)) for step in range(3))
    assert core.meter.pace() == raw / 2.0
    core.enqueue(outgoing(3), 10.0)
    core.next_message(number)
    core.end_call()  # cut: the time since then is not its speed
    number, _ = opened(core, 3, now=20.0)
    core.next_message(number)
    acked(core, number, 4, now=21.0)
    assert core.meter.pace() == pytest.approx((raw / 2.0 + len(body_of(3)) / 1.0) / 2)


def test_a_stream_that_somebody_else_has_written(core: LinkCore) -> None:
    opened(core, 0)
    with pytest.raises(SequenceConflict):
        opened(core, 4)


def test_what_a_refusal_means(core: LinkCore) -> None:
    refused = ServiceError("refused")
    number, _ = opened(core, 0)
    assert core.on_failure(number, Reason.FULL, "full", refused) == FULL_RETRY_S
    # All that is under way is sent again for one record, which may be refused again.
    assert core.on_failure(number, Reason.CORRUPT, "damaged", refused) == FULL_RETRY_S
    assert core.may_connect
    assert core.error(60.0, 59.0) is None
    assert isinstance(core.error(60.0, 61.0), LogUnavailable)
    core.on_failure(number, Reason.STALE_GENERATION, "fenced", refused)
    assert not core.may_connect
    assert isinstance(core.error(60.0, 61.0), StaleGeneration)
    core.set_generation(2, discard=False, now=61.0)
    assert core.may_connect
    number = core.begin_call(0.0)
    core.on_failure(number, Reason.CONFLICT, "conflict", refused)
    assert core.error(60.0, 61.0) is refused
    assert not core.may_connect


# -- the pace: acknowledgements in, bytes per second out -------------------------------------------------------


def test_the_pace_is_that_of_the_busy_time() -> None:
    meter = LinkMeter()
    for start in range(10):  # 10 MB in 20 ms, then 80 ms of nothing
        meter.busy(start / 10)
        meter.acked(10_000_000, start / 10 + 0.02, idle=True)
        if start == 4:
            assert meter.pace() is None  # 0.42 s: the window is not full
    assert meter.pace() == pytest.approx(500e6)


def test_a_link_that_is_never_idle() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    for ack in range(1, 11):
        meter.busy(ack / 10 - 0.05)  # more comes before the last one is acknowledged
        meter.acked(30_000_000, ack / 10, idle=False)
    assert meter.pace() == pytest.approx(300e6)


def test_the_newest_window_counts_half() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 1.0, idle=False)
    meter.acked(200_000_000, 2.0, idle=False)
    assert meter.pace() == pytest.approx(150e6)


def test_the_time_of_a_cut_link_is_not_its_speed() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 0.4, idle=False)
    meter.forget_window()
    meter.acked(1, 50.0, idle=False)  # a late acknowledgement of the old connection
    meter.busy(60.0)
    meter.acked(100_000_000, 61.0, idle=True)
    assert meter.pace() == pytest.approx(100e6)
