"""Lightning's own CSVLogger"""

# verdict: refused
# worlds: 1
# says: Trainer(logger=SwiftLogger())
# patience: 200

import os
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swift_ft.integrations.lightning import SwiftStrategy
from tests.trainers import probe


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    strategy=SwiftStrategy(checkpoint_every=5),
    max_steps=probe.steps(),
    logger=CSVLogger(os.environ[probe.ENV_DIRECTORY]),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True))
