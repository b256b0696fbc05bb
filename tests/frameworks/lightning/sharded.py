"""Lightning's Trainer with a model in two shards: FSDP2 over the session's mesh, in configure_model"""

# verdict: same bits
# worlds: 2
# steps: 12
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# parallelism: FSDP 2
# patience: 200

from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from swift_ft.integrations.lightning import SwiftStrategy
from tests.trainers import probe


class Model(LightningModule):
    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
        mesh = self.trainer.strategy.session.mesh
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        probe.note(self.trainer.global_step - 1, outputs["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


data = TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(1)))
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy=SwiftStrategy(replicas=1, shards=2, checkpoint_every=5),
    max_steps=probe.steps(),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
local = [each.to_local() for each in model.parameters()]
states = trainer.optimizers[0].state.values()
moments = [each.to_local() for state in states for each in state.values() if hasattr(each, "to_local")]
probe.end(trainer.strategy.session, model=local, optimizer=moments)
