"""torch's DataLoader, as trainers in this directory use it: in an order and with numbers that each data-parallel rank
has of its own, because the session seeds its iterators."""

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

BATCH = 8


class Noisy(Dataset[Tensor]):
    """Augmented by torch's own numbers."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(self.width) + index


class Shuffled:
    """A loader with a position. It makes its iterator when it needs one."""

    def __init__(self, width: int) -> None:
        self.loader = DataLoader(Noisy(width), batch_size=BATCH, shuffle=True)
        self.position, self.iterator = 0, None

    def __next__(self) -> Tensor:
        if self.iterator is None:
            self._begin()
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.position, self.iterator = 0, iter(self.loader)
            batch = next(self.iterator)
        self.position += 1
        return batch

    def _begin(self) -> None:
        self.iterator = iter(self.loader)
        for _ in range(self.position):
            next(self.iterator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position, self.iterator = state["position"], None
