"""How a tensor gets from the training path into the log's queue. The channel says what; here is how, by device.

    CopyCapture     no ring: the caller copies
    HostCapture     CPU: lent to the ring's copier, which reads it while the trainer goes on
    DeviceCapture   CUDA: a side stream copies into the ring's own memory, which is pinned

Nothing here waits for a device on the training path::

    (record)  side stream waits for what the training stream was given → copies → an event behind the copy
    (record, later)  events that are over are asked for; what they stand for is published, in order, whole
    (settle)  the training stream waits for the newest event, on the device: what follows may overwrite the tensor

Tests of the DeviceCapture run with a made-up device everywhere (`tests/unit/runtime/test_capture.py`), and with a CUDA
device where there is one (`tests/gpu/test_capture.py`). No session uses it: pipelines are refused on anything but the
CPU.
"""

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch

from swift.errors import ServiceError, UsageError
from swift.log.lending import Lending
from swift.log.record import RecordKey
from swift.log.ring import CONTROL_BYTES, body_at
from swift.log.writers import Writer
from swift.runtime.tensors import dtype_name, owned_bytes, plain

_COPIED_WITHIN_S = 60.0
_POLL_S = 0.0005


class Capture(Protocol):
    """What the channel needs. Called by the trainer's thread."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """Takes it into the log. ``now``: it may change after the call. ``keep``: it is never dropped."""

    def settle(self) -> None:
        """What was recorded may be overwritten after this. UsageError: it was, before."""

    def drop(self) -> None:
        """As settle, of a step that is dropped: nothing is judged."""


class _Lent(NamedTuple):
    """A tensor that may not be copied yet."""

    end: int
    """Position in the ring that tells that it is."""
    tensor: torch.Tensor
    version: int
    stream: str
    key: RecordKey

    def check(self) -> None:
        if self.tensor._version != self.version:
            raise UsageError(
                f"{self.stream} {self.key}: the tensor was changed in place after it was sent, so what was logged "
                "may not be what was sent; let the stage return a copy of it (.clone())"
            )


class NoCapture:
    """Where no record is made."""

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        raise AssertionError(f"{stream} {key} was to be logged, and there is no log")

    def settle(self) -> None:
        """Nothing was lent."""

    drop = settle


class CopyCapture:
    """Into a writer of this process."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        self._writer.append(stream, key, *owned_bytes(tensor), keep=keep)

    def settle(self) -> None:
        """Nothing was lent."""

    drop = settle


class HostCapture:
    """CPU tensors into the ring."""

    def __init__(self, writer: Lending) -> None:
        self._writer = writer
        self.lent: deque[_Lent] = deque()

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        flat = plain(tensor)
        now = now or flat.is_inference()  # nobody counts its versions
        version = 0 if now else flat._version
        name, shape = dtype_name(tensor), tuple(tensor.shape)
        end = self._writer.append_at(stream, key, name, shape, flat.data_ptr(), flat.nbytes, now, keep=keep)
        if end >= 0 and not now:
            self.lent.append(_Lent(end, flat, version, stream, key))
            self._take_back(self._writer.copied)

    def settle(self) -> None:
        if self.lent:
            self._writer.settle()
            self._take_back(self.lent[-1].end)

    def drop(self) -> None:
        self._writer.settle()
        self.lent.clear()

    def _take_back(self, copied: int) -> None:
        while self.lent and self.lent[0].end <= copied:
            self.lent.popleft().check()


class Event(Protocol):
    """A point in a device's stream of work."""

    def query(self) -> bool:
        """Whether the device is past it. Does not wait."""


class Device(Protocol):
    """What is asked of a device. `Cuda`, or one that tests make up."""

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Makes host memory one that the device writes by itself; the result undoes that. ServiceError."""

    def follow(self) -> None:
        """The side stream goes on behind what the training stream was given so far."""

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        """On the side stream, from the device to pinned memory. The tensor's memory is not given to others before."""

    def mark(self) -> Event:
        """Behind all that the side stream was given so far."""

    def hold(self, event: Event) -> None:
        """The training stream goes on behind the event. The host does not wait."""


