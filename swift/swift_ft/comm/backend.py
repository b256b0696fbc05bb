"""The interface of a backend, the tags of messages, and the errors that a lost peer may be the cause of.

The seam between swift and what carries its tensors: one library or another, behind the same types.

A process has one `Backend`. For every generation it opens a `Fabric`: what connects the members of that generation, and
no others. The groups of the generation are connected in it, and end with it.

    (main thread)     fabric = backend.open(); fabric.connect(store, own, size, timeout) for each set of members;
                      connections.circuit(places, number) for each group over it; fabric.finish_connecting();
                      … communicate …
    (watcher thread)  fabric.abort(), again and again, until the main thread has left its operation
    (main thread)     fabric.close(); then the next generation's fabric

What every backend promises (`tests/integration/test_backends.py` holds each one to it):

- An abort frees each thread of this process that waits in the fabric, whatever it waits in, `connect` included. It
  needs nothing from other members. A thread that is freed gets a RuntimeError that `is_lost_peer` recognizes. Which
  error it is may differ from member to member.
- An operation that starts after an abort raises. It does not wait.
- No message of one fabric arrives in another one.
- Other groups of the process, and connections of the trainer's own, are not touched.
- Sums are taken in the order of the members, so their bits depend on neither sizes nor timing.
"""

import re
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

from swift_ft.comm.worker_thread import Task

# Errors that reach the trainer's thread: which of them a lost peer may be behind, and what is said of them.

# What our own communication errors say, also when torch has wrapped them.
_OURS = "process group"

# Where the source of a C++ library was when it was built.
_SOURCE = re.compile(r"\[/[^\]\s]*:\d+\]\s*")


def is_communication(error: BaseException, is_lost_peer: Callable[[RuntimeError], bool]) -> bool:
    """Whether a lost peer may be behind it, or behind what it was raised from: torch wraps what happens inside a
    backward. Any other error of a step is the trainer's own. `is_lost_peer`: the backend's."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and (_OURS in str(seen).lower() or is_lost_peer(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def let_go(error: BaseException) -> None:
    """Clears the frames that the error's tracebacks hold: they keep the old group and its buffers alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def advice_on(error: BaseException) -> str:
    """What the author of an exception may want that tells of no mistake: one of the script's own, or one by which
    something else ends."""
    means_an_end = type(error).__module__ == "__main__" or "stop" in type(error).__name__.lower()
    return " (to end a run before its last step, call session.stop() in it)" if means_an_end else ""


def words_of(error: BaseException) -> str:
    """One line: the kind of an error that says nothing of itself, and the first line of what it says; and what it was
    raised from (torch: "[Stage 1] failed to run forward:")."""
    lines = _SOURCE.sub("", str(error)).strip().splitlines()
    first = " ".join(lines[0].split()) if lines else ""
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{words.removesuffix(':')}: {words_of(error.__cause__)}" if error.__cause__ is not None else words


class Rehearsed(Exception):
    """The step is as far as it is to go (`swift_ft.train.rehearsal`, `swift_ft.train.rehearsal`)."""


class Misspeculated(Exception):
    """A step has gone on as if nothing had to be clipped. All ranks take it back (`swift_ft.train.staggering`)."""


# Message tags, all of them: what keeps messages apart that pass between the same two members of a group.
#
#     tags                             what                                              when
#     0 …                              torch's schedules, and trainers by hand           in a step
#     REPLICA_HEADER … REPLICA_CHUNK+  a state; its chunks are numbered                  in a recovery, or between steps
#     NOTE … INNER_GRADIENTS           a shared replay; buckets are numbered             in a replay
#     REROUTED …                       what stages send each other, by microbatch        in a step that lacks ranks
#     PROBE                            a message that is timed                           before a step of all ranks
#     first_tag(number) …              the collectives of the group with this number     any time
#
# The first five are never under way at once, and stay below `COLLECTIVES`. A tag is an int of C: below 2^31.

REPLICA_HEADER, REPLICA_MANIFEST, REPLICA_DIGESTS = 1, 2, 3
REPLICA_CHUNK = 16

