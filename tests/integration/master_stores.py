"""Stores of communicators in tests that have no coordinator."""

import os
from datetime import timedelta

from torch.distributed import Store, TCPStore


class MasterStores:
    """For every generation the store at MASTER_ADDR and MASTER_PORT, which must outlive all ranks. Its waits end only
    by their timeout."""

    def __init__(self) -> None:
        self._host, self._port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def __call__(self, generation: int) -> Store:
        return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=30))

    def built(self) -> None:
        """Does nothing: waits for its keys are not combined."""

    def interrupt(self) -> None:
        """Does nothing: its waits cannot be ended."""
