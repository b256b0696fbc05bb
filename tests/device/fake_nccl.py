"""NCCL's communicators as the simulated device has them: `swift_ft.comm.nccl.Library`, stricter than NCCL is.

A message is a *ticket* in the stream of its communicator: the stream stands still there until the peer has its half of
the message. Bytes pass over a Unix socket.

- A message whose peer does not come, or has died, holds its stream until an abort.
- An abort leaves garbage that looks like numbers. It waits for ever if a communicator that it is not told of has a
  message under way: one after the other is not how communicators are aborted.
- There are no tags: a message of another size than its peer's is a mistake of the order, and ends the process.
- Memory is used until the message is over, whether its tensor is alive or not.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft.comm.nccl import Communicator
from swift_ft.device import Accelerator, Event
from tests.device import simulated

GARBAGE = 0x41
"""Byte of what an abort leaves: 12.1 as a float32."""
WRONG_ORDER = 86
"""Exit code of a process whose message met another one."""
_POLL_S = 0.001
_LENGTH_BYTES = 8


class FakeNccl:
    def identity(self, device: Accelerator) -> str:
        return f"{os.getpid()}:{device.torch.index}"

    def connect(self, store: Store, own: int, timeout: timedelta) -> Communicator:
        if own:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(store.get("address"))
        else:
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind("")  # a name that the kernel chooses
                listening.listen()
                listening.settimeout(timeout.total_seconds())
                store.set("address", listening.getsockname())
                store.check(["address"])
                connection, _ = listening.accept()
            connection.settimeout(None)
        return FakeCommunicator(connection)

    def abort(self, communicators: Sequence[Communicator]) -> None:
        FakeCommunicator.abort([each for each in communicators if isinstance(each, FakeCommunicator)])


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

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._stream = torch.Stream()
        self._aborted = False
        self._under_way: list[_Ticket] = []
        self._tickets: queue.SimpleQueue[_Ticket] = queue.SimpleQueue()
        with self._changed:
            self._all.add(self)
        threading.Thread(target=self._work, name="fake-nccl", daemon=True).start()

    def send(self, tensor: torch.Tensor) -> _Queued:
        return self._queue(tensor, sends=True)

    def recv(self, tensor: torch.Tensor) -> _Queued:
        return self._queue(tensor, sends=False)

    def _queue(self, tensor: torch.Tensor, *, sends: bool) -> _Queued:
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
            cls._changed.notify_all()
            cls._changed.wait_for(lambda: not any(other._under_way for other in cls._all))
            for each in communicators:
                each._end()

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        for ticket in self._under_way:
            if not ticket.sends:
                ticket.host.fill_(GARBAGE)
            ticket.release()
        self._under_way.clear()