NOTE, NOTE_PAYLOAD = 1 << 16, (1 << 16) + 1
WEIGHTS = 1 << 17
GRADIENTS_MASK, GRADIENTS = (1 << 18) - 1, 1 << 18
INNER_ACTIVATIONS, INNER_GRADIENTS = 1 << 19, (1 << 19) + 1

REROUTED = 1 << 19
"""To `COLLECTIVES`."""
PROBE = REROUTED

COLLECTIVES = 1 << 20
"""So many tags each group has for its collectives."""
GROUPS = 1000
"""So many groups have numbers, and as many parts of groups."""


def group_number(label: str) -> int:
    """By which groups over the same connections keep their collectives apart. Parts have numbers of their own."""
    return zlib.crc32(label.encode()) % GROUPS + (GROUPS if "[" in label else 0)


def first_tag(number: int) -> int:
    """Of the collectives of the group with this number (0 to 2 `GROUPS` - 1)."""
    return (1 + number) * COLLECTIVES


Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Combines two tensors; it may overwrite the first one and return it."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> Any:
        """Returns when the tensor may be used again. Raises RuntimeError if the message is lost."""


class Wire(Protocol):
    """Messages, by the members' places in a group. Contiguous tensors, one a message; messages between the same two
    members with the same tag (`swift_ft.comm.backend`) arrive in order."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        """To the member at place `to`."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        """From the member at place `source`, into a tensor of the size and dtype that were sent."""


class Collectives(Protocol):
    """Collectives of one group. All its members call the same ones in the same order. Tensors are contiguous, except
    where it says otherwise."""

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """In place, in the members' order: op(op(x0, x1), x2) … for every element. `tensor` may have any strides."""

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        """In place: the backend's own sum, in whatever order is quickest."""

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Op) -> None:
        """`output`: all members' ``parts[own]``, combined in their order."""

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        """`own` of every member, in `outputs` by its place."""

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        """``outgoing[p]`` goes to the member at place p, ``incoming[p]`` comes from it."""

    def begin_all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> Pending:
        """As `all_to_all`, without waiting. Several may be under way."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """In place, from the member at place `root`. `tensor` may have any strides."""

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        """Returns once all members have entered. `ballot`: becomes, in place, the maximum of what all have given."""


Collective = Callable[[Collectives], None]


class Circuit(Wire, Protocol):
    """One group, seen from one of its members. Places count from 0 in the order of the group's members."""

    def submit(self, run: Collective) -> Task:
        """Starts collectives, in the order of the calls, without waiting for them."""


class Connections(Protocol):
    """Between all members that connected with each other. Several groups may lie over them."""

    def circuit(self, places: Sequence[int], number: int, label: str) -> Circuit:
        """A group of the members at `places`, this process among them. `number`, from 0 to 2 `tags.GROUPS` - 1, keeps
        the group's collectives apart from those of others over the same connections. `label` names it in errors."""


class Fabric(Protocol):
    """What connects the members of one generation."""

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> Connections:
        """(each of `size` members) Returns once all are connected. `store`: seen by these members alone, and never
        used before. `own`: this process's place among them, from 0. Raises RuntimeError."""

    def finish_connecting(self) -> None:
        """All groups are connected: what this process opens from now on is not the fabric's."""

    def abort(self) -> None:
        """(any thread, any number of times) Frees whoever waits. See the module's promises."""

    def close(self) -> None:
        """Ends all groups. An abort that comes later does nothing."""


class Backend(Protocol):
    """How the members of a job communicate. One for a process."""

    name: str
    """As `torch.distributed.get_backend` is to tell it."""
    device: torch.device
    """Where the tensors are that it moves."""

    def open(self) -> Fabric:
        """What will connect the members of the next generation."""

    def placeholder(self) -> Any:
        """A torch backend of this kind with one member. torch looks into it to name a group's backend, and never
        communicates through it."""

    def is_lost_peer(self, error: RuntimeError) -> bool:
        """Whether a lost peer or an abort may be behind this error."""
