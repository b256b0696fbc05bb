"""A streaming dataset of `datasets`, split by node and mapped: registered itself, and in a StatefulDataLoader"""

# verdict: same bits
# worlds: 1, 2
# steps: 17
# patience: 300

import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import swift_ft
from tests.trainers import probe


def stream(rank: int, ranks: int):
    rows = Dataset.from_dict({"x": [[float((3 * i + k) % 11) for k in range(8)] for i in range(60)]})
    whole = rows.to_iterable_dataset(num_shards=6).map(lambda row: {"x": [v / 11 for v in row["x"]]})
    return split_dataset_by_node(whole, rank, ranks)


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    rows = stream(session.dp_rank, session.replicas).batch(3)
    loader = StatefulDataLoader(
        stream(session.dp_rank, session.replicas),
        batch_size=4,
        num_workers=2,
        collate_fn=lambda rows: torch.tensor([row["x"] for row in rows]),
    )
    session.register(rows=rows, loader=loader)

    def batches(loader):
        while True:
            yield from loader

    few, many = batches(rows), batches(loader)

    def train_step(step: int) -> None:
        x = torch.cat([torch.tensor(next(few)["x"]), next(many)])
        probe.descend(step, optimizer, (model(x) - x.roll(1, 1)).square().mean())

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
