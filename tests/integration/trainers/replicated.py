"""Data parallelism without a pipeline: `replicated.py MODE STEPS`.

plain      a whole module; the session averages its gradients, clips them, scales them
ddp        DistributedDataParallel, two backward passes in a step
wait_free  buckets are applied while backward goes on, after an accumulating pass; NAdam
statistics running statistics that every replica takes of its own batches: these are no replicas
"""

import sys

import torch
from torch import Tensor, nn

import swift

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH = 16, 8


class Data:
    """The same position on all replicas; each draws its own batch there."""

    def __init__(self, column: int) -> None:
        self.position, self._column = 0, column

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.position * 1000 + self._column)
        self.position += 1
        return torch.randn(BATCH, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def main() -> None:
    updates = "wait_free" if MODE == "wait_free" else "after_backward"
    with swift.Session.from_env(
        seed=3, checkpoint_every=3, replicas=2, updates=updates, bucket_bytes=512
    ) as session:
        torch.manual_seed(session.rank)  # the session gives all replicas the first one's weights
        model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        )
        if MODE == "statistics":
            model = nn.Sequential(model, nn.BatchNorm1d(WIDTH))
        if MODE == "ddp":
            model = session.ddp(model)
        session.module(model)
        kind = torch.optim.NAdam if MODE == "wait_free" else torch.optim.AdamW
        optimizer = session.optimizer(kind(model.parameters(), lr=1e-2, weight_decay=0.1))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = Data(session.column)
        scaler = torch.amp.GradScaler("cpu", enabled=MODE == "plain", init_scale=2.0**40, growth_interval=3)
        objects = {"scaler": scaler} if MODE == "plain" else {}
        session.register(loader=data, scheduler=scheduler, **objects)

        def loss() -> Tensor:
            return (model(next(data)) - 1).square().mean()

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            if MODE != "plain":
                with session.accumulating():
                    loss().backward()
            scaler.scale(loss()).backward()
            if MODE == "plain":
                session.reduce_gradients()
                scaler.unscale_(optimizer)
            if MODE in ("plain", "ddp"):
                session.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()
