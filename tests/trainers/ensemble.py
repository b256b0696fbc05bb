"""torch.func: an ensemble by stack_module_state, vmap and grad; its first weights are a variable of the script, too."""

# verdict: same bits
# worlds: 1, 2

import copy

import probe
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

import swift_ft

torch.manual_seed(0)
members = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(3)]
weights, _ = stack_module_state(members)
skeleton = copy.deepcopy(members[0]).to("meta")


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(weight.detach()) for name, weight in weights.items()}
        )


def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(functional_call(skeleton, weights, (x,)), x.sum(1, keepdim=True))


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(Ensemble())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + session.dp_rank))
        named = {name.replace("_", "."): weight for name, weight in model.weights.items()}
        gradients, losses = vmap(grad_and_value(loss_of), (0, None))(named, x)
        for name, gradient in gradients.items():
            model.weights[name.replace(".", "_")].grad = gradient
        optimizer.step()
        probe.note(step, losses)

    probe.run(session, train_step, model=model, optimizer=optimizer)
