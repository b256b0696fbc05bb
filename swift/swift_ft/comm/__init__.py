"""Process groups that outlive a generation, and the backends that carry their tensors.

    groups           the group objects that torch and trainers hold; process_groups: created anew in every generation
    backend          the interface of a backend, errors, tags
    gloo             torch's library for CPUs, extended with an abort from another thread
    nccl             a device's tensors over NCCL or a library like it, beside gloo
    worker_thread    waits in a backend in place of the trainer's thread
    staging          a device's tensors over a wire for host memory
    message_collectives  collectives built from messages, in the order of the ranks
    rank_store       torch's store, kept by the coordinator

`default_backend` chooses the backend.
"""

from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift_ft.comm.backend import Backend


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment in which every backend listens on the loopback interface alone."""


def default_backend(service_ports: Callable[[], Iterable[int]] = tuple) -> "Backend":
    """Returns the backend: gloo, which carries a device's tensors by way of pinned memory, or with a library of the
    accelerator's (`swift_ft.comm.nccl.Library`) if its package offers one.

    `service_ports`: returns the current ports of swift's own services. Connections to them belong to no backend.
    """
    import torch

    from swift_ft.comm.gloo import GlooBackend

    kind = torch.accelerator.current_accelerator()
    if kind is not None:
        for offered in entry_points(group="swift_ft.communicators", name=kind.type):
            from swift_ft.comm.nccl import NcclBackend

            return NcclBackend(service_ports, offered.load()())
    return GlooBackend(service_ports)
