"""Messages of a device's tensors over a wire that moves host memory alone, by way of pinned memory.

    send     a stream of the wire's own copies the tensor out, behind what its caller has queued. A thread, the
             *stager*, polls for the end of the copy and then sends: a send is under way although no one waits for it.
    receive  the wire receives into pinned memory. Whoever goes on with the tensor queues the copy to the device, in
             its own stream (`Message.finish`).

Tensors of the host pass as they are. Neither the trainer's thread nor the training stream waits for a copy. Pinned
memory comes from torch's cache, which gives none away before the copies from and to it are over.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch

from swift_ft.comm.message_collectives import Message, SummingWire
from swift_ft.comm.worker_thread import Runner, Task
from swift_ft.device import Event, accelerator_of, until_over


class StagedWire:
    """A `SummingWire` for tensors of the host and of devices over one for host memory."""

    def __init__(self, wire: SummingWire, stager: Callable[[], Runner]) -> None:
        """`stager`: returns a new thread of the wire's fabric. Called once there is a device's tensor to send."""
        self._wire = wire
        self._new_stager = stager
        self._stager: Runner | None = None
        self._side: Any = None
        self._starting = threading.Lock()
        """The trainer's thread and the runner may be the first to send at the same time."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Message:
        (tensor,) = tensors
        if tensor.device.type == "cpu":
            return self._wire.send(tensors, to, tag)
        with self._starting:
            if self._stager is None:
                self._stager = self._new_stager()
        host, copied = self._copy_out(tensor)
        sent = _Sent()
        sent.task = self._stager.submit(lambda: sent.begin(copied, lambda: self._wire.send([host], to, tag)))
        return sent

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Message:
        (tensor,) = tensors
        if tensor.device.type == "cpu":
            return self._wire.recv(tensors, source, tag)
        host = accelerator_of(tensor.device).pinned(tensor.numel(), tensor.dtype)
        return _Received(self._wire.recv([host], source, tag), host, tensor)

    def sum(self, tensor: torch.Tensor) -> bool:
        """(a runner) Sums in host memory."""
        if tensor.device.type == "cpu":
            return self._wire.sum(tensor)
        host, copied = self._copy_out(tensor.contiguous())
        until_over(copied)
        self._wire.sum(host)
        tensor.copy_(host.view_as(tensor), non_blocking=True)
        return True

    def _copy_out(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Returns the pinned copy of a contiguous tensor, and the event of its end."""
        device = accelerator_of(tensor.device)
        with self._starting:
            if self._side is None:
                self._side = device.new_stream()
        host = device.pinned(tensor.numel(), tensor.dtype)
        device.copy_out(host, tensor.detach().view(-1), self._side)
        return host, device.mark(self._side)


class _Sent:
    """A message that the stager sends once its copy is over."""

    task: Task

    def __init__(self) -> None:
        self._message: Message | None = None

    def begin(self, copied: Event, send: Callable[[], Message]) -> None:
        """(stager) Sends when the copy is over."""
        until_over(copied)
        self._message = send()

    def wait(self) -> None:
        self.task.wait()
        assert self._message is not None
        self._message.wait()

    def finish(self) -> None:
        pass


class _Received:
    """A message that arrives in pinned memory."""

    def __init__(self, message: Message, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self._message = message
        self._host = host
        self._tensor: torch.Tensor | None = tensor

    def wait(self) -> None:
        self._message.wait()

    def finish(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is not None:  # once: what is there may have been changed since
            tensor.detach().copy_(self._host.view_as(tensor), non_blocking=True)
