"""torch's store for one generation's process groups, kept by the coordinator.

torch keeps such a store in one of the ranks, or in a launcher on the first machine, and loses it with that machine.
The coordinator runs on no machine that trains.

::

    (rank)   stores = stores_of(client)                              once
             store = stores(generation)                              in every generation
             store.set(key, value) … store.get(key)                  waits until some rank has set it
    (any thread of it)  store.interrupt()                            waiting calls raise

Every rank keeps a copy of all keys and asks only for changes. While groups are built, each key is set once, and its
setter then waits for the keys of others (`once`). In that mode known keys are not asked for again, and keys that were
set travel with the next request.

A generation's keys end with it, except those that concern the job (`LASTING_KEYS`: the shapes of tensors passed between
stages). A restarted coordinator has none of them, so every rank sends those that it knows: they survive as long as the
coordinator or one rank does.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.coordinator_client import CoordinatorClient, Unanswered
from swift_ft.text import LASTING_KEYS, listed, whole_number

_WAIT_S = 1.0
_SAID_BYTES_MAX = 1 << 19
"""Limit of the changes in one call, in bytes; the coordinator accepts twice as much."""
_ASK_S = 0.2
_TOLD_WITHIN_S = 10.0


@dataclass(kw_only=True, slots=True)
class Known:
    """Keys and positions that a rank carries from one generation to the next."""

    epoch: int = 0
    seen: int = 0
    lasting: dict[str, pb.Shared] = field(default_factory=dict)


class CoordinatorStore(Store):
    """The keys that the ranks of one generation share, as one rank sees them. Thread-safe.

    torch calls it from C++, where a wait ends only by its timeout. So the errors here are those that a lost peer could
    cause, and `interrupt` ends waits: DistNetworkError after a newer generation, after a restart of the coordinator
    that has lost all keys, and if the coordinator does not answer; DistStoreError after a timeout; and Fenced, and
    UsageError for what is too large. The builder of a group must keep the store as long as the group: torch keeps only
    the C++ half, which does not work without this object.
    """

    def __init__(self, client: CoordinatorClient, generation: int, known: Known | None = None) -> None:
        super().__init__()
        self.generation = generation
        self.once = True
        """Each key is set once, until `built`."""
        self._client = client
        self._known = known or Known()
        self._shared: dict[str, pb.Shared] = dict(self._known.lasting)
        self._later: list[pb.SharedChange] = []
        """Changes that are sent with the next call."""
        self._begun = False
        self._number = time.monotonic_ns()  # increases, also across other stores of this process
        self._over = False
        self._changing = threading.Lock()
        """Held for a whole call with changes, because a lost answer is requested again by the call's number."""
        self._merging = threading.Lock()
        self._members = 0
        """Members of the group that is being built; 0: none is."""

    @contextmanager
    def building(self, members: int) -> Iterator[None]:
        """Marks that a group of so many members is being built. Each of them waits for each other's key
        (`.../<place>`), one after another. So a wait for one key becomes a wait for all, answered at once."""
        self._members = members
        try:
            yield
        finally:
            self._members = 0

    timeout: timedelta  # torch's property, which its stub lacks

    def built(self) -> None:
        """Allows keys to be set repeatedly: from now on they are the trainer's."""
        self.once = False
        if self._later:
            self._ask()

    def interrupt(self) -> None:
        """(watcher thread) Marks this generation as over. A call in progress raises when its answer arrives."""
        self._over = True

    # --- methods that torch calls, under its names ---

    def set(self, key: str, value: str | bytes) -> None:
        change = pb.SharedChange(key=key, set=_bytes(value))
        if self.once:
            with self._changing:
                self._later.append(change)
        else:
            self._change(change)

    def get(self, key: str) -> bytes:
        """Waits until the key exists and returns its value."""
        while True:
            self._wait([key], self.timeout.total_seconds())
            with self._merging:
                shared = self._shared.get(key)
            if shared is not None and shared.HasField("value"):
                return shared.value

    def add(self, key: str, amount: int) -> int:
        """Adds to the key's value, which is stored as decimal digits. Returns the sum."""
        return int(self._change(pb.SharedChange(key=key, add=amount)).value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Sets the key if its value is `expected` (empty: or if the key is missing). Returns the value after that;
        `expected` if the key is missing."""
        swap = pb.SharedSwap(expected=_bytes(expected), desired=_bytes(desired))
        after = self._change(pb.SharedChange(key=key, swap=swap))
        return after.value if after.HasField("value") else _bytes(expected)

    def delete_key(self, key: str) -> bool:
        """Deletes the key. Returns whether it existed, as far as this rank knows."""
        known = self.check([key])
        self._change(pb.SharedChange(key=key, delete=True))
        return known

    def num_keys(self) -> int:
        self._ask()
        with self._merging:
            return sum(shared.HasField("value") for shared in self._shared.values())

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys exist now."""
        if self._missing(keys) or not self.once:
            self._ask()
        return not self._missing(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys exist."""
        if self._members and len(keys) == 1:
            head, slash, member = keys[0].rpartition("/")
            if whole_number(member) is not None:
                keys = [f"{head}{slash}{place}" for place in range(self._members)]
        self._wait(keys, (timeout or self.timeout).total_seconds())

    def _wait(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if not self.once:
            self._ask()
        while missing := self._missing(keys):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise dist.DistStoreError(
                    f"process group: timed out: nobody has set {listed(missing)} within {timeout_s:g} s"
                )
            self._ask(missing, min(_WAIT_S, left_s))

    def clone(self) -> "CoordinatorStore":
        return self  # any thread may use it

    # C++ calls these two under its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # --- the coordinator ---

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
        self._check_over()
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
            try:
                reply: pb.ShareReply = self._client.call(request)
            except Unanswered as away:
                raise dist.DistNetworkError(f"process group: {away}") from None
            self._check_over()
            if not self._merge(reply):
                continue
            if not reply.more:
                return reply

    def _merge(self, reply: pb.ShareReply) -> bool:
        """Merges a reply. Returns False if the coordinator was restarted before this generation: the call is repeated.
        Raises DistNetworkError if the generation is over, or if the coordinator was restarted during it."""
        known = self._known
        with self._merging:
            if reply.generation != self.generation or not reply.epoch:
                raise _gone(f"generation {self.generation} is over: it is {reply.generation} now")
            if known.epoch not in (0, reply.epoch):
                if self._begun:
                    raise _gone("the coordinator was started again while ranks were being connected")
                self._forget(reply.epoch)
                return False
            self._begun = True
            known.epoch = reply.epoch
            for shared in reply.news:
                self._keep_newest(shared)
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

    def _keep_newest(self, shared: pb.Shared) -> None:
        older = self._shared.get(shared.key)
        if older is not None and older.revision >= shared.revision:
            return
        self._shared[shared.key] = shared
        if shared.key.startswith(LASTING_KEYS):
            self._known.lasting[shared.key] = shared

    def _check_over(self) -> None:
        if self._over:
            raise _gone(f"generation {self.generation} is over")


class ListeningStore(CoordinatorStore):
    """(a warm-up) A store that reads the job's keys. Keys that this process sets are visible only to itself."""

    def __init__(self, client: CoordinatorClient, generation: int) -> None:
        super().__init__(client, generation)
        self._own: dict[str, bytes] = {}
        self._late = 0
        """Consecutive checks in which a key was missing."""

    def set(self, key: str, value: str | bytes) -> None:
        self._own[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        return self._own[key] if key in self._own else super().get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all keys are there. Raises DistStoreError if they are still missing after several calls."""
        others = [key for key in keys if key not in self._own]
        if not others or super().check(others):
            self._late = 0
            return True
        # The caller polls, and the job may only now repeat its keys to a coordinator that was restarted.
        self._late += 1
        if self._late * _ASK_S > _TOLD_WITHIN_S:
            raise dist.DistStoreError(f"process group: nobody has told {listed(others)}")
        time.sleep(_ASK_S)
        return False

    def delete_key(self, key: str) -> bool:
        return self._own.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815


def stores_of(client: CoordinatorClient) -> Callable[[int], CoordinatorStore]:
    known = Known()
    return lambda generation: CoordinatorStore(client, generation, known)


def _gone(why: str) -> dist.DistNetworkError:
    return dist.DistNetworkError(f"process group: connection of an ended generation: {why}")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
