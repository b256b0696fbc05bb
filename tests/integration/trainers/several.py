"""Steps with more than one update at their end: `several.py KIND STEPS PLACE`. Replicas without a pipeline.

gan       a discriminator and a generator, each clipped, each with an optimizer
validate  a loss on other data behind the update, averaged over the replicas, and a scheduler that steps on it

PLACE: STEP:NAME, where rank 1 dies, once; the names are those given to `place` below.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import swift_ft

KIND, STEPS, PLACE = sys.argv[1], int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
WIDTH, BATCH = 8, 4


def place(step: int, name: str) -> None:
    """Here a rank may die."""
    marker = Path(os.environ.get("SWIFT_FAULTS_DIR", "."), "died")
    if f"{step}:{name}" == PLACE and os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Job:
    def __init__(self, session: swift_ft.Session) -> None:
        self.session = session
        torch.manual_seed(3)
        self.first, self.second = net(), net()
        session.module(self.first)
        session.module(self.second)
        if KIND == "gan":
            self.one = session.optimizer(torch.optim.AdamW(self.first.parameters(), lr=0.01))
            self.two = session.optimizer(torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9))
        else:
            both = [*self.first.parameters(), *self.second.parameters()]
            self.one = session.optimizer(torch.optim.AdamW(both, lr=0.01))
            self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.one, patience=0)
            session.register(scheduler=self.scheduler)

    def batch(self, step: int, kind: int = 0) -> Tensor:
        seed = step * 100 + self.session.dp_rank * 10 + kind
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))

    def loss(self, step: int, kind: int = 0) -> Tensor:
        return (self.second(self.first(self.batch(step, kind))) - 1).square().mean()

    def gan(self, step: int) -> None:
        real, noise = self.batch(step), self.batch(step, 1)
        self.two.zero_grad()
        (self.second(real).mean() - self.second(self.first(noise).detach()).mean()).backward()
        place(step, "backward")
        self.session.clip_grad_norm_(self.second.parameters(), 0.5)
        self.two.step()
        place(step, "between")
        self.one.zero_grad()
        self.second(self.first(noise)).mean().backward()
        place(step, "second backward")
        self.session.clip_grad_norm_(self.first.parameters(), 0.5)
        self.one.step()
        place(step, "end")

    def validate(self, step: int) -> None:
        self.one.zero_grad()
        self.loss(step).backward()
        self.one.step()
        place(step, "update")
        self.first.eval()
        with torch.no_grad():
            loss = self.loss(step, 5)
        total = (
            self.session.all_reduce(loss, "validation") if self.session.pipeline_ranks > 1 else loss.clone()
        )
        dist.all_reduce(total, group=self.session.groups["data"])
        place(step, "validated")
        self.first.train()
        self.scheduler.step(total.item())


if __name__ == "__main__":
    with swift_ft.Session.from_env(
        seed=5, checkpoint_every=100, replicas=int(os.environ["WORLD_SIZE"])
    ) as session:
        job = Job(session)
        session.run(getattr(job, KIND), num_steps=STEPS)
