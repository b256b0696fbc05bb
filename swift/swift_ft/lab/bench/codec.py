"""`swift-ft bench codec`: compression ratio and speed of the log's codecs on boundary tensors.

The tensors come from two-stage models that were trained for some steps on Python's own standard library: activations
(F) and their gradients (B) between two blocks of a transformer, and after the ReLU or GELU of an MLP. Every round
measures all codecs on all tensors once, and memcpy, in CPU seconds of the single thread. Figures are medians over
rounds. A codec pays only if the log's rate is below the last column (and the log is waited for).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.drill.model import ByteLoader, make_stage, standard_library
from swift_ft.lab.drill.topology import VOCABULARY, ModelConfig
from swift_ft.log import codec as codecs
from swift_ft.log.record import DTYPE_BY_NAME
from swift_ft.state.tensors import owned_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CONFIG = ModelConfig(layers=2, width=256, heads=4, sequence=128, microbatch=8, bucket_bytes=1 << 20)
_CONTEXT, _HIDDEN = 16, 1024
CODECS = [name for name in codecs.NAMES if name != "none"]
GAIN_MIN = 1.15
"""Smallest speed-up of logging for which a codec pays."""


class FirstLayer(nn.Module):
    """Bytes [B, context] -> hidden [B, H], after an activation function."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.layer = nn.Linear(_CONTEXT * 64, _HIDDEN)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.activation(self.layer(self.tokens(x).flatten(1)))
        return hidden


