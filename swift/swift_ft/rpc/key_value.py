"""SharedKeys: key-value store of the ranks of one generation, kept by the coordinator.

::

    (rank)   known = Known()                                         once
             shared = SharedKeys(client, generation, known)          in every generation
             shared.set(key, value) … shared.get(key, timeout_s)     waits until some rank has set it
    (any thread of it)  shared.interrupt()                           waiting calls raise Gone

Every rank keeps a copy of all keys and asks only for changes. While groups are built, each key is set once, and its
setter then waits for the keys of others (`once`). In that mode known keys are not asked for again, and keys that were
set travel with the next request.

A generation's keys end with it, except those that concern the job (`LASTING_KEYS`: the shapes of tensors passed between
stages). A restarted coordinator has none of them, so every rank sends those that it knows: they survive as long as the
coordinator or one rank does.
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
"""Limit of the changes in one call, in bytes; the coordinator accepts twice as much."""


class Gone(ServiceError):
    """Error for a newer generation, or for a coordinator that was restarted and has lost all shared keys."""


@dataclass(kw_only=True, slots=True)
class Known:
    """Keys and positions that a rank carries from one generation to the next."""

    epoch: int = 0
    seen: int = 0
    lasting: dict[str, pb.Shared] = field(default_factory=dict)


class SharedKeys:
    """Shared keys of one generation, as one rank sees them. Thread-safe.

    Raises Gone, Fenced, ServiceError (the coordinator does not answer), UsageError (too large).
    """

    def __init__(self, client: CoordinatorClient, generation: int, known: Known | None = None) -> None:
        self.generation = generation
        self.once = False
        self._client = client
        self._known = known or Known()
        self._shared: dict[str, pb.Shared] = dict(self._known.lasting)
        self._later: list[pb.SharedChange] = []
        """Changes that are sent with the next call."""
        self._begun = False
        self._number = time.monotonic_ns()  # increases, also across other SharedKeys of this process
        self._over = False
        self._changing = threading.Lock()
        """Held for a whole call with changes, because a lost answer is requested again by the call's number."""
        self._merging = threading.Lock()

    def set(self, key: str, value: bytes) -> None:
        change = pb.SharedChange(key=key, set=value)
        if self.once:
            with self._changing:
                self._later.append(change)
        else:
            self._change(change)

    def add(self, key: str, amount: int) -> int:
        """Adds to the key's value, which is stored as decimal digits. Returns the sum."""
        return int(self._change(pb.SharedChange(key=key, add=amount)).value)

    def swap(self, key: str, expected: bytes, desired: bytes) -> bytes | None:
        """Sets the key if its value is `expected` (empty: or if the key is missing). Returns the value after that;
        None if the key is missing."""
        swap = pb.SharedSwap(expected=expected, desired=desired)
        return _value(self._change(pb.SharedChange(key=key, swap=swap)))

    def delete(self, key: str) -> bool:
        """Deletes the key. Returns whether it existed, as far as this rank knows."""
        known = self.has([key])
        self._change(pb.SharedChange(key=key, delete=True))
        return known

    def has(self, keys: Iterable[str]) -> bool:
        """Returns whether all keys exist now."""
        wanted = list(keys)
        if self._missing(wanted) or not self.once:
            self._ask()
        return not self._missing(wanted)

    def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Waits until all keys exist. Raises TimeoutError."""
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
        """Waits until the key exists and returns its value. Raises TimeoutError."""
        while True:
            self.wait([key], timeout_s)
            with self._merging:
                shared = self._shared.get(key)
            value = None if shared is None else _value(shared)
            if value is not None:
                return value

    def flush(self) -> None:
        """Sends all pending changes."""
        if self._later:
            self._ask()

    def count(self) -> int:
        self._ask()
        with self._merging:
            return sum(shared.HasField("value") for shared in self._shared.values())

    def interrupt(self) -> None:
        """(any thread) Marks this generation as over. A call in progress raises Gone when its answer arrives."""
        self._over = True

    # --- ---

    def _missing(self, keys: Iterable[str]) -> list[str]:
        with self._merging:
            return [k for k in keys if k not in self._shared or not self._shared[k].HasField("value")]

    def _change(self, change: pb.SharedChange) -> pb.Shared:
        """Sends the change. Returns the key as it is right after it."""
        with self._changing:
            self._later.append(change)
            return self._send()[-1]

    def _send(self, until: Iterable[str] = (), wait_s: float = 0.0) -> list[pb.Shared]:
        """(holding `_changing`) Sends all pending changes, in as many calls as needed; the last one has `until`."""
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
            request = pb.ShareRequest(
                generation=self.generation,
                epoch=known.epoch,
                seen=known.seen,
                number=number,
                changes=changes,
                until=until,
                wait_s=wait_s,
            )
            reply: pb.ShareReply = self._client.call(request)
            self._check()
            if not self._merge(reply):
                continue
            if not reply.more:
                return reply

    def _merge(self, reply: pb.ShareReply) -> bool:
        """Merges a reply. Returns False if the coordinator was restarted before this generation: the call is repeated.
        Raises Gone if the generation is over, or if the coordinator was restarted during it."""
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
        """Drops all keys and queues those that concern the job, to be sent to the restarted coordinator."""
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
