"""bfloat16 weights under an optimizer of the author's own with float32 moments."""

# verdict: same bits
# worlds: 1, 2
# plain: 1

import probe
import torch
from torch import nn

import swift_ft


class MasterAdam(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["master"] = parameter.float().clone()
                    state["first"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["second"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["step"] += 1
                gradient = parameter.grad.float()
                state["first"].lerp_(gradient, 0.1)
                state["second"].lerp_(gradient * gradient, 0.01)
                state["master"].sub_(group["lr"] * state["first"] / (state["second"].sqrt() + 1e-6))
                parameter.copy_(state["master"])


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16())
    optimizer = session.optimizer(MasterAdam(model.parameters()))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        loss = nn.functional.mse_loss(model(x.bfloat16()), y.bfloat16())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    probe.run(session, train_step, model=model, optimizer=optimizer)
