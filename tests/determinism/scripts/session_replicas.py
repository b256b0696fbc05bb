"""Two replicas by session.ddp, with dropout, a schedule and a registered data position."""

# verdict: EQUAL
# ranks: 2
# session
# strategy: auto, checkpoint, snapshot, reinit

import torch
from torch import nn

import swift_ft


class Batches:
    def __init__(self):
        self.place = 0

    def __next__(self):
        self.place += 1
        return torch.randn(16, 8, generator=torch.Generator().manual_seed(self.place))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


with swift_ft.Session.from_env(replicas=2, checkpoint_every=4) as session:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    model = session.module(session.ddp(net))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    batches = Batches()
    session.register(scheduler=scheduler, loader=batches)

    def train_step(step):
        x = next(batches) + session.dp_rank
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()

    session.run(train_step, num_steps=12)
