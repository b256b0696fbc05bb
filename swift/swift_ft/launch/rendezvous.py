"""The rendezvous of machines without numbers: they meet at the coordinator, by the same command on each.

torch's own keeps a store on one of the machines, and ends with it. Here each launcher reports to the coordinator every
few seconds that it is alive and which place it holds (`services/swift_ft_services/coordinator/driver.py`); so any
machine may be lost, and a new one takes its place without any message to the others.

    (main thread)  ``next_rendezvous`` waits until there is a place; `lost` while the ranks run; ``leave`` in the end
    (own thread)   talks to the coordinator, and wakes the main loop when the place is lost
"""

import math
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import AccessDenied, ServiceError, SwiftError, UsageError
from swift_ft.launch.ranks import MachinePlace, RankProgram

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from swift_ft.coordinator_client import CoordinatorClient


# Numbers of machines, and the store for trainers that want one: for one machine, and for several with numbers.
#
# Machines without numbers meet at the coordinator (`MetRendezvous`). torch's own rendezvous is not used: it runs on one
# of the machines, and without that one no machine can join.

LOOPBACK = "127.0.0.1"
OWN_KEYS = "swift/"
"""Prefix of the launchers' own keys (`swift_ft.launch.together`)."""


def open_store(
    host: str, port: int, *, timeout_s: float = 300.0, listener: int | None = None, is_first: bool = True
) -> "TCPStore":
    """Opens a store for trainers, or a connection to one. `listener`: a listening socket's descriptor, which the store
    owns from then on."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # here, because torch takes long to import

    limit = timedelta(seconds=timeout_s)
    return TCPStore(
        host, port, is_master=is_first, timeout=limit, wait_for_workers=False, master_listen_fd=listener
    )


class Rendezvous(ABC):
    _store: "TCPStore | None" = None
    """(the first machine) The store for trainers that want one."""

    @abstractmethod
    def next_rendezvous(self) -> MachinePlace:
        """Waits for a place, and returns it. Again when all ranks of a script without a session are restarted."""

    @property
    def lost(self) -> str:
        """Why this machine has lost its place; empty while it has one."""
        return ""

    @property
    def is_used(self) -> bool:
        """Whether ranks meet in this machine's store, which a session does not need."""
        keys = [] if self._store is None else self._store.list_keys()
        return any(not key.startswith(OWN_KEYS) for key in keys)

    def leave(self) -> None:  # noqa: B027
        """Releases the place, at the end."""


class LoopbackRendezvous(Rendezvous):
    """One node, complete at once. Gives the same guarantees as torch's static rendezvous with one node.

    The store is in the launcher and listens on loopback only; torchrun would use its c10d rendezvous, whose store
    listens on every interface. It outlives every rank, since it is in no rank's process.
    """

    def __init__(self, ranks: int, timeout_s: float, lost: Callable[[], str] = str) -> None:
        """Initializes. `lost`: returns why the job's own services are lost; empty while they are there."""
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._lost = lost

    @property
    def lost(self) -> str:
        return self._lost()

    def next_rendezvous(self) -> MachinePlace:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = open_store(LOOPBACK, port, timeout_s=self._timeout_s, listener=listener.detach())
        return MachinePlace(number=0, ranks_of=[self._ranks], master_addr=LOOPBACK, master_port=port)


class PlacedRendezvous(Rendezvous):
    """Machines with configured numbers (`--node-rank`) and equally many ranks each, so that no communication is needed.

    torch's own keeps a store on the first machine, without which no other one can start or end. Here any machine may be
    lost, and another launcher with its number takes its place. The first one still has a store at MASTER_ADDR, for
    trainers that want one.
    """

    def __init__(self, ranks: int, node_rank: int, nodes: int, address: str, port: int) -> None:
        self._place = MachinePlace(
            number=node_rank, ranks_of=[ranks] * nodes, master_addr=address, master_port=port
        )

    def next_rendezvous(self) -> MachinePlace:
        if self._place.number == 0 and self._store is None:
            port = self._place.master_port
            self._store = open_store("localhost", port)
        return self._place


POLL_S = 0.2
"""Seconds between two calls to the coordinator, while there is no place yet."""
LONGEST_S = 3600.0
LEAVE_S = 2.0
"""Seconds for which a launcher that ends waits until its place is released."""


