"""Data parallelism without a pipeline: `replicated.py MODE STEPS`.

plain      a whole module; the session averages its gradients, clips them, scales them
ddp        DistributedDataParallel, two backward passes in a step
wait_free  buckets are applied while backward goes on, after an accumulating pass; NAdam
halves     the same of three, in whose first step the second dies once the third has applied a bucket; the first is
           still before its own
statistics running statistics that every replica takes of its own batches: these are no replicas
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH = 16, 8


class Data:
    """The same position on all replicas; each draws its own batch there."""

    def __init__(self, dp_rank: int) -> None:
        self.position, self._dp_rank = 0, dp_rank

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.position * 1000 + self._dp_rank)
        self.position += 1
        return torch.randn(BATCH, WIDTH, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Apart:
    """Cuts three replicas off at different places of their first update, once."""

    def __init__(self, rank: int) -> None:
        self.rank, self.armed = rank, False
        self.half, self.lost = (
            Path(os.environ.get("SWIFT_FAULTS_DIR", "."), name) for name in ("half", "lost")
        )

    def watch(self, weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
        """`weight` is of the second bucket. Before the session hooks it: so the first one is on its way to everybody,
        and nobody gets the second one of who stops here."""
        if self.lost.exists():
            return
        if self.rank < 2:
            weight.register_post_accumulate_grad_hook(lambda _: self._stop() if self.armed else None)
        else:
            threading.Thread(target=self._tell, args=[optimizer], daemon=True).start()

    def arm(self) -> None:
        """The backward pass that comes is the last of its step."""
        self.armed = not self.lost.exists()

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        _until(lambda: bool(optimizer.state))
        self.half.touch()

    def _stop(self) -> None:
        self.armed = False
        if self.rank == 1:
            _until(self.half.exists)
            self.lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        _until(self.lost.exists)
        raise RuntimeError("Connection closed by peer")  # as torch, wherever it had waited


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.002)


def main() -> None:
    updates = "wait_free" if MODE in ("wait_free", "halves") else "after_backward"
    replicas = int(os.environ["WORLD_SIZE"])
    with swift_ft.Session.from_env(
        seed=3, checkpoint_every=3, replicas=replicas, updates=updates, bucket_bytes=512
    ) as session:
        torch.manual_seed(session.rank)  # the session gives all replicas the first one's weights
        model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        )
        if MODE == "statistics":
            model = nn.Sequential(model, nn.BatchNorm1d(WIDTH))
        if MODE == "ddp":
            model = session.ddp(model)
        kind = torch.optim.NAdam if updates == "wait_free" else torch.optim.AdamW
        plain = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
        apart = Apart(session.rank)
        if MODE == "halves":
            apart.watch(model[2][0].weight, plain)  # type: ignore[index, arg-type]
        session.module(model)
        optimizer = session.optimizer(plain)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = Data(session.dp_rank)
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
            apart.arm()
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
