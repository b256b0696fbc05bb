"""The interface of a backend, the tags of messages, and the classification of errors that a lost peer may have caused.

A backend is the library that moves the tensors. The types below hide which library that is.

A process has one `Backend`. For every generation it opens a `Fabric`, which connects exactly the members of that
generation. The groups of the generation are connected in the fabric and end with it.

    (main thread)     fabric = backend.open(); fabric.connect(store, own, size, timeout) for each set of members;
                      connections.circuit(places, number) for each group over it; fabric.finish_connecting();
                      … communicate …
    (watcher thread)  fabric.abort(), again and again, until the main thread has left its operation
    (main thread)     fabric.close(); then the next generation's fabric

Every backend guarantees the following (`tests/integration/test_backends.py` checks each one):

- An abort frees each thread of this process that waits in the fabric, in any operation, `connect` included. It
  needs no cooperation of other members. A freed thread gets a RuntimeError that `is_lost_peer` recognizes. The exact
  error may differ from member to member.
- An operation that starts after an abort raises and does not wait.
- No message of one fabric arrives in another one.
- Other groups of the process, and the trainer's own connections, are not touched.
- Sums are taken in the order of the members, so their bits depend on neither sizes nor timing.
"""

import re
import traceback
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from swift_ft.comm.worker_thread import Task
from swift_ft.device import Accelerator

# Errors that reach the trainer's thread: which ones a lost peer may have caused, and how they are reported.

# Contained in the messages of our own communication errors, also after torch has wrapped them.
_OURS = "process group"

# Source location that a C++ library puts into its messages.
_SOURCE = re.compile(r"\[/[^\]\s]*:\d+\]\s*")


def is_communication(error: BaseException, is_lost_peer: Callable[[RuntimeError], bool]) -> bool:
    """Returns whether a lost peer may have caused the error or one that it was raised from: torch wraps errors that
    occur inside a backward. Any other error of a step is the trainer's own. `is_lost_peer`: the backend's check."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, RuntimeError) and (_OURS in str(seen).lower() or is_lost_peer(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def clear_frames(error: BaseException) -> None:
    """Clears the frames that the error's tracebacks hold: they keep the old group and its buffers alive."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def advice_on(error: BaseException) -> str:
    """Returns a hint for an exception that probably signals an intended end, else "". Such an exception is defined in
    the script itself or has "stop" in its name."""
    means_an_end = type(error).__module__ == "__main__" or "stop" in type(error).__name__.lower()
    return " (to end a run before its last step, call session.stop() in it)" if means_an_end else ""


def words_of(error: BaseException) -> str:
    """Returns one line: the error's type, the first line of its message, and the same of the errors that it was raised
    from (torch's own message alone says little: "[Stage 1] failed to run forward:")."""
    lines = _SOURCE.sub("", str(error)).strip().splitlines()
    first = " ".join(lines[0].split()) if lines else ""
    words = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{words.removesuffix(':')}: {words_of(error.__cause__)}" if error.__cause__ is not None else words


class Rehearsed(Exception):
    """Ends a warm-up step at the point where it is to stop (`swift_ft.train.rehearsal`)."""


class Misspeculated(Exception):
    """A step assumed that no gradient is clipped and was wrong. All ranks undo it (`swift_ft.train.staggering`)."""


# All message tags. A tag separates messages that pass between the same two members of a group.
#
#     tags                             what                                              when
#     0 …                              torch's schedules, and trainers by hand           in a step
#     REPLICA_HEADER … REPLICA_CHUNK+  a state; its chunks are numbered                  in a recovery, or between steps
#     NOTE … GRADIENTS+                a shared replay; buckets are numbered             in a replay
#     REROUTED …                       messages between stages, by microbatch            in a step of a degraded world
#     first_tag(number) …              the collectives of the group with this number     any time
#     message_tag(number, tag)         a message over the trainer's group                any time
#
# The first four are never in flight at once, and stay below `COLLECTIVES`. A tag is a C int: below 2^31.

REPLICA_HEADER, REPLICA_MANIFEST, REPLICA_DIGESTS = 1, 2, 3
REPLICA_CHUNK = 16

NOTE, NOTE_PAYLOAD = 1 << 16, (1 << 16) + 1
WEIGHTS = 1 << 17
GRADIENTS_MASK, GRADIENTS = (1 << 18) - 1, 1 << 18

REROUTED = 1 << 19
"""First tag of rerouted messages; the range ends at `COLLECTIVES`."""

COLLECTIVES = 1 << 20
"""Tags that each group has for its collectives; in a trainer's group the second half is for its messages."""
GROUPS = 500
"""Numbers for the session's groups; parts of them have as many of their own, and the trainer's groups the rest."""
TRAINERS_GROUPS = 2 * GROUPS
"""First number of a trainer's group."""
TRAINERS_GROUPS_MAX = 1000
"""Groups of a trainer's own that may share a rank."""


