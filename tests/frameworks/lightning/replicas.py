"""Lightning's Trainer over several epochs: AdamW, a scheduler for each step, dropout, accumulation; alone, it ends with
its epochs, before max_steps"""

# verdict: same bits
# worlds: 1, 2
# steps: 20
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# plain: 2
# patience: 200

import os
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swift_ft.integrations.lightning import SwiftStrategy
from tests.trainers import probe


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index % 2:
            probe.note(self.trainer.global_step - 1, outputs["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


world = int(os.environ["WORLD_SIZE"])
options: dict[str, Any] = {"max_steps": probe.steps()}
if world == 1:
    options = {"max_epochs": 2, "max_steps": 3 * probe.steps()}
if probe.is_protected():
    options |= {"strategy": SwiftStrategy(checkpoint_every=5), "enable_checkpointing": False}
else:
    kept = ModelCheckpoint(os.environ[probe.ENV_DIRECTORY], every_n_train_steps=5, save_last=True)
    options |= {"strategy": "ddp", "callbacks": [kept]}
torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(1)))
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=world,
    accumulate_grad_batches=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **options,
)
loader = DataLoader(data, batch_size=4, shuffle=True)
trainer.fit(model, loader, ckpt_path=None if probe.is_protected() else "last")
assert trainer.global_step == probe.steps(), trainer.global_step
session = trainer.strategy.session if probe.is_protected() else None
probe.end(session, model=model, optimizer=trainer.optimizers[0])
