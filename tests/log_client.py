"""A writer of the log whose threads are the test's own: no ring, no sidecar. For tests of what is behind the writer.

What a rank's writer promises is tested with `swift_ft.log.sidecar_client.SidecarWriter`.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from swift_ft.errors import LogInterrupted, ServiceError
from swift_ft.log.placement import PATIENCE_S
from swift_ft.log.record import RecordKey, as_bytes
from swift_ft.log.sender import Delivery, Item
from swift_ft.log.sender_core import Outgoing
from swift_ft.log.sidecar_client import SidecarWriter, WriterStats
from swift_ft.state.tensors import byte_view, dtype_name

_POLL_S = 0.25


class LogWriter:
    """Appends to each of the servers, by the product's `Delivery`."""

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str = "none",
        fsync: str = "",
        records_max: int = 1 << 20,
        patience_s: float = PATIENCE_S,
        name: str = "",
    ) -> None:
        """``records_max``: so many wait for an acknowledgement before `append` blocks."""
        self._records_max = records_max
        self._lock = threading.Condition()
        self._counted = WriterStats()
        self._items: deque[Item] = deque()
        self._interrupted = False
        self.delivery = Delivery(
            servers,
            job,
            generation,
            codec=codec,
            fsync=fsync,
            patience_s=patience_s,
            name=name,
            on_change=lambda: None,
            on_error=lambda _: None,
            lock=self._lock,
        )

    @property
    def stats(self) -> WriterStats:
        with self._lock:
            self._pending()
            self._counted.resent = self.delivery.resent
            return self._counted

    def _pending(self) -> int:
        """(holding the lock) Counts what has come of the records; how many are not durable."""
        while self._items and self._items[0].outcome:
            item = self._items.popleft()
            self._counted.verified += item.outcome in ("equal", "copied")
            if item.outcome == "sent":
                self._counted.records += 1
                self._counted.bytes += item.body.nbytes
                self._counted.stored_bytes += item.stored_bytes
        return len(self._items) + sum(link.pending for link in self.delivery.links.values())

    def append(self, stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: Any) -> None:
        item = Item(stream, key, dtype, shape, as_bytes(body), lambda _, **fields: Outgoing(**fields))
        with self._lock:
            self._raise_pending()
            while self._pending() >= self._records_max:
                self._lock.wait(_POLL_S)
                self._raise_pending()
            self._items.append(item)
            self.delivery.put(item)

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes]) -> None:
        self.delivery.expect(stream, digests)

    def flush(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._raise_pending()
                if not self._pending():
                    return
                if time.monotonic() > deadline:
                    raise ServiceError(f"the log has not acknowledged everything within {timeout_s:g} s")
                self._lock.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())))

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            self._lock.notify_all()

    def set_generation(self, generation: int) -> None:
        with self._lock:
            self._interrupted = False
        self.delivery.set_generation(generation)

    def forget_below(self, step: int) -> None:
        self.delivery.forget_below(step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self.delivery.close()

    def _raise_pending(self) -> None:
        if self._interrupted:
            raise LogInterrupted("the writer was interrupted")
        error = self.delivery.trouble()
        if error is not None:
            raise error


class Writer(SidecarWriter):
    """A rank's writer, for bodies that are bytes."""

    def append(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        body: Any,
        *,
        keep: bool = False,
    ) -> bool:
        """The body must not change until `wait_copied`. False if it was dropped."""
        view = as_bytes(body)
        array = np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(1, np.uint8)
        end = self.append_at(stream, key, dtype, shape, array.ctypes.data, view.nbytes, keep=keep)
        lent = self.__dict__.setdefault("lent", deque())
        lent.append((end, array))
        while lent[0][0] < self.copied and len(lent) > 1:
            lent.popleft()
        return end >= 0


def owned_bytes(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], memoryview]:
    """(dtype, shape, bytes) of a copy, as a record has them."""
    copy = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return dtype_name(tensor), tuple(tensor.shape), byte_view(copy).data
