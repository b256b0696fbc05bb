"""What torchtitan 0.3.0 needs to run on CPUs with torch 2.13. Nothing of it has to do with swift-ft."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule


def prepare() -> None:
    """Call it before torchtitan is imported."""
    device: Any = torch._utils
    device._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0  # type: ignore[method-assign,assignment,return-value]
    if not hasattr(dist, "set_timeout"):  # from torch 2.14 on
        dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    _sum_gradients()

    from torchtitan.components import metrics
    from torchtitan.models.common import attention, config_utils
    from torchtitan.tools import utils

    utils.get_local_device = lambda: torch.device("cpu")
    metrics.DeviceMemoryMonitor = _NoMemoryMonitor
    # FlexAttention has no backward on CPUs.
    config_utils.get_attention_config = lambda backend: attention.ScaledDotProductAttention.Config()


def _sum_gradients() -> None:
    """gloo has no multiplied sum; a plain one is the same, as torchtitan divides by 1."""
    plain = FSDPModule.set_gradient_divide_factor

    def set_factor(self: FSDPModule, factor: float) -> None:
        plain(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[method-assign]


class _NoMemoryMonitor:
    device_name, device_index, device_capacity, device_capacity_gib = "cpu", 0, 1, 1.0

    def __init__(self, *_: object) -> None:
        pass

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def make_assets(place: Path) -> None:
    """Makes a tokenizer and a text in `place`, as torchtitan's package has none."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(400)]
    texts = [" ".join(draw.choices(words, k=draw.randint(20, 120))) for _ in range(400)]
    (place / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    special = ["<unk>", "<bos>", "<eos>"]
    vocabulary = {word: number for number, word in enumerate([*special, *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    kind = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind))


def use_assets(place: Path) -> None:
    """Makes the data set "c4_test" of torchtitan's configurations the text in `place`."""
    from datasets import load_dataset
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    text_datasets.DATASETS["c4_test"] = DatasetConfig(
        path=str(place),
        loader=lambda path: load_dataset(path, data_files="text.jsonl", split="train"),
        sample_processor=lambda sample: sample["text"],
    )


if __name__ == "__main__":
    make_assets(Path(sys.argv[1]))
