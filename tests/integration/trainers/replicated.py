"""Data parallelism without a pipeline: `replicated.py MODE STEPS`.

notes      wait_free, and each replica notes its last loss in an attribute
wait_free  buckets are applied while backward goes on, after an accumulating pass; NAdam
halves     the same of three, in whose first step the second dies once the third has applied a bucket; the first is
           still before its own
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from stages import Positioned
from torch import Tensor, nn

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH = 16, 8


class Data(Positioned):
    """The same position on all replicas; each draws its own batch there."""

    def __init__(self, dp_rank: int) -> None:
        super().__init__()
        self._dp_rank = dp_rank

    def __next__(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.position * 1000 + self._dp_rank)
        self.position += 1
        return torch.randn(BATCH, WIDTH, generator=generator)


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
    replicas = int(os.environ["WORLD_SIZE"])
    with swift_ft.Session.from_env(
        seed=3, checkpoint_every=3, replicas=replicas, updates="wait_free", bucket_bytes=512
    ) as session:
        torch.manual_seed(session.rank)  # the session gives all replicas the first one's weights
        model: nn.Module = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        )
        plain = torch.optim.NAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        apart = Apart(session.rank)
        if MODE == "halves":
            apart.watch(model[2][0].weight, plain)  # type: ignore[index, arg-type]
        session.module(model)
        optimizer = session.optimizer(plain)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        data = Data(session.dp_rank)
        session.register(loader=data, scheduler=scheduler)

        def loss() -> Tensor:
            found = (model(next(data)) - 1).square().mean()
            if MODE == "notes":
                model[0].last_loss = found.item()
            return found

        def train_step(step: int) -> None:
            optimizer.zero_grad()
            with session.accumulating():
                loss().backward()
            apart.arm()
            loss().backward()
            optimizer.step()
            scheduler.step()

        session.run(train_step, num_steps=STEPS)


if __name__ == "__main__":
    main()
