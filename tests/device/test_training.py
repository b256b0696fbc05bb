"""A GPT trains on the simulated device: the same bits twice over, those of the CPU where both draw no random numbers,
and the host waits for nothing. By tests/gpu on CUDA."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device.machine import here, no_waits

# B batch, T positions, D model, H heads, V words
B, T, D, H, V = 4, 16, 32, 4, 64
LAYERS, STEPS = 2, 4


class Block(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
        self.qkv, self.out = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(D, 4 * D), torch.nn.GELU(), torch.nn.Linear(4 * D, D))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.before_attention(x)).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
        x = x + functional.dropout(self.out(attended.transpose(1, 2).reshape(B, T, D)), self.dropout)
        return x + functional.dropout(self.mlp(self.before_mlp(x)), self.dropout)


class GPT(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(V, D)
        self.places = torch.nn.Parameter(torch.randn(T, D) * 0.02)
        self.blocks = torch.nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm = torch.nn.LayerNorm(D)
        self.head = torch.nn.Linear(D, V, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.words(tokens) + self.places)))
        return logits


def train(device: str, optimizer: str, dropout: float, autocast: bool) -> list[torch.Tensor]:
    """All parameters behind the last step, and all losses."""
    torch.manual_seed(0)
    model = GPT(dropout).to(device)
    assert model.head.weight is model.words.weight
    adam = torch.optim.AdamW(
        model.parameters(), lr=1e-3, foreach=optimizer == "foreach", fused=optimizer == "fused"
    )
    batch = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(1)).pin_memory()
    losses = []
    quiet = contextlib.nullcontext() if device == "cpu" else no_waits()
    with quiet, sdpa_kernel(SDPBackend.MATH):  # what the simulated device has
        for _ in range(STEPS):
            tokens = batch.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            adam.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            adam.step()
            losses.append(loss.detach())
    return [tensor.detach().cpu() for tensor in [*model.parameters(), *losses]]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("optimizer", ["for-loop", "foreach", "fused"])
def test_a_gpt_trains(optimizer: str, autocast: bool) -> None:
    kind = here().type
    torch.use_deterministic_algorithms(kind == "cuda")
    try:
        first = train(kind, optimizer, 0.1, autocast)
        assert equal(first, train(kind, optimizer, 0.1, autocast))
        without_dropout = train(kind, optimizer, 0.0, autocast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not equal(first, without_dropout)
    assert without_dropout[-1] < without_dropout[-STEPS]
    if kind == "simulated":  # it has the CPU's kernels
        assert equal(without_dropout, train("cpu", optimizer, 0.0, autocast))


def test_fsdp2_trains_on_its_side_streams() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    mesh = init_device_mesh("simulated", (1,))
    torch.manual_seed(0)
    plain, sharded = GPT(0.0).to("simulated"), GPT(0.0).to("simulated")
    sharded.load_state_dict(plain.state_dict())
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    tokens = torch.randint(V, (B, T), device="simulated")
    torch.accelerator.synchronize()
    with no_waits():
        for model in (plain, sharded):
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(STEPS):
                sgd.zero_grad()
                model(tokens).square().mean().backward()
                sgd.step()
    parts = [parameter.full_tensor() for parameter in sharded.parameters()]  # type: ignore[attr-defined]
    assert equal([p.cpu() for p in plain.parameters()], [part.cpu() for part in parts])
