"""A streaming dataset with a shuffle buffer, which its state leaves out: drawn from the beginning of the epoch"""

# verdict: same bits
# worlds: 1
# steps: 17
# patience: 300

import torch
from datasets import Dataset
from torch import nn

import swift_ft
from tests.trainers import probe

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = Dataset.from_dict({"x": [[float((3 * i + k) % 11) for k in range(8)] for i in range(200)]})
    stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=50).batch(3)
    session.register(loader=stream)
    iterator = iter(stream)

    def train_step(step: int) -> None:
        x = torch.tensor(next(iterator)["x"])
        probe.descend(step, optimizer, (model(x) - x.roll(1, 1)).square().mean())

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
