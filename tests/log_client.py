"""A writer of the log whose threads are the test's own: no sidecar. For tests of what is behind the writer.

What a rank's writer promises is tested with `swift_ft.log.sidecar_client.SidecarWriter`.
"""

import os
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
from swift_ft.log.ring import Memory, PlainProducer, Word, header_of
from swift_ft.log.sidecar import RingWriter
from swift_ft.log.sidecar_client import SidecarWriter, WriterStats
from swift_ft.state.tensors import byte_view, dtype_name
from tests.shared_bodies import is_shared

_POLL_S = 0.25


class LogWriter:
    """Appends to each of the servers, by the product's `RingWriter`, whose thread and ring are in this process."""

    def __init__(
        self,
        servers: Sequence[str],
        job: str,
        generation: int,
        *,
        codec: str = "none",
        fsync: str = "",
        records_max: int = 1 << 20,
        queue_bytes: int = 1 << 28,
        patience_s: float = PATIENCE_S,
        name: str = "",
    ) -> None:
        """``records_max``: so many wait for an acknowledgement before `append` blocks."""
        self._records_max = records_max
        self._appended = 0
        self._streams: dict[str, int] = {}
        self._interrupted = False
        self._stats: WriterStats | None = None  # once it is closed
        self._closing = threading.Event()
        self._memory, self._wake = Memory.create(queue_bytes), os.eventfd(0)
        self._memory.store(Word.URGENT, 1)  # nothing is gathered
        self._producer = PlainProducer(self._memory, self._wake)
        self.sending = RingWriter(
            self._memory,
            self._wake,
            lambda _: None,
            over=self._closing.is_set,
            servers={server: number for number, server in enumerate(dict.fromkeys(servers), 1)},
            job=job,
            generation=generation,
            codec=codec,
            fsync=fsync,
            patience_s=patience_s,
            name=name,
        )
        if not is_shared():
            for link in self.sending.links.values():
                link._memory = None  # bodies are sent
        self._lock = self.sending._lock
        self._thread = threading.Thread(target=self._pump, name="log-writer", daemon=True)
        self._thread.start()

    def _pump(self) -> None:
        while not self._closing.is_set():
            self.sending.pump()

    @property
    def stats(self) -> WriterStats:
        return self._stats or self._counted()

    def _counted(self) -> WriterStats:
        return WriterStats(**self._memory.counts()._asdict(), resent=self._memory.load(Word.RESENT))

    def _pending(self) -> int:
        counts = self._memory.counts()
        return self._appended - counts.records - counts.verified

    def append(self, stream: str, key: RecordKey, dtype: str, shape: tuple[int, ...], body: Any) -> None:
        view = as_bytes(body)
        array = np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(1, np.uint8)
        with self._lock:
            if stream not in self._streams:
                self._memory.set_stream(len(self._streams), stream)
                self._streams[stream] = len(self._streams)
            header = header_of(self._streams[stream], key, dtype, shape, view.nbytes)
            self._raise_pending()
            while (
                self._pending() >= self._records_max
                or self._producer.push(header, array.ctypes.data, view.nbytes, True) < 0
            ):
                self._lock.wait(_POLL_S)
                self._raise_pending()
            self._appended += 1

    def expect(self, stream: str, digests: Mapping[RecordKey, bytes]) -> None:
        self.sending.expect(stream, digests)

    def flush(self, timeout_s: float) -> None:
        deadline, upto = time.monotonic() + timeout_s, self._producer.reserved
        while True:
            tail = self._memory.load(Word.TAIL)
            self._raise_pending()
            if tail >= upto:
                return
            if time.monotonic() > deadline:
                raise ServiceError(f"the log has not acknowledged everything within {timeout_s:g} s")
            with self._lock:
                if self._memory.load(Word.TAIL) == tail:
                    self._lock.wait(min(_POLL_S, max(0.0, deadline - time.monotonic())))
            self.sending.changed()

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            self._lock.notify_all()

    def set_generation(self, generation: int) -> None:
        with self._lock:
            self._interrupted = False
        self.sending.set_generation(generation)

    def forget_below(self, step: int) -> None:
        self._memory.store(Word.FLOOR_AT, self._producer.reserved)
        self._memory.store(Word.FLOOR, step)

    def close(self, flush_timeout_s: float = 10.0) -> None:
        if self._closing.is_set():
            return
        try:
            if flush_timeout_s > 0:
                self.flush(flush_timeout_s)
        finally:
            self._closing.set()
            self.sending.want(1 << 62)
            self._thread.join(5.0)
            close_links(self.sending)
            self._stats = self._counted()
            os.close(self._wake)
            try:
                self._memory.close()
            except BufferError:  # what was not acknowledged is still referred to
                os.close(self._memory.fd)

    def _raise_pending(self) -> None:
        if self._interrupted:
            raise LogInterrupted("the writer was interrupted")
        error = self.sending.trouble()
        if error is not None:
            raise error


def close_links(writer: RingWriter) -> None:
    for link in writer.links.values():
        link.close()


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