def seconds_of(configs: Mapping[str, object], name: str, most: float = LONGEST_S) -> float:
    """Returns a time of `--rdzv-conf` that is given. Raises ValueError."""
    try:
        value = float(str(configs[name]))
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= most:
        raise ValueError(f"--rdzv-conf {name}={configs[name]}: 0.01 to {most:g}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Settings of `--rdzv-conf` for a meeting, by torch's names."""

    join_timeout: float = 600.0
    """Seconds that a machine waits for the others, while there are too few of them."""
    last_call_timeout: float = 30.0
    """Seconds of waiting for more machines, if there are enough to begin but not the most (`--nnodes MIN:MAX`)."""
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: float = 3.0
    """Silent intervals after which a machine is lost."""

    @classmethod
    def of(cls, configs: Mapping[str, object]) -> "Terms":
        return cls(
            **{name: seconds_of(configs, name) for name in cls.__dataclass_fields__ if name in configs}
        )

    @property
    def lease_s(self) -> float:
        return min(LONGEST_S, self.keep_alive_interval * self.keep_alive_max_attempt)


class NotNeeded(Exception):
    """Raised if the job ended without this machine."""


class MetRendezvous(Rendezvous):
    def __init__(
        self,
        job: RankProgram,
        *,
        nodes: tuple[int, int],
        ranks: int,
        address: str,
        terms: Terms,
        wake: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._job = job
        self._nodes = nodes
        self._terms = terms
        self._wake = wake
        self._say = say
        self._port = _reserve()
        self._machine = pb.Machine(address=address, port=self._port.getsockname()[1], ranks=ranks)
        self._taken = pb.MeetReply()
        """The answer by which the ranks of this machine run."""
        self._newest = pb.MeetReply()
        self._error: SwiftError | None = None
        self._answered = threading.Condition()
        self._speaks = threading.Event()
        """Set to call the coordinator at once, instead of after the interval."""
        self._closed = False
        self._thread = threading.Thread(target=self._keep_meeting, name="meeting", daemon=True)
        self._thread.start()

    def next_rendezvous(self) -> MachinePlace:
        """Waits for a place. Raises NotNeeded, UsageError, AccessDenied, or ServiceError if the others do not come."""
        taken = self._taken = self._await_place()
        if taken.place == 0:
            self._open_store()
        return MachinePlace(
            number=taken.place,
            ranks_of=[machine.ranks for machine in taken.machines],
            master_addr=taken.machines[0].address,
            master_port=taken.machines[0].port,
        )

    @property
    def lost(self) -> str:
        return self._newest.over if self._taken.machines else ""

    def leave(self) -> None:
        self._closed = True
        self._speaks.set()
        self._thread.join(LEAVE_S)
        self._port.close()

    # --- ---

    def _open_store(self) -> None:
        self._port.listen()
        self._store = open_store(
            LOOPBACK,
            self._machine.port,
            timeout_s=self._terms.join_timeout,
            listener=os.dup(self._port.fileno()),
        )

    def _await_place(self) -> pb.MeetReply:
        deadline = time.monotonic() + self._terms.join_timeout
        told_here = 0
        with self._answered:
            while not self._newest.machines:
                if self._error is not None:
                    raise self._error
                if self._newest.over:
                    raise NotNeeded(self._newest.over)
                here, least = self._newest.here, self._nodes[0]
                if here > told_here:
                    told_here = here
                    self._say(
                        f"{here} of {least} machines are here: waiting for the others"
                        if here < least
                        else f"{here} machines are here: waiting for a place"
                    )
                if here < least and time.monotonic() >= deadline:
                    raise ServiceError(
                        f"run: {here} of {least} machines were here after {self._terms.join_timeout:g} s: start the "
                        "same command on all of them (--rdzv-conf=join_timeout=SECONDS: waits longer)"
                    )
                self._answered.wait(POLL_S)
            return self._newest

    def _keep_meeting(self) -> None:
        from swift_ft.coordinator_client import CoordinatorClient  # here, because grpc takes long to import

        try:
            client = CoordinatorClient(self._job.coordinator, self._job.name)
        except SwiftError as error:  # its files were valid when the command checked them
            self._keep_reply(None, error)
            return
        with client:
            while not self._closed:
                self._speak(client)
                newest, interval_s = self._newest, self._terms.keep_alive_interval
                self._speaks.wait(
                    min(interval_s, newest.every_s or interval_s) if newest.machines else POLL_S
                )
                self._speaks.clear()
            try:
                client.call(pb.MeetRequest(run=self._job.run, leaves=True))
            except SwiftError as error:  # then its lease expires
                events.emit("meeting_not_left", reason=str(error))

    def _speak(self, client: "CoordinatorClient") -> None:
        held = self._newest if self._newest.machines else None
        request = pb.MeetRequest(
            job=self._job.name,
            run=self._job.run,
            machine=self._machine,
            machines_min=self._nodes[0],
            machines_max=self._nodes[1],
            lease_s=self._terms.lease_s,
            last_call_s=self._terms.last_call_timeout,
            held=held,
        )
        try:
            reply: pb.MeetReply = client.call(request)
        except (UsageError, AccessDenied) as error:
            if held is None:
                self._keep_reply(None, error)
        except SwiftError:
            pass  # no answer, which the link reports; the next call repeats it
        else:
            self._keep_reply(reply)

    def _keep_reply(self, reply: pb.MeetReply | None, error: SwiftError | None = None) -> None:
        with self._answered:
            self._error = error
            if reply is not None:
                self._newest = reply
            self._answered.notify_all()
        if self.lost:
            self._wake()


def _reserve() -> socket.socket:
    """Returns a socket bound to a port of this machine, on which it does not listen yet."""
    port = socket.socket()
    port.bind(("", 0))
    return port
