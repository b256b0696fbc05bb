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

NCCL_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the watchdog would end the process when a peer is lost
    "TORCH_NCCL_DESYNC_DEBUG": "0",  # turns that on
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a monitor would end the process while an abort waits
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # the watchdog would call the store of a generation that is over
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # the host would wait for each message
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",  # seconds that a connection waits for a lost peer, instead of 1800
    "NCCL_NVLS_ENABLE": "0",  # multicast memory is not given back by every abort
}
"""Environment of a rank. NCCL's communicators are made in this one alone."""


def default_backend(service_ports: Callable[[], Iterable[int]] = tuple) -> "Backend":
    """Returns the backend: gloo, which carries a device's tensors by way of pinned memory, or with a library of the
    accelerator's (`swift_ft.comm.nccl.Library`): one that its package offers, or NCCL for CUDA.

    `service_ports`: returns the current ports of swift's own services. Connections to them belong to no backend.
    """
    import torch

    from swift_ft.comm.gloo import GlooBackend

    kind = torch.accelerator.current_accelerator()
    offered = [] if kind is None else [*entry_points(group="swift_ft.communicators", name=kind.type)]
    if offered or (kind is not None and kind.type == "cuda" and torch.distributed.is_nccl_available()):
        from swift_ft.comm.nccl import NcclBackend, TorchNccl

        return NcclBackend(service_ports, offered[0].load()() if offered else TorchNccl())
    return GlooBackend(service_ports)
