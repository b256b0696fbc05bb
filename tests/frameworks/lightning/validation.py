"""Lightning's Trainer with validations inside of its epochs, checkpoints of the best, patience, a plateau, lines"""

# verdict: same bits
# worlds: 1, 2
# steps: 16
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# plain: 2
# patience: 200

import os
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from swift_ft.integrations.lightning import SwiftLogger, SwiftStrategy
from tests.trainers import probe


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss)
        if index % 3 == 0:
            self.log("seldom", 2 * loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def _loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return (self.net(x) - x.sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        probe.note(self.trainer.global_step - 1, outputs["loss"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=10, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


place = Path(os.environ[probe.ENV_DIRECTORY])
best = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{step}-{val_loss:.3f}")
often = ModelCheckpoint(every_n_train_steps=5, save_last=True)
patience = EarlyStopping("val_loss", patience=50)
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 8, generator=torch.Generator().manual_seed(1)))
model = Model()
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["WORLD_SIZE"]),
    strategy=SwiftStrategy(checkpoint_every=5) if probe.is_protected() else "ddp",
    max_steps=probe.steps(),
    val_check_interval=0.5,
    log_every_n_steps=2,
    logger=SwiftLogger() if probe.is_protected() else False,
    callbacks=[best, often, patience],
    default_root_dir=place,
    enable_progress_bar=False,
    enable_model_summary=False,
)
kept = sorted(place.glob("**/last*.ckpt"))
loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
trainer.fit(model, *loaders, ckpt_path=None if probe.is_protected() or not kept else kept[-1])
assert trainer.global_step == probe.steps(), trainer.global_step
written: dict[str, Any] = {}
if trainer.is_global_zero:
    for path in sorted(Path(str(best.dirpath)).glob("*.ckpt")):
        written[path.name] = torch.load(path, weights_only=False)["state_dict"]
    for path in place.glob("checkpoints/**/rank0.jsonl"):
        written["lines"] = path.read_text()
probe.end(
    trainer.strategy.session if probe.is_protected() else None,
    model=model,
    optimizer=trainer.optimizers[0],
    written=written,
    best=[best.best_model_score, Path(best.best_model_path).name, Path(often.last_model_path).name],
    patience=[patience.wait_count, patience.best_score],
    rate=trainer.optimizers[0].param_groups[0]["lr"],
)
