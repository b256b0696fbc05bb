"""A pipelined trainer that survives the loss of ranks: swift-ft run --nproc-per-node 4 examples/resilient.py

A byte-level next-character model on Python's own standard library, one pipeline stage per rank.
`examples/plain.py` is the same trainer on plain torch; compare them with diff.
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import swift_ft

STEPS, MICROBATCHES, BATCH, SEQUENCE, WIDTH = 200, 8, 32, 64, 128
TEXT = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_bytes()


class Loader:
    """Batches of bytes; its state is its position."""

    def __init__(self) -> None:
        self.position = 0
        self.text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.arange(BATCH) * 997 + self.position * 131
        rows = self.text[(starts[:, None] + torch.arange(SEQUENCE + 1)) % len(self.text)]
        self.position += 1
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make_stage(index: int, count: int) -> nn.Sequential:
    torch.manual_seed(index)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(WIDTH)]
    if index == 0:
        layers.insert(0, nn.Embedding(256, WIDTH))
    if index == count - 1:
        layers.append(nn.Linear(WIDTH, 256))
    return nn.Sequential(*layers)


def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    session = swift_ft.Session.from_env(checkpoint_every=50)
    rank, count = dist.get_rank(), dist.get_world_size()
    module = make_stage(rank, count)
    stage = session.adopt(PipelineStage(module, rank, count, torch.device("cpu")))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader = Loader()
    session.register(schedule=schedule, scheduler=scheduler, loader=loader)

    def train_step(step: int) -> None:
        inputs, targets = next(loader)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == count - 1:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        scheduler.step()
        if losses and step % 20 == 0:
            print(f"step {step} loss {torch.stack(losses).mean():.4f}", flush=True)

    session.run(train_step, num_steps=STEPS)
    session.close()


if __name__ == "__main__":
    main()
