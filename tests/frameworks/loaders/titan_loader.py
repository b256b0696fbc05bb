"""torchtitan's own loader of packed documents: its state is pickled, and another one on each data-parallel rank"""

# verdict: same bits
# worlds: 1, 2
# steps: 17
# patience: 300

import torch
from datasets import Dataset
from torch import nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

import swift_ft
from tests.trainers import probe


class Letters(BaseTokenizer):
    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(letter) % 32 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(96 + token) for token in tokens)

    def get_vocab_size(self) -> int:
        return 32


def texts(_path: str) -> Dataset:
    return Dataset.from_dict({"text": ["abcdefghij"[i % 7 :] * (1 + i % 5) for i in range(30)]})


DATASETS["texts"] = DatasetConfig(path="", loader=texts, sample_processor=lambda sample: sample["text"])


def loader(session: swift_ft.Session, workers: int, every: int | None) -> HuggingFaceTextDataLoader:
    return HuggingFaceTextDataLoader(
        HuggingFaceTextDataLoader.Config(dataset="texts", num_workers=workers),
        dp_world_size=session.dp_size,
        dp_rank=session.dp_rank,
        tokenizer=Letters(),
        seq_len=16,
        local_batch_size=2,
        snapshot_every_n_steps=every,
    )


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    model = session.module(nn.Sequential(nn.Embedding(32, 16), nn.GELU(), nn.Linear(16, 32)))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    first, second = loader(session, 0, None), loader(session, 2, 5)
    session.register(loader=first, other=second)
    streams = [iter(first), iter(second)]

    def train_step(step: int) -> None:
        batches = [next(stream) for stream in streams]
        x = torch.cat([inputs["input"] for inputs, _ in batches])
        loss = nn.functional.cross_entropy(
            model(x).flatten(0, 1), torch.cat([y for _, y in batches]).flatten()
        )
        probe.descend(step, optimizer, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
