"""SharedKeys: what the ranks of one generation tell each other, through the coordinator.

::

    (rank)   known = Known()                                         once
             shared = SharedKeys(client, generation, known)          in every generation
             shared.set(key, value) … shared.get(key, timeout_s)     waits until somebody has set it
    (any thread of it)  shared.interrupt()                           whoever waits gets Gone

Every rank keeps a copy of all keys and asks for what has changed since. While groups are built, each key is set once,
and who sets one then waits for others' (`once`): what is known is not asked for again; what is set goes with the next
question.

A generation's keys end with it, but for those that are about the job (`LASTING_KEYS`: the shapes of what passes between
stages). A coordinator that was started again has none of them, so every rank says those that it knows: they are there
as long as the coordinator or one rank is.
"""

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.text import LASTING_KEYS, listed

_WAIT_S = 1.0
_SAID_BYTES_MAX = 1 << 19
"""Of one call; the coordinator takes twice as much."""


class Gone(ServiceError):
    """There is a newer generation, or the coordinator has begun anew and knows of nothing that was shared."""


@dataclass(kw_only=True, slots=True)
class Known:
    """What a rank takes from one generation to the next."""

    epoch: int = 0
    seen: int = 0
    lasting: dict[str, pb.Shared] = field(default_factory=dict)


class SharedKeys:
    """Thread-safe. Raises Gone, Fenced, ServiceError (the coordinator does not answer), UsageError (too large)."""

    def __init__(self, client: CoordinatorClient, generation: int, known: Known | None = None) -> None:
        self.generation = generation
        self.once = False
        self._client = client
        self._known = known or Known()
        self._shared: dict[str, pb.Shared] = dict(self._known.lasting)
        self._later: list[pb.SharedChange] = []
        """Changes that go with the next call."""
        self._begun = False
        self._number = time.monotonic_ns()  # grows, in another copy of this process's as well
        self._over = False
        self._changing = threading.Lock()
        """Held for a whole call with changes: an answer that was lost is asked for again by its number."""
        self._merging = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        change = pb.SharedChange(key=key, set=value)
        if self.once:
            with self._changing:
                self._later.append(change)
        else:
            self._change(change)

    def add(self, key: str, amount: int) -> int:
        """The sum, which is kept in decimal digits."""
        return int(self._change(pb.SharedChange(key=key, add=amount)).value)

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        """Sets it if it is as expected (empty: or if it is not there). As it is then; None: it is not there."""
        swap = pb.SharedSwap(expected=expected, desired=desired)
        return _value(self._change(pb.SharedChange(key=key, swap=swap)))

    def delete(self, key: str) -> bool:
        """Whether it was there, as far as this rank has heard."""
        known = self.has([key])
        self._change(pb.SharedChange(key=key, delete=True))
        return known

    def has(self, keys: Iterable[str]) -> bool:
        """All of them, now."""
        wanted = list(keys)
        if self._missing(wanted) or not self.once:
            self._ask()
        return not self._missing(wanted)

    def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Until all are there. TimeoutError."""
        wanted = list(keys)
        deadline = time.monotonic() + timeout_s
        if not self.once:
            self._ask()
        while missing := self._missing(wanted):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"nobody has set {listed(missing)} within {timeout_s:g} s")
            self._ask(missing, min(_WAIT_S, left_s))

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits until it is there. TimeoutError."""
        while True:
            self.wait([key], timeout_s)
            with self._merging:
                shared = self._shared.get(key)
            value = None if shared is None else _value(shared)
            if value is not None:
                return value

    def flush(self) -> None:
        """What was set is on its way when this returns."""
        if self._later:
            self._ask()

    def count(self) -> int:
        self._ask()
        with self._merging:
            return sum(shared.HasField("value") for shared in self._shared.values())

    def interrupt(self) -> None:
        """(any thread) This generation is over. A call under way is answered by then, or soon given up."""
        self._over = True

    # --- ---

    def _missing(self, keys: Iterable[str]) -> list[str]:
        with self._merging:
            return [k for k in keys if k not in self._shared or not self._shared[k].HasField("value")]

    def _change(self, change: pb.SharedChange) -> pb.Shared:
        """The key as it is right after it."""
        with self._changing:
            self._later.append(change)
            return self._send()[-1]

    def _send(self, until: Iterable[str] = (), wait_s: float = 0.0) -> list[pb.Shared]:
        """(holding `_changing`) All that is to be changed, in as many calls as it takes; the last one waits."""
        after: list[pb.Shared] = []
        while self._later:
            size = 0
            changes: list[pb.SharedChange] = []
            while self._later and (not changes or size + self._later[0].ByteSize() <= _SAID_BYTES_MAX):
                size += self._later[0].ByteSize()
                changes.append(self._later.pop(0))
            self._number += 1
            after += self._call(self._number, changes, () if self._later else until, wait_s).after
        return after

    def _ask(self, until: Iterable[str] = (), wait_s: float = 0.0) -> None:
        if self._later:
            with self._changing:
                self._send(until, wait_s)
                return
        self._call(0, (), until, wait_s)

    def _call(
        self,
        number: int,
        changes: Iterable[pb.SharedChange],
        until: Iterable[str],
        wait_s: float,
    ) -> pb.ShareReply:
        self._check()
        while True:
            known = self._known
            reply = self._client.share(
                self.generation,
                epoch=known.epoch,
                seen=known.seen,
                number=number,
                changes=changes,
                until=until,
                wait_s=wait_s,
            )
            self._check()
            if not self._merge(reply):
                continue
            if not reply.more:
                return reply

    def _merge(self, reply: pb.ShareReply) -> bool:
        """False: to be asked again, of a coordinator that was started again before this generation."""
        known = self._known
        with self._merging:
            if reply.generation != self.generation or not reply.epoch:
                raise Gone(f"generation {self.generation} is over: it is {reply.generation} now")
            if known.epoch not in (0, reply.epoch):
                if self._begun:
                    raise Gone("the coordinator was started again while ranks were being connected")
                self._forget(reply.epoch)
                return False
            self._begun = True
            known.epoch = reply.epoch
            for shared in reply.news:
                self._take(shared)
            known.seen = max(known.seen, reply.revision)
        return True

    def _forget(self, epoch: int) -> None:
        """What was shared is said again, as far as it is about the job."""
        known = self._known
        again = [pb.SharedChange(key=k, set=s.value) for k, s in known.lasting.items() if s.HasField("value")]
        known.epoch, known.seen = epoch, 0
        known.lasting.clear()
        self._shared.clear()
        self._later = [*again, *self._later]

    def _take(self, shared: pb.Shared) -> None:
        older = self._shared.get(shared.key)
        if older is not None and older.revision >= shared.revision:
            return
        self._shared[shared.key] = shared
        if shared.key.startswith(LASTING_KEYS):
            self._known.lasting[shared.key] = shared

    def _check(self) -> None:
        if self._over:
            raise Gone(f"generation {self.generation} is over")


def _value(shared: pb.Shared) -> bytes | None:
    return shared.value if shared.HasField("value") else None
