"""Trains a GPT for some steps and prints a digest of every tensor, as JSON in one line.

Of parameters, gradients, the optimizer's state and the losses. `tests.gpu` runs it in two fresh processes and compares.
"""

import hashlib
import json

import torch
from torch import Tensor

from swift_ft.lab.drill.model import ByteLoader, loss_fn, make_stage, standard_library
from swift_ft.lab.drill.topology import ModelConfig
from swift_ft.state.tensors import byte_view

LARGE = ModelConfig(layers=4, width=1024, heads=16, sequence=1024, microbatch=4, bucket_bytes=1 << 20)
SMALL = ModelConfig(layers=2, width=64, heads=4, sequence=32, microbatch=2, bucket_bytes=1 << 20)
STEPS = 3


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(byte_view(tensor.detach().cpu().contiguous())).hexdigest()


def trained() -> dict[str, Tensor]:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None, "there is no accelerator"
    torch.use_deterministic_algorithms(kind.type == "cuda")
    config = LARGE if kind.type == "cuda" else SMALL
    torch.manual_seed(0)
    model = make_stage(config, 0, 1, seed=0).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    loader = ByteLoader(standard_library(), config.microbatch, config.sequence, 0)
    tensors = dict[str, Tensor]()
    for step in range(STEPS):
        inputs, targets = (part.to(kind) for part in next(loader))
        with torch.autocast(kind.type, torch.bfloat16):
            loss = loss_fn(model(inputs).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tensors[f"loss {step}"] = loss
    for name, parameter in model.named_parameters():
        tensors[name] = parameter
        assert parameter.grad is not None
        tensors[f"{name}.grad"] = parameter.grad
        state = optimizer.state[parameter]
        tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return tensors


if __name__ == "__main__":
    print(json.dumps({name: digest(tensor) for name, tensor in trained().items()}))
