"""A bucket of one optimizer's parameters, on its way to being applied."""

import torch

from swift.optim.journal import Journal
from swift.runtime.reducer import Reduction


class Bucket:
    """What one step has of it."""

    def __init__(self, journal: Journal, index: int):
        self.journal = journal
        self.index = index
        self.parameters = journal.buckets[index]
        self.reduction: Reduction | None = None
        self.reduced = False
        """Its gradients are averages, and its optimizer has not stepped since."""
        self.launched_in = 0
        """(a step that may be cut short) The generation in which its reduction was begun."""
        self.averaged_in = 0
        """(a step that may be cut short) The generation over whose ranks it was averaged; 0: it was not yet."""
        self.average: torch.Tensor | None = None
        """(the same) What came of it, whatever the trainer has made of its gradients since."""
        self.awaited: set[torch.nn.Parameter] = set()

    def begin(self) -> None:
        """A step does."""
        self.reduction, self.reduced = None, False
        self.launched_in = self.averaged_in = 0
        self.average = None
