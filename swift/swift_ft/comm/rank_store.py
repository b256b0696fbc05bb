"""torch's store for one generation's process groups, kept by the coordinator.

torch keeps such a store in one of the ranks, or in a launcher on the first machine, and with that machine it is gone.
The coordinator is on none that trains.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from swift_ft.rpc.client import CoordinatorClient, Unanswered
from swift_ft.rpc.key_value import Gone, Known, SharedKeys
from swift_ft.text import listed, whole_number

_ASK_S = 0.2
_TOLD_WITHIN_S = 10.0
_MASTER_TIMEOUT = timedelta(seconds=30)


class CoordinatorStore(Store):
    """torch calls it from C++, where a wait has no end but its timeout: so every error here is one that a lost peer
    could be behind, and a notice ends a wait (`interrupt`). Whoever builds a group must keep it as long as the group:
    torch keeps the C++ half only, which is nothing without this one."""

    def __init__(self, shared: SharedKeys) -> None:
        super().__init__()
        self._shared = shared
        shared.once = True
        self._members = 0
        """Of the group that is being built; 0: none is."""

    @contextmanager
    def building(self, members: int) -> Iterator[None]:
        """Meanwhile a group of so many is built. Each of them waits for each other's key (`.../<place>`), one after
        the other. So who waits for one waits for all, and is told of them in one answer."""
        self._members = members
        try:
            yield
        finally:
            self._members = 0

    timeout: timedelta  # torch's property, which its stub lacks

    def built(self) -> None:
        """From now on keys are the trainer's, who may set them as often as it likes."""
        self._shared.once = False
        _told(self._shared.flush)

    def interrupt(self) -> None:
        self._shared.interrupt()

    # --- what torch calls, by its names ---

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

    # C++ asks for these two under its own names.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815


class ListeningStore(CoordinatorStore):
    """(a warm-up) What the job's ranks tell each other. What this process tells nobody hears but itself."""

    def __init__(self, client: CoordinatorClient, generation: int) -> None:
        super().__init__(SharedKeys(client, generation))
        self._own: dict[str, bytes] = {}
        self._late = 0
        """How often in a row something was not there."""

    def set(self, key: str, value: str | bytes) -> None:
        self._own[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        return self._own[key] if key in self._own else super().get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Raises DistStoreError once it was asked for too long."""
        others = [key for key in keys if key not in self._own]
        if not others or super().check(others):
            self._late = 0
            return True
        # Who asks polls, and the job may have told it to a coordinator that has begun anew.
        self._late += 1
        if self._late * _ASK_S > _TOLD_WITHIN_S:
            raise dist.DistStoreError(f"process group: nobody has told {listed(others)}")
        time.sleep(_ASK_S)
        return False

    def delete_key(self, key: str) -> bool:
        return self._own.pop(key, None) is not None

    deleteKey = delete_key  # noqa: N815


class CoordinatorStores:
    """The stores of one rank, one after the other."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._known = Known()
        self._newest: CoordinatorStore | None = None

    def __call__(self, generation: int) -> CoordinatorStore:
        self._newest = CoordinatorStore(SharedKeys(self._client, generation, self._known))
        return self._newest

    def built(self) -> None:
        """As `Stores.built`."""
        assert self._newest is not None
        self._newest.built()

    def interrupt(self) -> None:
        """As `Stores.interrupt`. Before the first one there is nobody to free."""
        if self._newest is not None:
            self._newest.interrupt()


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


class MasterStores:
    """(benchmarks, tests) A communicator's `stores` without a coordinator: for every generation the store at
    MASTER_ADDR and MASTER_PORT, which must outlive all ranks. Its waits end with their timeout alone."""

    def __init__(self) -> None:
        self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def __call__(self, generation: int) -> Store:
        return TCPStore(self._host, self._port, is_master=False, timeout=_MASTER_TIMEOUT)

    def built(self) -> None:
        """Nobody waits for its keys."""

    def interrupt(self) -> None:
        """It has no waits that could be ended."""
