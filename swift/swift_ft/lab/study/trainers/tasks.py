"""The tasks: a model, its batches, and what it has learned by a test set that it has not seen.

B batch, S sequence, D width of the model, V 256 bytes.
"""

import math
import sysconfig
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.lab.bench.marks import digest_of, mark, peak_mib

Batch = tuple[Tensor, Tensor]


FILES_MAX, BYTES_MAX = 240, 16_384
"""Files of the standard library, and bytes of each: about 2 MB."""
HELD_OUT_EVERY = 8
"""Every eighth file is only tested on."""


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
        train, held_out = (
            torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in standard_library()
        )
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


def standard_library() -> tuple[bytes, bytes]:
    """Returns sources of the running Python's library, in the order of their names, without tests: those to train on,
    and those held out."""
    top = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "site-packages", "idlelib", "lib2to3"}
    found = [*top.glob("*.py"), *top.glob("[a-z]*/*.py")]
    sources = sorted(path for path in found if not left_out & set(path.relative_to(top).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(sources[:FILES_MAX]):
        parts[number % HELD_OUT_EVERY == 0].append(path.read_bytes()[:BYTES_MAX])
    return b"".join(parts[0]), b"".join(parts[1])


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


def mark_end(directory: str, rank: int, model: nn.Module, task: Task) -> None:
    end = {"digest": digest_of(model), "measured": task.measured(model), "peak_mib": peak_mib()}
    mark(directory, "ended", rank=rank, **end)
