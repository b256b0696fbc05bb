"""Frames out of messages. A message holds frames one after the other, and may end within a body: then the next
message of the call begins with the rest of it. So a large record travels in messages of a few megabytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import crc32c

from swift.errors import RecordCorrupt, RecordInvalid
from swift.log.frame import Bytes, FrameHeader, decode_header

MESSAGE_BYTES = 2 << 20
"""No message is made larger, but for a header. gRPC is fastest with 2 to 4 MiB."""


@dataclass(slots=True)
class _Begun:
    """A frame whose end has not come yet."""

    header: FrameHeader
    parts: list[memoryview]
    missing: int
    crc: int


class Assembler:
    """Takes the messages of one call, gives frames, their bodies verified."""

    def __init__(self, body_bytes_max: int) -> None:
        self._body_bytes_max = body_bytes_max
        self._begun: _Begun | None = None

    def feed(self, frames: memoryview) -> Iterator[tuple[FrameHeader, list[memoryview]]]:
        """Headers, and the bytes of each frame (header included) in one or more pieces that share memory with the
        messages. Raises FrameIncomplete, RecordInvalid, FrameOversize, and RecordCorrupt for a wrong body."""
        while frames:
            if self._begun is None:
                header = decode_header(frames, 0, self._body_bytes_max)
                self._begun = _Begun(header, [], header.frame_bytes, 0)
                body_at = header.header_bytes
            else:
                body_at = 0
            begun = self._begun
            part, frames = frames[: begun.missing], frames[begun.missing :]
            begun.parts.append(part)
            begun.missing -= len(part)
            begun.crc = crc32c.crc32c(part[body_at:], begun.crc)
            if begun.missing == 0:
                self._begun = None
                if begun.crc != begun.header.body_crc:
                    raise RecordCorrupt(f"{begun.header.key}: its body's checksum does not match")
                yield begun.header, begun.parts

    def finish(self) -> None:
        """No message follows. Raises RecordInvalid if a frame is not whole."""
        if self._begun is not None:
            raise RecordInvalid(
                f"{self._begun.header.key}: {self._begun.missing} bytes of its frame never came"
            )


def cut(body: Bytes) -> list[Bytes]:
    """Pieces of about the same size, none over MESSAGE_BYTES."""
    count = -(-len(body) // MESSAGE_BYTES)
    if count <= 1:
        return [body]
    each = -(-len(body) // count)
    view = memoryview(body)
    return [view[at : at + each] for at in range(0, len(view), each)]
