"""transformers' Trainer under a session: swift-ft run --standalone --nproc-per-node 2 examples/huggingface/train.py

A small GPT-2 learns the bytes of Python's own standard library. The lines that a script of yours needs are marked.
"""

import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from swift_ft import Session  # <-
from swift_ft.integrations.huggingface import SwiftTrainer  # <- in the place of transformers.Trainer

LENGTH = 64


class Bytes(Dataset[Any]):
    def __init__(self, name: str) -> None:
        text = (Path(sysconfig.get_paths()["stdlib"]) / name).read_bytes()
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.text[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    # <- before TrainingArguments, which ask for a device
    session = Session.from_env(replicas=int(os.environ["WORLD_SIZE"]), checkpoint_every=50)
    torch.manual_seed(0)
    tokens = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**tokens, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir="out",
        max_steps=200,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=100,
        save_strategy="no",  # <- the session saves checkpoints
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
    )
    trainer = SwiftTrainer(
        model=model,
        args=args,
        train_dataset=Bytes("argparse.py"),
        eval_dataset=Bytes("textwrap.py"),
        session=session,  # <-
    )
    trainer.train()
    session.close()


if __name__ == "__main__":
    main()