class Cuda:
    """torch's. Streams and events of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, address: int, size: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(address, size, 0))
        if error:
            raise ServiceError(
                f"{size} bytes of the log's queue cannot be pinned (CUDA error {error}); give a smaller log_queue_bytes"
            )
        return lambda: cudart.cudaHostUnregister(address)

    def follow(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        with torch.cuda.stream(self._side):
            to.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._side)

    def mark(self) -> Event:
        event: Event = self._side.record_event()
        return event

    def hold(self, event: Event) -> None:
        stream: Any = torch.cuda.current_stream(self._device)
        stream.wait_event(event)


class _UnderWay(NamedTuple):
    end: int
    event: Event


class DeviceCapture:
    """Tensors of a device into the ring.

    The ring's head passes a record once its event is over, and then only if it has passed all before. So a record is in
    the ring whole or not at all here as well, and a trainer that dies leaves those out that were under way. A tensor
    on the CPU is copied by the caller: lent to the copier, it could only be given back behind the device's.
    """

    def __init__(self, writer: Lending, device: Device) -> None:
        self._writer = writer
        self._device = device
        self._host = HostCapture(writer)
        self._under_way: deque[_UnderWay] = deque()
        self._lent: deque[_Lent] = deque()
        self._memory, self._producer = writer.lend_ring(self)
        self._unpin = device.pin(self._memory.address + CONTROL_BYTES, self._memory.capacity)
        self._ring = torch.frombuffer(self._memory.data, dtype=torch.uint8)

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        """As `Capture.record`. The copy runs on the side stream, so the tensor is held until its event is over."""
        self._publish()
        if tensor.device.type == "cpu":
            self._host.record(stream, key, tensor, now=True, keep=keep)
            return
        flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
        size = flat.nbytes
        end = self._writer.append_at(stream, key, dtype_name(tensor), tuple(tensor.shape), 0, size, keep=keep)
        if end < 0 or not size:
            return
        at = body_at(self._memory, end, size)
        self._device.follow()
        self._device.copy(
            self._ring[at : at + size], flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
        )
        event = self._device.mark()
        self._under_way.append(_UnderWay(end, event))
        if now or flat.is_inference():
            self._device.hold(event)
        else:
            self._lent.append(_Lent(end, flat, flat._version, stream, key))

    def settle(self) -> None:
        self._publish()
        if self._under_way:
            self._device.hold(self._under_way[-1].event)
        while self._lent:
            self._lent.popleft().check()

    def drop(self) -> None:
        self._lent.clear()
        self._writer.settle()

    def finish(self) -> None:
        """(the writer, off the training path) Returns when all that is under way is there. Raises ServiceError if
        the device takes too long."""
        deadline = time.monotonic() + _COPIED_WITHIN_S
        self._publish()
        while self._under_way:
            if time.monotonic() > deadline:
                raise ServiceError(f"the device has not copied a tensor within {_COPIED_WITHIN_S:g} s")
            time.sleep(_POLL_S)
            self._publish()

    def _publish(self) -> None:
        """What has arrived of what is under way. Waits for nothing."""
        end = -1
        while self._under_way and self._under_way[0].event.query():
            end = self._under_way.popleft().end
        if end >= 0:
            self._producer.complete(end)
        while self._lent and self._lent[0].end <= end:
            self._lent.popleft().check()

    def let_go(self) -> None:
        """(the writer is closed) Nobody writes into the ring's memory any more."""
        self._lent.clear()
        with suppress(ServiceError):  # a device that hangs ends with this process
            self.finish()
        self._under_way.clear()
        self._unpin()
        del self._ring


def capture_for(writer: Writer, device: torch.device) -> Capture:
    """How tensors on this device, and those on the CPU, are taken off the training path."""
    lending = writer.lending
    if lending is None:
        return CopyCapture(writer)
    return HostCapture(lending) if device.type == "cpu" else DeviceCapture(lending, Cuda(device))
