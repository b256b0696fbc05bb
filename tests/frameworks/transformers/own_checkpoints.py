"""Hugging Face's Trainer that is to save checkpoints of its own"""

# verdict: refused
# worlds: 1
# says: save_strategy='no'
# patience: 200

import os

import torch
from transformers import TrainingArguments

import swift_ft
from swift_ft.integrations.huggingface import SwiftTrainer
from tests.trainers import probe

session = swift_ft.Session.from_env()
args = TrainingArguments(output_dir=os.environ[probe.ENV_DIRECTORY], save_strategy="steps", use_cpu=True)
SwiftTrainer(model=torch.nn.Linear(2, 2), args=args, train_dataset=[1], session=session)
