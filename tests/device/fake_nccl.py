"""A stand-in for torch's `ProcessGroupNCCL` on the simulated device, stricter than it is.

A message is a *ticket* in the stream of its communicator: the stream stands still there until the peer has its half of
the message. Bytes pass over a Unix socket.

- A message whose peer does not come, or has died, holds its stream until an abort.
- An abort ends the kernels of its communicator at once and leaves garbage that looks like numbers: what stands behind
  them goes on with it. It returns once no other communicator has a message under way: one after the other is not how
  communicators are aborted.
- Connecting goes on in a thread. The first message waits for it.
- There are no tags: a message of another size than its peer's is a mistake of the order, and ends the process.
- A group that ends in a process that goes on ends the process.
- Memory is used until the message is over, whether its tensor is alive or not.
"""

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft.comm.nccl import TorchNccl
from swift_ft.device import Event
from tests.device import simulated

GARBAGE = 0x41
"""Byte of what an abort leaves: 12.1 as a float32."""
WRONG_ORDER, ENDED = 86, 87
"""Exit codes of a process whose message met another one, and of one that has ended a group."""
_POLL_S = 0.001
_PATIENCE_S = 30.0
_LENGTH_BYTES = 8


class FakeNccl(TorchNccl):
    """`TorchNccl` over the stand-in, with a device of its own for each process."""

    def __init__(self) -> None:
        torch.distributed.ProcessGroupNCCL = ProcessGroup  # type: ignore[attr-defined]
        torch.get_device_module().get_device_properties = lambda device: SimpleNamespace(
            uuid=f"{os.getpid()}:{device.index}"
        )
        super().__init__()


class Options:
    def __init__(self, is_high_priority_stream: bool) -> None:
        assert is_high_priority_stream, "its stream would be of the pool of the session's side streams"
        self.config = SimpleNamespace(blocking=1)
        self._timeout = timedelta(minutes=10)


class ProcessGroup:
    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        assert size == 2
        assert options.config.blocking == 0
        assert options._timeout >= timedelta(hours=1), "a rank may wait for long"
        self._store, self._rank = store, rank
        self._communicator: FakeCommunicator | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.index == torch.accelerator.current_device_index()
        if self._rank == 0:
            listening = socket.socket(socket.AF_UNIX)
            listening.bind("")  # a name that the kernel chooses
            listening.listen()
            self._store.set("0", listening.getsockname())
            self._communicator = FakeCommunicator(lambda: listening.accept()[0])
        else:
            address = self._store.get("0")
            self._communicator = FakeCommunicator(lambda: _connected(address))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "_Queued":
        assert (peer, tag) == (1 - self._rank, 0)
        return self._queue(tensors, sends=True)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "_Queued":
        assert (peer, tag) == (1 - self._rank, 0)
        return self._queue(tensors, sends=False)

    def _queue(self, tensors: list[torch.Tensor], *, sends: bool) -> "_Queued":
        assert self._communicator is not None, "made by its first message: it would hang in an abort"
        (tensor,) = tensors
        return self._communicator.queue(tensor, sends=sends)

    def abort(self) -> None:
        if self._communicator is not None:
            FakeCommunicator.abort([self._communicator])

    def __del__(self) -> None:
        if not sys.is_finalizing():
            print("fake NCCL: a group was ended", file=sys.stderr, flush=True)
            os._exit(ENDED)


def _connected(address: bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


class _Ticket:
    """A message under way."""

    def __init__(self, host: torch.Tensor, turn: Event, release: Callable[[], None], *, sends: bool) -> None:
        self.host = host
        self.turn = turn
        self.release = release
        self.sends = sends


def _count(ticket: _Ticket) -> None:
    """With FAKE_NCCL=DIRECTORY each process notes there what has passed, a line each."""
    if directory := os.environ.get("FAKE_NCCL"):
        with Path(directory, f"messages-{os.getpid()}").open("a") as file:
            file.write(f"{'sent' if ticket.sends else 'received'} {ticket.host.numel()}\n")


class _Queued:
    def __init__(self, over: Any) -> None:
        self._over = over

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._over)


class FakeCommunicator:
    _changed = threading.Condition()
    """Held for all that follows."""
    _all: ClassVar["set[FakeCommunicator]"] = set()

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._connected = threading.Event()
        self._socket: Any = None
        self._stream = torch.Stream()
        self._aborted = False
        self._under_way: list[_Ticket] = []
        self._tickets: queue.SimpleQueue[_Ticket] = queue.SimpleQueue()
        with self._changed:
            self._all.add(self)
        threading.Thread(target=self._work, name="fake-nccl", daemon=True).start()

    def queue(self, tensor: torch.Tensor, *, sends: bool) -> _Queued:
        assert self._connected.wait(_PATIENCE_S), "the peer did not come"
        assert tensor.is_contiguous()
        data = tensor.view(-1).view(torch.uint8)
        host = torch.empty(data.numel(), dtype=torch.uint8, pin_memory=True)
        with self._changed:
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            self._stream.wait_stream(torch.accelerator.current_stream())
            with self._stream:
                if sends:
                    host.copy_(data, non_blocking=True)
                turn = self._stream.record_event()
                ticket = _Ticket(host, turn, simulated.hold(self._stream), sends=sends)
                if not sends:
                    data.copy_(host, non_blocking=True)
            self._under_way.append(ticket)
            self._tickets.put(ticket)
            return _Queued(self._stream.record_event())

    def _work(self) -> None:
        self._socket = self._connect()
        self._connected.set()
        while True:
            ticket = self._tickets.get()
            while not ticket.turn.query():
                if self._aborted:
                    return
                time.sleep(_POLL_S)
            try:
                self._give(ticket) if ticket.sends else self._take(ticket)
            except OSError:
                return  # nobody tells a kernel that its peer is lost
            with self._changed:
                if self._aborted:
                    return
                self._under_way.remove(ticket)
                _count(ticket)
                ticket.release()
                self._changed.notify_all()

    def _give(self, ticket: _Ticket) -> None:
        self._read(1)
        self._socket.sendall(ticket.host.numel().to_bytes(_LENGTH_BYTES, "little"))
        self._socket.sendall(memoryview(ticket.host.numpy()))

    def _take(self, ticket: _Ticket) -> None:
        self._socket.sendall(b"!")  # from now on it spins
        size = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        if size != ticket.host.numel():
            print(
                f"fake NCCL: {size} bytes met a receive of {ticket.host.numel()}", file=sys.stderr, flush=True
            )
            os._exit(WRONG_ORDER)
        room = memoryview(ticket.host.numpy())
        while room:
            room = room[self._some(self._socket.recv_into(room)) :]

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            got = self._socket.recv(size - len(data))
            data += got[: self._some(len(got))]
        return data

    @staticmethod
    def _some(count: int) -> int:
        if not count:
            raise ConnectionResetError
        return count

    @classmethod
    def abort(cls, communicators: "Sequence[FakeCommunicator]") -> None:
        with cls._changed:
            for each in communicators:
                each._aborted = True
            cls._all.difference_update(communicators)
            for each in communicators:
                each._end()
            cls._changed.notify_all()
            cls._changed.wait_for(lambda: not any(other._under_way for other in cls._all))

    def _end(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it has ended before
                self._socket.shutdown(socket.SHUT_RDWR)
        for ticket in self._under_way:
            if not ticket.sends:
                ticket.host.fill_(GARBAGE)
            ticket.release()
        self._under_way.clear()