def group_number(label: str) -> int:
    """Returns the number that separates the collectives of a group of the session's from others over the same
    connections. Parts of groups have a number range of their own."""
    return zlib.crc32(label.encode()) % GROUPS + (GROUPS if "[" in label else 0)


def first_tag(number: int) -> int:
    return (1 + number) * COLLECTIVES


def message_tag(number: int, tag: int) -> int:
    """Returns the tag with which a message over a group travels: groups of a trainer's own share connections. Raises
    ValueError for a tag that would be another group's."""
    if number >= TRAINERS_GROUPS and not 0 <= tag < COLLECTIVES // 2:
        raise ValueError(f"tag {tag} of a message: give one from 0 to {COLLECTIVES // 2 - 1}")
    return tag if number < TRAINERS_GROUPS else first_tag(number) + COLLECTIVES // 2 + tag


Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Combines two tensors; it may overwrite the first one and return it."""


class Pending(Protocol):
    def wait(self) -> Any:
        """Returns when the tensor may be used again. Raises RuntimeError if the message is lost."""


class Wire(Protocol):
    """Point-to-point messages, addressed by the members' places in a group. A message is one contiguous tensor.
    Messages between the same two members with the same tag (`swift_ft.comm.backend`) arrive in order."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        """Sends to the member at place `to`."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        """Receives from the member at place `source`, into a tensor of the size and dtype that were sent."""


class Collectives(Protocol):
    """Collectives of one group. All its members call the same ones in the same order. Tensors are contiguous unless
    stated otherwise."""

    def all_reduce(self, tensor: torch.Tensor, op: Op) -> None:
        """Reduces in place, in the members' order: op(op(x0, x1), x2) … per element. `tensor` may have any strides."""

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        """Sums in place with the backend's own sum, in the order that is fastest."""

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: Op) -> None:
        """Fills `output` with all members' ``parts[own]``, combined in the members' order."""

    def all_gather(self, outputs: list[torch.Tensor], own: torch.Tensor) -> None:
        """Fills `outputs` with every member's `own`, by its place."""

    def all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> None:
        """Sends ``outgoing[p]`` to the member at place p and receives ``incoming[p]`` from it."""

    def begin_all_to_all(self, incoming: list[torch.Tensor], outgoing: list[torch.Tensor]) -> Pending:
        """Starts an `all_to_all` without waiting. Several may be in flight."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Broadcasts in place from the member at place `root`. `tensor` may have any strides."""

    def barrier(self, ballot: torch.Tensor | None = None) -> None:
        """Returns once all members have entered. `ballot` becomes, in place, the elementwise maximum of all ballots."""


Collective = Callable[[Collectives], None]


class Circuit(Wire, Protocol):
    """One group, seen from one of its members. Places count from 0 in the order of the group's members."""

    def submit(self, run: Collective) -> Task:
        """Starts collectives, in the order of the calls, without waiting for them."""


class Connections(Protocol):
    """The connections between all members that connected with each other. Several groups may share them."""

    def circuit(self, places: Sequence[int], number: int, label: str) -> Circuit:
        """Returns a group of the members at `places`, which include this process. `number` (0 to 2 `GROUPS` - 1)
        separates its collectives from those of others over the same connections. `label` names it in errors."""


class Fabric(Protocol):
    """The connections between the members of one generation."""

    def connect(self, store: Store, own: int, size: int, timeout: timedelta) -> Connections:
        """(each of `size` members) Returns once all are connected. `store`: seen by these members alone and never used
        before. `own`: this process's place among them, from 0. Raises RuntimeError."""

    def finish_connecting(self) -> None:
        """Marks the end of connecting: sockets that this process opens from now on are not the fabric's."""

    def arriving(self) -> Accelerator | None:
        """Returns the device that has had messages whose waits order streams only, while the host goes on, since the
        last check that covered all; else None."""

    def begin_check(self) -> Callable[[], None]:
        """Returns what the host calls once it has waited for the current stream of the device, up to now: it raises as
        `check_arrived`, and covers the messages so far if that stream, or the device, is behind all of them."""

    def check_arrived(self) -> None:
        """Raises RuntimeError if an abort may have ended a message, which then has left garbage. Says so before the
        device goes on."""

    def abort(self) -> None:
        """(any thread, any number of times) Frees all waiting threads. See the module's guarantees."""

    def close(self) -> None:
        """Ends all groups. A later abort has no effect."""


class Backend(Protocol):
    """The way the members of a job communicate. One per process."""

    name: str
    """Name that `torch.distributed.get_backend` returns."""

    def open(self) -> Fabric:
        """Opens the fabric that will connect the members of the next generation."""

    def placeholder(self) -> Any:
        """Returns a torch backend of this kind with one member. torch looks into it to name a group's backend, and
        never communicates through it."""

    def is_lost_peer(self, error: RuntimeError) -> bool:
        """Returns whether a lost peer or an abort may have caused this error."""
