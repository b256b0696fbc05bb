"""The memory of a simulated process, in which the bodies of its records lie, and which servers may read.

What nobody waits for any more is overwritten at once, as in a ring. Now and then a body is another one for a while: the
process has written where it should not.
"""

from swift_ft._pb import log_pb2
from swift_ft.log.protocol import frames_message
from swift_ft.log.shared_memory import PLACE
from swift_ft_services.logserver.shared_memory import Part, SharedBody
from tests.sim.kernel import Process

NEAR = 0.5
"""Part of the calls whose server gets the memory."""
_DISTURBED = 0.02


class SimMemory:
    def __init__(self, process: Process) -> None:
        self._process = process
        self._content = bytearray()
        self._sizes: dict[int, int] = {}
        self._wrong: set[int] = set()
        """Places of bodies that are others now."""

    @property
    def size(self) -> int:
        return len(self._content)

    def put(self, body: bytes) -> int:
        """Returns its place."""
        place = len(self._content)
        self._content += body
        self._sizes[place] = len(body)
        if self._process.kernel.chance(_DISTURBED):
            self._process.kernel.count("body overwritten for a while")
            self._wrong.add(place)
            self._process.later(self._process.kernel.between(0.0, 0.5), self._wrong.discard, place)
        return place

    def keep(self, places: set[int]) -> None:
        """Frees all others."""
        for place in self._sizes.keys() - places:
            size = self._sizes.pop(place)
            self._content[place : place + size] = bytes(255 for _ in range(size))

    def read_into(self, offset: int, buffer: memoryview) -> bool:
        buffer[:] = self._content[offset : offset + len(buffer)]
        if any(place <= offset < place + self._sizes.get(place, 0) for place in self._wrong):
            buffer[0] ^= 1
        return True

    def body(self, place: int, size: int) -> bytes:
        """As its process has written it."""
        return bytes(self._content[place : place + size])


def whole(message: bytes, memory: SimMemory) -> bytes:
    """The message as it would be if bodies were sent."""
    shared, frames = log_pb2.AppendRequest.FromString(message).shared, b""
    if not shared:
        return message
    while shared:
        head = int.from_bytes(shared[6:8], "little")
        (place,) = PLACE.unpack_from(shared, head)
        frames += shared[:head] + memory.body(place, int.from_bytes(shared[64:72], "little"))
        shared = shared[head + PLACE.size :]
    return frames_message([frames], len(frames))


def written(part: Part) -> bytes:
    """The bytes that a server has accepted."""
    if isinstance(part, SharedBody):
        assert isinstance(part.memory, SimMemory)
        return part.memory.body(part.offset, len(part))
    return bytes(part)
