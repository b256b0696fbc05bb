"""The training scripts of a study, as a user would write them, and their tasks: models, batches and held-out test sets.

    python -m swift_ft.lab.study.trainers with_swift|plain|alone JSON      directory, task, seed, steps, …

with_swift  two replicas of a whole model under `swift-ft run`; the strategy is the launcher's
plain       the same under torchrun, without any recovery
alone       the same by one process of plain torch that knows of no failure, no launcher and no swift: checks a cell

(every rank) mark "begun" → for each step "stepped", with the ranks whose batches are in it → "ended"
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.lab.bench.marks import digest_of, mark, peak_mib
from swift_ft.lab.drill.model import StageModule, standard_library
from swift_ft.lab.drill.topology import ModelConfig
from swift_ft.lab.study.settings import RANKS

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


# The trainers.


def _mark_end(directory: str, rank: int, model: nn.Module, task: Task) -> None:
    end = {"digest": digest_of(model), "measured": task.measured(model), "peak_mib": peak_mib()}
    mark(directory, "ended", rank=rank, **end)


class Parts(nn.Module):
    """[RANKS]; rank r's own gradient is 1 at r and 0 elsewhere. So the reduction itself says whose batches are in the
    mean. It is not trained: its rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = nn.Parameter(torch.zeros(RANKS))


def with_swift(given: Mapping[str, Any]) -> None:
    import swift_ft

    directory, task = given["directory"], make(given["task"])
    session = swift_ft.Session.from_env(replicas=RANKS, checkpoint_every=given["checkpoint_every"])
    torch.manual_seed(given["seed"])
    model = session.module(task.model())
    parts = Parts()
    session.module(parts)
    groups: list[dict[str, Any]] = [
        {"params": model.parameters()},
        {"params": parts.parameters(), "lr": 0.0},
    ]
    optimizer = session.optimizer(torch.optim.AdamW(groups, lr=task.lr))
    rank = session.dp_rank

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        loss = task.loss(model, batch_of(task, given["seed"], step, session.dp_rank))
        loss.backward()  # type: ignore[no-untyped-call]
        parts.ranks.grad = functional.one_hot(torch.tensor(session.dp_rank), RANKS).float()
        optimizer.step()
        assert parts.ranks.grad is not None
        there = parts.ranks.grad.nonzero().flatten().tolist()
        mark(directory, "stepped", rank=session.dp_rank, step=step, parts=there)

    mark(directory, "begun", rank=rank)
    session.run(train_step, num_steps=given["steps"])
    _mark_end(directory, rank, model, task)
    session.close()


def plain(given: Mapping[str, Any]) -> None:
    task = make(given["task"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(given["seed"])
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    mark(given["directory"], "begun", rank=rank)
    for step in range(given["steps"]):
        optimizer.zero_grad()
        loss = task.loss(model, batch_of(task, given["seed"], step, rank))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = nn.utils.parameters_to_vector(gradients)
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / RANKS, gradients)
        optimizer.step()
        mark(given["directory"], "stepped", rank=rank, step=step, parts=list(range(RANKS)))
    _mark_end(given["directory"], rank, model, task)
    dist.destroy_process_group()


def alone(given: Mapping[str, Any]) -> None:
    """``fewer``: the steps in which not all replicas had a part, with those that had. Writes ``alone.json``."""
    origins = {int(step): ranks for step, ranks in given["fewer"]}
    torch.set_num_threads(1)
    task = make(given["task"])
    torch.manual_seed(given["seed"])
    model = task.model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=task.lr)
    for step in range(given["steps"]):
        ranks = origins.get(step, range(RANKS))
        losses = [task.loss(model, batch_of(task, given["seed"], step, rank)) for rank in ranks]
        gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, *parts in zip(parameters, *gradients, strict=True):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            parameter.grad = total / len(parts)
        optimizer.step()
    found = {"digest": digest_of(model), "measured": task.measured(model)}
    Path(given["directory"], "alone.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"with_swift": with_swift, "plain": plain, "alone": alone}[sys.argv[1]](json.loads(sys.argv[2]))
