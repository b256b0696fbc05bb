"""Process groups that outlive a generation, and the backends that carry their tensors.

    groups           the group objects that torch and trainers hold; process_groups: made anew in every generation
    backend          the interface of a backend, errors, tags
    gloo             torch's library for CPUs, made to be left from outside
    worker_thread    waits in a backend in place of the trainer's thread
    message_collectives  collectives made of messages, in the order of the ranks
    rank_store       torch's store, kept by the coordinator

`default_backend` chooses the backend of this machine's devices.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift_ft.comm.backend import Backend


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment in which every backend listens on the loopback interface alone."""


def default_backend(service_ports: Callable[[], Iterable[int]] = tuple) -> "Backend":
    """The one of this machine's devices: so far, there is one for CPUs.

    `service_ports`: ports of swift's own services at the moment of the call. Connections to them are no backend's.
    """
    from swift_ft.comm.gloo import GlooBackend

    return GlooBackend(service_ports)
