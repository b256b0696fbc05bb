"""The tasks: a model, its batches, and what it has learned by a test set that it has not seen.

B batch, S sequence, D width of the model, V 256 bytes.
"""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.lab.study.trainers import corpus

Batch = tuple[Tensor, Tensor]


class Task(Protocol):
    lr: float

    def model(self) -> nn.Module: ...
    def batch(self, generator: torch.Generator) -> Batch: ...
    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...
    def measured(self, model: nn.Module) -> float: ...


class ByteModel(nn.Module):
    """A causal transformer over bytes: [B, S] -> [B, S, V]."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = [
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        self.layers = nn.ModuleList(layer)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.bytes(text) + self.places
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask, is_causal=True)
        out: Tensor = self.head(self.norm(hidden))
        return out


class Bytes:
    """The next byte of Python's own sources; measured in bits per byte."""

    lr = 2e-3
    batch_size, length = 16, 64

    def __init__(self) -> None:
        train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in corpus.split())
        self._train = train
        rows = min(256, (len(held_out) - 1) // self.length)
        starts = torch.linspace(0, len(held_out) - self.length - 1, rows).long()
        self._test = self._cut(held_out, starts)

    def model(self) -> nn.Module:
        return ByteModel(length=self.length)

    def batch(self, generator: torch.Generator) -> Batch:
        last = len(self._train) - self.length - 1
        return self._cut(self._train, torch.randint(0, last, (self.batch_size,), generator=generator))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def measured(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss(model, self._test)) / math.log(2)

    def _cut(self, text: Tensor, starts: Tensor) -> Batch:
        rows = text[starts[:, None] + torch.arange(self.length + 1)].long()
        return rows[:, :-1], rows[:, 1:]


class Digits:
    """scikit-learn's digits, 1,797 images of 8 x 8; every fourth is held out; measured by the share that is right."""

    lr = 1e-3
    batch_size = 16

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # the extra `lab`

        found = load_digits()
        images = torch.from_numpy(found.images).float()[:, None] / 16.0
        labels = torch.from_numpy(found.target).long()
        held_out = torch.arange(len(labels)) % 4 == 0
        self._test = images[held_out], labels[held_out]
        self._train = images[~held_out], labels[~held_out]

    def model(self) -> nn.Module:
        """Two convolutions and a linear layer: [B, 1, 8, 8] -> [B, 10]."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def batch(self, generator: torch.Generator) -> Batch:
        chosen = torch.randint(0, len(self._train[1]), (self.batch_size,), generator=generator)
        return self._train[0][chosen], self._train[1][chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def measured(self, model: nn.Module) -> float:
        with torch.no_grad():
            right = model(self._test[0]).argmax(1) == self._test[1]
        return 100.0 * float(right.float().mean())


def make(name: str) -> Task:
    found: dict[str, type[Bytes] | type[Digits]] = {"bytes": Bytes, "digits": Digits}
    return found[name]()


def batch_of(task: Task, seed: int, step: int, rank: int) -> Batch:
    """The same whichever process computes it."""
    return task.batch(torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank))
