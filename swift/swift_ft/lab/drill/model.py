"""The drill's model and data: a byte-level decoder-only transformer on Python's own standard library.

Legend: B microbatch, S sequence, D model width, V vocabulary (256 bytes).
"""

import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.errors import ServiceError
from swift_ft.lab.drill.topology import VOCABULARY, ModelConfig
from swift_ft.optimizers import Lamb, Lion

# The optimizers that a drill can train with, by name.

# name -> (class, settings with which the drill's models learn in a few hundred steps)
_MADE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    "amsgrad": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 3e-3}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "nadam": (torch.optim.NAdam, {"lr": 3e-3}),
    "radam": (torch.optim.RAdam, {"lr": 3e-3}),
    "lamb": (Lamb, {"lr": 5e-3, "weight_decay": 0.01}),
    "lion": (Lion, {"lr": 3e-4, "weight_decay": 0.1}),
}


def make_optimizer(name: str, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    kind, settings = _MADE[name]
    # The classes share no signature.
    make: Any = kind
    optimizer: torch.optim.Optimizer = make(list(parameters), **settings)
    return optimizer


class _Paced(torch.autograd.Function):
    """Identity that sleeps once in the forward and once in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


def paced(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """Returns `x` after a wait of `forward_s`; its gradient comes after a wait of `backward_s`. As with a device, the
    rank's thread waits and no core is busy."""
    return _Paced.apply(x, forward_s, backward_s)  # type: ignore[no-untyped-call,no-any-return]


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals: [B, S, D] -> [B, S, D]."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        attended = self.out(attended.transpose(1, 2).reshape(b, s, d))
        x = x + functional.dropout(attended, self.dropout, self.training)
        hidden = self.down(functional.gelu(self.up(self.norm2(x))))
        return x + functional.dropout(hidden, self.dropout, self.training)


class StageModule(nn.Module):
    """The layers of one pipeline stage. The first embeds token ids [B, S]; the last gives logits [B, S, V]."""

    def __init__(self, config: ModelConfig, stage: int, num_stages: int):
        super().__init__()
        if config.layers < num_stages:
            raise ServiceError(f"{config.layers} layers are not enough for {num_stages} stages")
        self.config = config
        self.first, self.last = stage == 0, stage == num_stages - 1
        if self.first:
            self.tokens = nn.Embedding(VOCABULARY, config.width)
            self.positions = nn.Embedding(config.sequence, config.width)
        begin, behind = (config.layers * edge // num_stages for edge in (stage, stage + 1))
        self.blocks = nn.ModuleList(Block(config) for _ in range(begin, behind))
        if self.last:
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.config.forward_s and torch.is_grad_enabled():
            x = paced(x, self.config.forward_s, self.config.backward_s)
        return self.head(self.norm(x)) if self.last else x


def make_stage(config: ModelConfig, stage: int, num_stages: int, seed: int) -> StageModule:
    """Creates a stage whose weights depend on (seed, stage) only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed((seed * 4096 + stage) % 2**63)
        return StageModule(config, stage, num_stages)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the cross entropy of the next byte, averaged over a microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def standard_library(limit: int = 1 << 20) -> bytes:
    """Returns the first `limit` bytes of the interpreter's own library sources, in a fixed order. Raises ServiceError
    if there are fewer than 64 KiB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < 1 << 16:
        raise ServiceError(f"no standard library sources to train on in {root}")
    return bytes(text[:limit])


class ByteLoader:
    """Iterator over batches of (inputs, targets), each [batch, S] int64, at offsets drawn from (seed, dp_rank,
    position).

    Its whole state is the position, so a restored loader gives the same batch again.
    """

    def __init__(self, text: bytes, batch: int, sequence: int, seed: int, dp_rank: int = 0):
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch, self._sequence = batch, sequence
        self._seed = seed * 1_000_003 + dp_rank * 7_368_787
        self.position = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((self._seed + self.position) % 2**63)
        self.position += 1
        starts = torch.randint(len(self._text) - self._sequence - 1, (self._batch,), generator=generator)
        rows = self._text[starts[:, None] + torch.arange(self._sequence + 1)].long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])
