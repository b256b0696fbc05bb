"""Lightning's Trainer with both limits, of which that of epochs comes first"""

# verdict: same bits
# worlds: 1
# steps: 20
# patience: 300

import os
from typing import Any

import torch
from lightning import LightningModule, Trainer
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


torch.manual_seed(0)
data = TensorDataset(torch.randn(80, 8, generator=torch.Generator().manual_seed(1)))
model, strategy = Model(), SwiftStrategy(checkpoint_every=5)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=strategy,
    max_epochs=2,
    max_steps=3 * probe.steps(),
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
assert trainer.global_step == probe.steps(), trainer.global_step
probe.end(strategy.session, model=model, optimizer=trainer.optimizers[0])
