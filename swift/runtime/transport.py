"""Waiting in gloo without being lost in it, and collectives made of its point-to-point messages.

A thread that waits in gloo for a message whose connection breaks in the middle of the payload waits for ever: gloo
tells the operations that are queued on the connection, not the one whose bytes are arriving (with a wait in gloo, the
reductions that `tests/integration/test_groups.py` cuts hung within a dozen trials; shutting the sockets again does
not help, because they are gone).
So the trainer's thread never waits in gloo. A `Runner` does, and the trainer waits for the runner, which a notice
can end. A runner that is lost is left behind with its group; the next generation has new ones.

The collectives here are built from messages for the same reason (gloo's own run in threads that its groups join),
and they are better than gloo's where it matters here: sums are taken in rank order, so their bits depend on no
layout, for the same bytes on the wire as a ring.

Legend: n ranks in the group, `own` this rank's index in it.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from swift.runtime import _torch

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# gloo takes the timeout of a group's construction for its messages, which is short; a notice ends a wait anyway.
MESSAGE_TIMEOUT = timedelta(hours=24)
_SMALL_BYTES = 4096  # below, one exchange of everything is quicker than two of parts
_TAGS = 1 << 20  # below are the tags of trainers and schedules; each group has as many above, by its number
GROUPS = 1000
"""So many groups have numbers, and as many parts of groups; a tag is an int of C."""


class Broken(RuntimeError):
    """A notice has ended the wait. Its words are those of a lost connection, which is what it stands for."""


class Task:
    """Something that a runner does. Waited for by one thread, ended by the runner or by a notice."""

    def __init__(self, run: Callable[[], Any]):
        self._run: Callable[[], Any] | None = run
        self._over = threading.Lock()
        self._over.acquire()
        self._callbacks: list[Callable[[], None]] = []
        self._state = threading.Lock()
        self.done = False
        self.error: Exception | None = None

    def carry_out(self) -> None:
        # What it refers to goes with it: a thread that lets a process group go while the interpreter ends aborts.
        run, self._run = self._run, None
        assert run is not None
        error: Exception | None = None
        try:
            run()
        except Exception as raised:  # noqa: BLE001  (handed to whoever waits)
            error = raised
        del run
        self.end(error)

    def end(self, error: Exception | None) -> None:
        with self._state:
            if self.done:
                return
            self.error, self.done = error, True
            callbacks, self._callbacks = self._callbacks, []
        self._over.release()
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once this is over, at once if it is."""
        with self._state:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        """Raises what the task has raised, or Broken."""
        with self._over:
            pass
        if self.error is not None:
            raise self.error


class Runner:
    """One thread that carries out tasks in order, for one group of one generation.

    (any thread) ``submit`` → ``Task.wait``; (watcher thread) ``stop``: whoever waits is freed at once
    """

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Task] = set()
        self._stopped: Broken | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any]) -> Task:
        task = Task(run)
        with self._lock:
            stopped = self._stopped
            if stopped is None:
                self._open.add(task)
                self._tasks.put(task)
        if stopped is not None:
            task.end(stopped)
        return task

    def stop(self) -> None:
        with self._lock:
            self._stopped = self._stopped or Broken("connection of an ended generation")
            left, self._open = self._open, set()
            self._tasks.put(None)
        for task in left:
            task.end(self._stopped)

    def join(self, timeout_s: float) -> None:
        """Waits for the thread's end: one that is left may not meet the interpreter's. A lost one is given up."""
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.carry_out()
            with self._lock:
                self._open.discard(task)
            del task


