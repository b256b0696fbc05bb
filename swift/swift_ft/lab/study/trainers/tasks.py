"""The tasks: a model, its batches, and what it has learned by a test set that it has not seen."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.lab.bench.marks import digest_of, mark, peak_mib
from swift_ft.lab.drill.model import StageModule, standard_library
from swift_ft.lab.drill.topology import ModelConfig

Batch = tuple[Tensor, Tensor]


TEXT_BYTES, PIECE_BYTES = 2_000_000, 16_384
HELD_OUT_EVERY = 8
"""Every eighth piece of the text is only tested on."""
MODEL = ModelConfig(
    layers=2, width=64, heads=4, sequence=64, microbatch=16, bucket_bytes=1 << 20, dropout=0.0
)


class Bytes:
    """The next byte of Python's own sources; measured in bits per byte."""

    lr = 2e-3
    batch_size, length = MODEL.microbatch, MODEL.sequence

    def __init__(self) -> None:
        text = torch.frombuffer(bytearray(standard_library(TEXT_BYTES)), dtype=torch.uint8)
        pieces = text.split(PIECE_BYTES)  # type: ignore[no-untyped-call]
        held_out = torch.cat(pieces[::HELD_OUT_EVERY])
        self._train = torch.cat([p for n, p in enumerate(pieces) if n % HELD_OUT_EVERY])
        rows = min(256, (len(held_out) - 1) // self.length)
        starts = torch.linspace(0, len(held_out) - self.length - 1, rows).long()
        self._test = self._cut(held_out, starts)

    def model(self) -> nn.Module:
        return StageModule(MODEL, 0, 1)

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


Task = Bytes | Digits


def make(name: str) -> Task:
    return Bytes() if name == "bytes" else Digits()


def batch_of(task: Task, seed: int, step: int, rank: int) -> Batch:
    """The same whichever process computes it."""
    return task.batch(torch.Generator().manual_seed((seed * 1_000_003 + step) * 64 + rank))


def mark_end(directory: str, rank: int, model: nn.Module, task: Task) -> None:
    end = {"digest": digest_of(model), "measured": task.measured(model), "peak_mib": peak_mib()}
    mark(directory, "ended", rank=rank, **end)
