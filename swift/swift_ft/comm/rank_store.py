"""torch's store for one generation's process groups, kept by the coordinator.

torch keeps such a store in one of the ranks, or in a launcher on the first machine, and loses it with that machine.
The coordinator runs on no machine that trains.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft.rpc.client import CoordinatorClient, Unanswered
from swift_ft.rpc.key_value import Gone, Known, SharedKeys
from swift_ft.text import listed, whole_number

_ASK_S = 0.2
_TOLD_WITHIN_S = 10.0


class CoordinatorStore(Store):
    """A torch store whose keys the coordinator holds. torch calls it from C++, where a wait ends only by its timeout.
    So every error here is one that a lost peer could cause, and `interrupt` ends waits. The builder of a group must
    keep it as long as the group: torch keeps only the C++ half, which does not work without this object."""

    def __init__(self, shared: SharedKeys) -> None:
        super().__init__()
        self._shared = shared
        shared.once = True
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
        self._shared.once = False
        _told(self._shared.flush)

    def interrupt(self) -> None:
        """(watcher thread) Ends all waits with an error."""
        self._shared.interrupt()

    # --- methods that torch calls, under its names ---

    def set(self, key: str, value: str | bytes) -> None:
        _told(self._shared.set, key, _bytes(value))

    def get(self, key: str) -> bytes:
        value: bytes = _told(self._shared.get, key, self.timeout.total_seconds())
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = _told(self._shared.add, key, amount)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes | None = _told(self._shared.swap, key, _bytes(expected), _bytes(desired))
        return _bytes(expected) if value is None else value

    def delete_key(self, key: str) -> bool:
        deleted: bool = _told(self._shared.delete, key)
        return deleted

    def num_keys(self) -> int:
        count: int = _told(self._shared.count)
        return count

    def check(self, keys: Sequence[str]) -> bool:
        there: bool = _told(self._shared.has, keys)
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self._members and len(keys) == 1:
            head, slash, member = keys[0].rpartition("/")
            if whole_number(member) is not None:
                keys = [f"{head}{slash}{place}" for place in range(self._members)]
        _told(self._shared.wait, keys, (timeout or self.timeout).total_seconds())

    def clone(self) -> "CoordinatorStore":
        return self  # any thread may use it

    # C++ calls these two under its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


class ListeningStore(CoordinatorStore):
    """(a warm-up) A store that reads the job's keys. Keys that this process sets are visible only to itself."""

    def __init__(self, client: CoordinatorClient, generation: int) -> None:
        super().__init__(SharedKeys(client, generation))
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
    return lambda generation: CoordinatorStore(SharedKeys(client, generation, known))


def _told(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Gone as gone:
        raise dist.DistNetworkError(f"process group: connection of an ended generation: {gone}") from None
    except Unanswered as away:
        raise dist.DistNetworkError(f"process group: {away}") from None
    except TimeoutError as late:
        raise dist.DistStoreError(f"process group: timed out: {late}") from None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
