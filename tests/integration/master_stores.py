"""Stores of communicators in tests that have no coordinator."""

import os
from datetime import timedelta

from torch.distributed import TCPStore


class MasterStore(TCPStore):
    """The store at MASTER_ADDR and MASTER_PORT, which must outlive all ranks, for every generation. Its waits end only
    by their timeout."""

    def __init__(self, generation: int) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        super().__init__(address, port, is_master=False, timeout=timedelta(seconds=30))

    def built(self) -> None: ...

    def interrupt(self) -> None: ...