class Pair:
    """Two stages and their training data."""

    def __init__(self, name: str, dtype: torch.dtype):
        torch.manual_seed(0)
        self.first: nn.Module
        self.second: nn.Module
        if name == "transformer":
            self.first, self.second = (make_stage(_CONFIG, stage, 2, 0) for stage in range(2))
            self._sequence, self._batch, self._last_only = _CONFIG.sequence, _CONFIG.microbatch, False
        else:
            self.first = FirstLayer(nn.ReLU() if name == "MLP, ReLU" else nn.GELU())
            self.second = nn.Linear(_HIDDEN, VOCABULARY)
            self._sequence, self._batch, self._last_only = _CONTEXT, 256, True
        for module in (self.first, self.second):
            module.to(dtype)
        self._text = standard_library()

    def step(self, loader: ByteLoader) -> tuple[Tensor, Tensor]:
        """Runs forward and backward, which leaves gradients in the parameters. Returns (activation, its gradient) at
        the boundary."""
        inputs, targets = next(loader)
        boundary = self.first(inputs)
        boundary.retain_grad()
        logits = self.second(boundary).float()
        wanted = targets[:, -1] if self._last_only else targets
        loss = functional.cross_entropy(logits.view(-1, VOCABULARY), wanted.flatten())
        torch.autograd.backward(loss)
        assert boundary.grad is not None
        return boundary.detach(), boundary.grad

    def train(self, steps: int) -> None:
        parameters = [*self.first.parameters(), *self.second.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        loader = ByteLoader(self._text, self._batch, self._sequence, 0)
        for _ in range(steps):
            optimizer.zero_grad()
            self.step(loader)
            optimizer.step()

    def capture(self, size: int) -> dict[str, Tensor]:
        """Returns a tensor for each direction, about `size` bytes each."""
        activation, _ = self.step(ByteLoader(self._text, self._batch, self._sequence, 1))
        batch = max(1, size * self._batch // (activation.numel() * activation.element_size()))
        activation, gradient = self.step(ByteLoader(self._text, batch, self._sequence, 2))
        return {"F": activation, "B": gradient}


def captured(steps: int, size: int) -> list[dict[str, Any]]:
    """Returns every tensor as its name, element type and bytes."""
    tensors = []
    for dtype in DTYPES:
        for name in ("transformer", "MLP, ReLU", "MLP, GELU"):
            pair = Pair(name, DTYPES[dtype])
            pair.train(steps)
            for direction, tensor in pair.capture(size).items():
                body = owned_bytes(tensor)[2]
                tensors.append({"tensor": f"{name} {direction}", "dtype": dtype, "body": body})
    return tensors


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the thread's CPU seconds, which do not depend on the machine's load, and the result."""
    began = time.thread_time()
    result = work()
    return time.thread_time() - began, result


def measure(tensors: Sequence[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Compresses and decompresses every tensor with every codec, `rounds` times after a warm-up round.

    `seconds` has one list per (tensor, codec, direction), `stored` bytes, `copies` bytes per second of memcpy.
    Raises ServiceError if decompressing returns other bytes.
    """
    seconds: dict[tuple[int, str, str], list[float]] = {}
    stored_bytes: dict[tuple[int, str], int] = {}
    copies = []
    codecs.check_codec("bitshuffle")
    for _ in range(rounds + 1):  # the first is a warm-up
        for number, tensor in enumerate(tensors):
            body: memoryview = tensor["body"]
            target = bytearray(body.nbytes)
            copies.append(body.nbytes / timed(lambda t=target, b=body: t.__setitem__(slice(None), b))[0])  # type: ignore[misc]
            width = DTYPE_BY_NAME[tensor["dtype"]].width
            for codec in CODECS:
                took, (used, stored) = timed(lambda c=codec, b=body, w=width: codecs.compress(c, b, w))  # type: ignore[misc]
                view = memoryview(stored)
                back, raw = timed(
                    lambda u=used, v=view, b=body, w=width: codecs.decompress(u, v, b.nbytes, w)  # type: ignore[misc]
                )
                if raw != body:
                    raise ServiceError(
                        f"{tensor['tensor']}, {codec}: decompressing gives other bytes than were compressed"
                    )
                seconds.setdefault((number, codec, "compress"), []).append(took)
                if used != "none":
                    seconds.setdefault((number, codec, "decompress"), []).append(back)
                stored_bytes[number, codec] = len(stored)
    return {"tensors": tensors, "seconds": seconds, "stored": stored_bytes, "copies": copies}


def evaluate(measured: dict[str, Any]) -> dict[str, Any]:
    """Computes medians of `measure`'s result: ratios, MB/s (10**6 bytes), the log's rate below which a codec pays."""
    cases = []
    for (number, codec), stored in measured["stored"].items():
        tensor = measured["tensors"][number]
        raw = tensor["body"].nbytes

        def rate(what: str, number: int = number, codec: str = codec, raw: int = raw) -> float | None:
            seconds = measured["seconds"].get((number, codec, what), [])[1:]
            return raw / 1e6 / statistics.median(seconds) if seconds else None

        ratio, compress = raw / stored, rate("compress")
        assert compress is not None
        cases.append(
            {
                "tensor": tensor["tensor"],
                "dtype": tensor["dtype"],
                "bytes": raw,
                "codec": codec,
                "ratio": ratio,
                "compress_mb_s": compress,
                "decompress_mb_s": rate("decompress"),
                "pays_below_mb_s": compress / GAIN_MIN if ratio >= GAIN_MIN else 0.0,
            }
        )
    return {"bench": "codec", "memcpy_mb_s": statistics.median(measured["copies"]) / 1e6, "cases": cases}


def table(result: dict[str, Any]) -> str:
    """Formats the result as text: a line for each tensor and codec."""
    lines = [
        f"{result['machine']}; after {result['steps']} steps, medians of {result['rounds']} rounds, "
        f"per second of one core; memcpy {result['memcpy_mb_s']:.0f} MB/s",
        "",
        f"{'tensor':<16} {'dtype':<9} {'codec':<11} {'ratio':>5}  {'compress':>8} {'decompress':>10}  MB/s  pays below",
    ]
    for case in result["cases"]:
        back, pays = case["decompress_mb_s"], case["pays_below_mb_s"]
        lines.append(
            f"{case['tensor']:<16} {case['dtype']:<9} {case['codec']:<11} {case['ratio']:5.2f}  "
            f"{case['compress_mb_s']:8.0f} {'' if back is None else f'{back:.0f}':>10}        "
            f"{f'{pays:.0f} MB/s' if pays else 'never':>10}"
        )
    return "\n".join(lines)


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench codec",
        description="Measures ratio and speed of the log's codecs on boundary tensors of models in training.",
    )
    output.add_json(parser)
    parser.add_argument(
        "--steps", type=int, default=60, metavar="N", help="of training (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default %(default)s")
    parser.add_argument(
        "--kibibytes", type=int, default=4096, metavar="N", help="of a tensor, about (default %(default)s)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    if min(arguments.rounds, arguments.kibibytes) < 1 or arguments.steps < 0:
        raise UsageError("--rounds and --kibibytes take 1 or more, --steps 0 or more")
    output.check_json(arguments.json)
    on = output.machine()
    tensors = captured(arguments.steps, arguments.kibibytes << 10)
    # As in a writer: in the main thread blosc would start its own threads.
    with ThreadPoolExecutor(1) as pool:
        measured = pool.submit(measure, tensors, arguments.rounds).result()
    result = {"machine": on, "steps": arguments.steps, "rounds": arguments.rounds, **evaluate(measured)}
    print(table(result))
    output.write_json(arguments.json, result)
    return 0
