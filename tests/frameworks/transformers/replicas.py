"""Hugging Face's Trainer: a GPT-2, accumulation, a scheduler, clipping, logs, evaluation, patience"""

# verdict: same bits
# worlds: 1, 2
# steps: 14
# kills: forward, backward, reduce, optimizer, tail, idle, save, moment, optimizer
# plain: 2
# patience: 200

import os
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

import swift_ft
from swift_ft.integrations.huggingface import SwiftTrainer
from tests.trainers import probe


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Notes(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        probe.note(state.global_step - 1, trainer._tr_loss)


session = None
if probe.is_protected():
    session = swift_ft.Session.from_env(replicas=int(os.environ["WORLD_SIZE"]), checkpoint_every=5)
torch.manual_seed(0)
tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
model = GPT2LMHeadModel(GPT2Config(**tokens, n_positions=16, n_embd=16, n_layer=2, n_head=2))
args = TrainingArguments(
    output_dir=(place := os.environ[probe.ENV_DIRECTORY]),
    max_steps=probe.steps(),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    warmup_steps=3,
    logging_steps=3,
    eval_strategy="steps",
    eval_steps=4,
    metric_for_best_model="loss",
    save_strategy="no" if session else "steps",
    save_steps=5,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    ddp_backend="gloo",
)
patience = EarlyStoppingCallback(early_stopping_patience=50)
kind: Any = partial(SwiftTrainer, session=session) if session else Trainer
trainer = kind(
    model=model,
    args=args,
    train_dataset=Numbers(),
    eval_dataset=Numbers(),
    callbacks=[Notes(), patience],
)
trainer.train(resume_from_checkpoint=None if session else get_last_checkpoint(place))
kept = [
    {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_per_second"))}
    for entry in trainer.state.log_history
]
probe.end(
    session,
    model=model,
    optimizer=trainer.optimizer,
    scheduler=trainer.lr_scheduler,
    log=kept,
    best=[trainer.state.best_metric, trainer.state.best_global_step, trainer.state.epoch],
    patience=patience.state(),
    control=vars(trainer.control),
)
if session:
    session.close()