class Messages:
    """Collectives over one gloo group. Called by the group's runner (``carry_out``), in the same order on all ranks."""

    def __init__(self, inner: Any, own: int, n: int, number: int = 0):
        """`number`, below twice `GROUPS`, keeps groups apart that lie over the same gloo group."""
        self._inner = inner
        self._first_tag = (1 + number) * _TAGS
        self._own, self._n = own, n
        self._sequence = 0
        self._error: Exception | None = None
        self._pool: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}

    def carry_out(self, run: Callable[["Messages"], None]) -> None:
        """Some collectives. Raises RuntimeError if one has failed before.

        A collective that fails has not counted all its messages. The next one would take the tags of those that are
        missing, and a peer that waits for them would get something else: a wrong sum, or the end of its process
        by gloo if the sizes differ.
        """
        if self._error is not None:
            raise RuntimeError(f"connection: a collective failed here before: {self._error}")
        try:
            run(self)
        except Exception as error:
            self._error = error
            raise

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """In place, in rank order: op(op(x0, x1), x2) ... for every element."""
        if self._n == 1 or not tensor.numel():
            return
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1).clone()
        if flat.numel() * flat.element_size() <= _SMALL_BYTES or flat.numel() < self._n:
            parts = [torch.empty_like(flat) for _ in range(self._n)]
            self.all_gather(parts, flat)
            flat.copy_(_in_order(parts, op))
        else:
            whole = flat.numel() // self._n * self._n
            self._all_reduce_parts(list(flat[:whole].view(self._n, -1).unbind()), op)
            if whole < flat.numel():
                self.all_reduce(flat[whole:], op)
        if not tensor.is_contiguous():
            tensor.copy_(flat.view_as(tensor))

    def _all_reduce_parts(self, parts: list[torch.Tensor], op: Op) -> None:
        received = self._take(parts[0], self._n * parts[0].numel())
        incoming = list(received.view(self._n, -1).unbind())
        self.all_to_all(incoming, parts)
        parts[self._own].copy_(_in_order(incoming, op))
        self.all_gather(parts, parts[self._own])
        self._give(received)

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Op) -> None:
        incoming = [torch.empty_like(parts[self._own]) for _ in range(self._n)]
        self.all_to_all(incoming, parts)
        output.copy_(_in_order(incoming, op).view_as(output))

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        """`own` of every rank, in `outputs` by rank."""
        self.all_to_all(outputs, [own] * self._n)

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        """`outgoing[r]` goes to rank r, `incoming[r]` comes from it. Contiguous tensors."""
        tag = self._next_tag()
        if incoming[self._own].data_ptr() != outgoing[self._own].data_ptr():
            incoming[self._own].copy_(outgoing[self._own])
        works = [
            work
            for source, target in self._peers()
            for work in (
                self._inner.recv([incoming[source]], source, tag),
                self._inner.send([outgoing[target]], target, tag),
            )
        ]
        for work in works:
            work.wait(MESSAGE_TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        tag = self._next_tag()
        whole = tensor.contiguous()
        if self._own == root:
            works = [self._inner.send([whole], peer, tag) for peer in range(self._n) if peer != root]
        else:
            works = [self._inner.recv([whole], root, tag)]
        for work in works:
            work.wait(MESSAGE_TIMEOUT)
        if whole is not tensor:
            tensor.copy_(whole)

    def barrier(self, said: torch.Tensor | None = None) -> None:
        """Returns once all have entered: after round k a rank knows of 2^k others (dissemination barrier).

        `said`: what this rank says; becomes, in place, the greatest in each place of what all have said.
        """
        distance = 1
        said = torch.zeros(1) if said is None else said
        while distance < self._n:
            tag = self._next_tag()
            token, other = said.clone(), torch.empty_like(said)
            incoming = self._inner.recv([other], (self._own - distance) % self._n, tag)
            outgoing = self._inner.send([token], (self._own + distance) % self._n, tag)
            incoming.wait(MESSAGE_TIMEOUT)
            outgoing.wait(MESSAGE_TIMEOUT)
            torch.maximum(said, other, out=said)
            distance *= 2

    def _peers(self) -> Iterator[tuple[int, int]]:
        """(from whom, to whom): each peer once, and no rank is sent to by all at once."""
        for distance in range(1, self._n):
            yield (self._own - distance) % self._n, (self._own + distance) % self._n

    def _next_tag(self) -> int:
        self._sequence += 1
        return self._first_tag + self._sequence % _TAGS

    def _take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Fresh memory of a bucket's size is dear (the kernel clears it page by page), so it is kept."""
        kept = self._pool.get((like.dtype, numel))
        return kept.pop() if kept else torch.empty(numel, dtype=like.dtype)

    def _give(self, buffer: torch.Tensor) -> None:
        self._pool.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)


class Alone(Messages):
    """Collectives in which every rank's part is this one's: results of the right shape, and nobody is asked."""

    def __init__(self, own: int, n: int):
        super().__init__(None, own, n)

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        tensor.copy_(_in_order([tensor.clone() for _ in range(self._n)], op))

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        for room in incoming:
            room.copy_(outgoing[self._own])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        pass

    def barrier(self, said: torch.Tensor | None = None) -> None:
        pass


def _in_order(parts: list[torch.Tensor], op: Op) -> torch.Tensor:
    """The parts combined from the first to the last; overwrites the first."""
    total = parts[0]
    for part in parts[1:]:
        total = op(total, part)
    return total


def operation(op: Any) -> Op:
    """What combines two tensors for a reduction of torch's. Raises ValueError for one that has no order."""
    name = _torch.reduction_name(op)
    found = _OPERATIONS.get(name)
    if found is None:
        raise ValueError(f"reduction {name} over a group of the session; there are: {', '.join(_OPERATIONS)}")
    return found


_OPERATIONS: dict[str, Op] = {
    "SUM": lambda a, b: a.add_(b),
    "PRODUCT": lambda a, b: a.mul_(b),
    "MIN": lambda a, b: torch.minimum(a, b, out=a),
    "MAX": lambda a, b: torch.maximum(a, b, out=a),
    "BAND": lambda a, b: a.bitwise_and_(b),
    "BOR": lambda a, b: a.bitwise_or_(b),
    "BXOR": lambda a, b: a.bitwise_xor_(b),
}
