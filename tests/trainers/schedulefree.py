"""An optimizer with train() and eval() modes that keeps two points (schedule-free)."""

# verdict: same bits
# worlds: 1, 2
# plain: 1

import probe
import torch

import swift_ft


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def eval(self) -> None:
        self._swap(to_training=False)

    @torch.no_grad()
    def train(self) -> None:
        self._swap(to_training=True)

    def _swap(self, to_training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_training:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    beta = group["beta"]
                    p.lerp_(self.state[p]["z"], 1 - beta if to_training else 1 - 1 / beta)
            group["train_mode"] = to_training

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if "z" not in state:
                    state["z"] = p.clone()
                p.lerp_(state["z"], 1 / (group["k"] + 1))
                state["z"].sub_(p.grad, alpha=group["lr"])


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(ScheduleFree(model.parameters()))

    def train_step(step: int) -> None:
        optimizer.train()

        loss = probe.update(session, model, optimizer, step)
        optimizer.eval()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
