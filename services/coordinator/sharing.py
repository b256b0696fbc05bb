"""What the ranks of a job tell each other: a few keys, in memory.

Process groups are built by it. So it is neither on a machine that trains, nor durable: a coordinator that begins anew
has an empty one, under another `epoch`. Ranks that still need it notice that, say that a connection is lost, and build
the next generation.

    (servicer)  `change` makes a member's changes, `wait` waits for others', `news` is what is new to it
    (driver)    `begin` at a new generation: all keys are dropped but those that are about the job (`LASTING_KEYS`), and
                whoever waits is answered; `end` once the job is over

Every rank has a copy of all keys and asks for what it lacks: a group of n ranks takes each of them a few calls, not n.
"""

import asyncio
import secrets
from collections.abc import Iterable, Mapping, Sequence

from services.coordinator.commands import Refusal, Refused
from swift._pb import coordinator_pb2 as pb
from swift.names import LASTING_KEYS

KEY_BYTES_MAX = 1 << 10
VALUE_BYTES_MAX = 1 << 18
NEWS_BYTES_MAX = 1 << 20
"""Of one answer; the rest comes with the next."""
KEYS_MAX = 1 << 10
KEYS_PER_RANK = 1 << 13
BYTES_MAX = 1 << 22
BYTES_PER_RANK = 1 << 20
BYTES_EVER_MAX = 1 << 27
UNTIL_MAX = 1 << 16
"""Keys that one call waits for."""
DELETED_MAX = 1 << 10
"""Deleted keys that are remembered, for ranks that have not heard of it."""
_INT64 = 1 << 63


class Sharing:
    """The keys of one job. On the driver's loop alone."""

    def __init__(self, generation: int, members: int) -> None:
        self.generation = generation
        self.epoch = secrets.randbits(63) + 1
        self.revision = 0
        self._keys_max = KEYS_MAX + KEYS_PER_RANK * members
        self._bytes_max = min(BYTES_EVER_MAX, BYTES_MAX + BYTES_PER_RANK * members)
        self._bytes = 0
        self._shared: dict[str, pb.Shared] = {}
        """The newest change comes last."""
        self._answered: dict[str, tuple[int, list[pb.Shared]]] = {}
        """By incarnation: the number of the last request with changes, and what came of them."""
        self._deleted: dict[str, None] = {}
        self._waiting: set[asyncio.Event] = set()
        self.ended = False

    def begin(self, generation: int) -> None:
        self.generation = generation
        for key in [key for key in self._shared if not key.startswith(LASTING_KEYS)]:
            self._bytes -= _size(self._shared.pop(key))
            self._deleted.pop(key, None)
        self._answered.clear()
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def change(self, incarnation: str, number: int, changes: Iterable[pb.SharedChange]) -> list[pb.Shared]:
        """Makes them, all or none. Each key as it is right after its change. Refusal."""
        before, answer = self._answered.get(incarnation, (0, []))
        if number <= before:  # said again, because the answer was lost
            return answer if number == before else []
        made: dict[str, bytes | None] = {}
        answer = []
        for change in changes:
            made[change.key] = _changed(change, made.get(change.key, self._value(change.key)))
            answer.append(pb.Shared(key=change.key, value=made[change.key]))
        self._check_room(made)
        for key, value in made.items():
            self._put(key, value)
        self._answered[incarnation] = (number, answer)
        return answer

    def news(self, seen: int) -> tuple[list[pb.Shared], int, bool]:
        """What has changed since that revision, the revision up to which that is all, and whether there is more."""
        later = []
        for shared in reversed(self._shared.values()):
            if shared.revision <= seen:
                break
            later.append(shared)
        found: list[pb.Shared] = []
        size = 0
        while later and (not found or size + _size(later[-1]) <= NEWS_BYTES_MAX):
            found.append(later.pop())
            size += _size(found[-1])
        return found, found[-1].revision if later else self.revision, bool(later)

    async def wait(self, keys: Sequence[str], wait_s: float) -> None:
        """Until all of them are there, or this is over."""
        changed, generation = asyncio.Event(), self.generation
        missing: list[str] = []
        self._waiting.add(changed)
        try:
            async with asyncio.timeout(wait_s):
                while self.is_in(generation):
                    while missing and self._value(missing[-1]) is not None:
                        missing.pop()  # each is looked at once, however often something changes
                    missing = missing or [key for key in keys if self._value(key) is None]
                    if not missing:
                        return
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(changed)

    def is_in(self, generation: int) -> bool:
        return not self.ended and self.generation == generation

    def _value(self, key: str) -> bytes | None:
        shared = self._shared.get(key)
        return shared.value if shared is not None and shared.HasField("value") else None

    def _check_room(self, made: Mapping[str, bytes | None]) -> None:
        keys, size = len(self._shared), self._bytes
        for key, value in made.items():
            new = pb.Shared(key=key, value=value)
            if not 0 < len(key.encode()) <= KEY_BYTES_MAX or len(new.value) > VALUE_BYTES_MAX:
                raise Refusal(
                    Refused.INVALID,
                    f"a key of {len(key.encode())} bytes with a value of {len(new.value)}: at most {KEY_BYTES_MAX} and "
                    f"{VALUE_BYTES_MAX} are shared",
                )
            old = self._shared.get(key)
            keys += old is None
            size += _size(new) - (0 if old is None else _size(old))
        if keys > self._keys_max or size > self._bytes_max:
            raise Refusal(
                Refused.INVALID,
                f"{keys} keys with {size} bytes: the ranks of this job share at most {self._keys_max} and "
                f"{self._bytes_max}",
            )

    def _put(self, key: str, value: bytes | None) -> None:
        if key in self._shared:
            if self._value(key) == value:
                return
            self._bytes -= _size(self._shared.pop(key))
        elif value is None:
            return
        self.revision += 1
        new = self._shared[key] = pb.Shared(key=key, value=value, revision=self.revision)
        self._bytes += _size(new)
        self._deleted.pop(key, None)
        if value is None:
            self._deleted[key] = None
            if len(self._deleted) > DELETED_MAX:
                oldest = next(iter(self._deleted))
                del self._deleted[oldest]
                self._bytes -= _size(self._shared.pop(oldest))
        self._wake()

    def _wake(self) -> None:
        for changed in self._waiting:
            changed.set()


def _size(shared: pb.Shared) -> int:
    return len(shared.key.encode()) + len(shared.value)


def _changed(change: pb.SharedChange, value: bytes | None) -> bytes | None:
    """The key's next value; None: it has none."""
    match change.WhichOneof("what"):
        case "set":
            return change.set
        case "add":
            return _sum(change, value)
        case "swap":
            swaps = change.swap.expected == (value or b"")
            return change.swap.desired if swaps else value
        case "delete":
            return None
    raise Refusal(Refused.INVALID, f"nothing is to be done with {change.key[:KEY_BYTES_MAX]}")


def _sum(change: pb.SharedChange, value: bytes | None) -> bytes:
    digits = (value or b"0").removeprefix(b"-")
    if digits.isdigit() and len(digits) < 20:
        total = int(value or b"0") + change.add
        if -_INT64 <= total < _INT64:
            return b"%d" % total
    raise Refusal(
        Refused.INVALID, f"{change.key[:KEY_BYTES_MAX]} is no number that {change.add} can be added to"
    )
