"""What carries tensors between the members of a job: the seam (`base`), and what stands behind it.

A backend is a module of this package. `default_backend` chooses one.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swift.runtime.backends.base import Backend

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
"""Environment in which every backend listens on the loopback interface alone."""


def default_backend(service_ports: Callable[[], Iterable[int]] = tuple) -> "Backend":
    """The one of this machine's devices: so far, there is one for CPUs.

    `service_ports`: ports of swift's own services at the moment of the call. Connections to them are no backend's.
    """
    from swift.runtime.backends.gloo import GlooBackend

    return GlooBackend(service_ports)
