"""Where the ranks of a test meet that has no coordinator: a TCPStore of the test's own, which outlives them all."""

import os
from datetime import timedelta

from torch.distributed import TCPStore


class MasterStores:
    """A communicator's `stores`: for every generation the store at MASTER_ADDR and MASTER_PORT.

    Its waits end with their timeout alone.
    """

    def __call__(self, _generation: int) -> TCPStore:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))

    def built(self) -> None:
        """Nobody waits for its keys."""

    def interrupt(self) -> None:
        """It has no waits that could be ended."""
