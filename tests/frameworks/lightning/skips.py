"""Lightning's on_train_batch_start that ends its epochs early"""

# verdict: same bits
# worlds: 1
# steps: 12
# kills: forward, save, idle, tail
# patience: 200

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
        self.net = nn.Linear(8, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.net(x) - x.sum(1, keepdim=True)).square().mean()
        probe.note(self.trainer.global_step, loss)
        return loss

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == 4 else None

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    strategy=SwiftStrategy(checkpoint_every=5),
    max_steps=probe.steps(),
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True))
probe.end(trainer.strategy.session, model=model, optimizer=trainer.optimizers[0])
