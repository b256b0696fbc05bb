"""Frames outside protobuf are the bytes that protobuf would make."""

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import frames_message, split_frames


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 70000])
def test_same_bytes_as_protobuf(size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    message = frames_message([body[:5], memoryview(body)[5:]], size)
    assert message == log_pb2.AppendRequest(frames=body).SerializeToString()
    assert message == log_pb2.ReadReply(frames=body).SerializeToString()
    frames = split_frames(message)
    assert frames is not None
    assert bytes(frames) == body


def test_other_messages_are_left_to_protobuf() -> None:
    request = log_pb2.AppendRequest(opens=[log_pb2.Open(job="j")], frames=b"x")
    assert split_frames(request.SerializeToString()) is None
    assert split_frames(frames_message([b"abc"], 3) + request.SerializeToString()) is None
    assert split_frames(b"") is None
    assert split_frames(b"\x7a\x05abc") is None
    assert split_frames(b"\x7a" + b"\xff" * 12) is None


def test_fault_42_unknown_fields_are_tolerated() -> None:
    message = frames_message([b"abc"], 3) + b"\xfa\x07\x01z"  # field 127, length-delimited
    assert split_frames(message) is None
    assert log_pb2.AppendRequest.FromString(message).frames == b"abc"
