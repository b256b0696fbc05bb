"""What recording, copies, digests and undo cost on the accelerator: JSON in one line. Ratios are of one run.

`scripts/gpu` runs it on CUDA, `scripts/gpu --dry-run` on the simulated device, with sizes that say nothing there.
"""

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from swift_ft.device import current_accelerator
from swift_ft.log.record import RecordKey
from swift_ft.log.ring import Memory
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.state.digests import digests
from swift_ft.state.journal import Journal
from swift_ft.train.boundary_log import DeviceCapture
from tests.unit.log.service import JOB, InProcess


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    side: int
    """A microbatch computes products of square bf16 matrices of this side."""
    record_bytes: int
    ring_bytes: int
    copied_bytes: int
    parameters: int
    steps: int


CUDA = Scale(
    side=4096,
    record_bytes=21_000_000,
    ring_bytes=2 << 30,
    copied_bytes=1 << 30,
    parameters=100_000_000,
    steps=12,
)
SIMULATED = Scale(
    side=64, record_bytes=1 << 16, ring_bytes=1 << 20, copied_bytes=1 << 20, parameters=20_000, steps=4
)
MICROBATCHES_MS = (10, 50)
WARM_UP = 2
HELD_BYTES = 1 << 30
KILLED_S = 20.0


def took_s(do: Callable[[], object]) -> float:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    do()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


def median_s(do: Callable[[], object], times: int = 5) -> float:
    return statistics.median(took_s(do) for _ in range(times))


def made(size: int) -> torch.Tensor:
    """A tensor of so many bytes on the device."""
    return torch.randn(size // 2, device=current_accelerator().torch).to(torch.bfloat16)


@contextlib.contextmanager
def writer(ring_bytes: int) -> Iterator[SidecarWriter]:
    with InProcess() as server:
        opened = SidecarWriter([server.address], JOB, 1, queue_bytes=ring_bytes)
        try:
            yield opened
        finally:
            opened.close(0.0)


def recording(scale: Scale) -> Iterator[tuple[str, str]]:
    """A microbatch of 10 and of 50 ms that sends one boundary, recorded, and with a blocking copy in its place."""
    here = current_accelerator().torch
    left, right = (torch.randn(scale.side, scale.side, device=here).to(torch.bfloat16) for _ in range(2))
    sent, calls = made(scale.record_bytes), list[float]()
    host = torch.empty(sent.shape, dtype=sent.dtype)
    product_s = median_s(lambda: [torch.mm(left, right) for _ in range(10)]) / 10
    with writer(scale.ring_bytes) as log:
        capture = DeviceCapture(log, current_accelerator())
        for number, microbatch_ms in enumerate(MICROBATCHES_MS):
            products = max(1, round(microbatch_ms / 1e3 / product_s)) if scale is CUDA else 1

            def compute(products: int = products) -> None:
                for _ in range(products):
                    torch.mm(left, right)

            def recorded(key: RecordKey, compute: Callable[[], None] = compute) -> None:
                began = time.perf_counter()
                capture.record("s0.F", key, sent, now=False, keep=False)
                calls.append(time.perf_counter() - began)
                compute()
                capture.wait_copied()

            def copied(compute: Callable[[], None] = compute) -> None:
                host.copy_(sent)
                compute()

            ratios, blocking, plain = list[float](), list[float](), list[float]()
            for step in range(scale.steps):
                key = RecordKey(number * scale.steps + step, 0, 0)
                plain.append(took_s(compute))
                ratios.append(took_s(lambda key=key: recorded(key)) / plain[-1])  # type: ignore[misc]
                blocking.append(took_s(copied) / plain[-1])
                log.flush(60.0)
            yield (
                f"a microbatch of {1e3 * statistics.median(plain[WARM_UP:]):.1f} ms with a record of "
                f"{scale.record_bytes / 1e6:.1f} MB",
                f"{statistics.median(ratios[WARM_UP:]):.3f} of the plain one; "
                f"with a blocking copy {statistics.median(blocking[WARM_UP:]):.3f}",
            )
        yield "host time of a record", f"{1e6 * statistics.median(calls[WARM_UP:]):.0f} us"


def ring(scale: Scale) -> Iterator[tuple[str, str]]:
    memory = Memory.create(scale.ring_bytes)
    began = time.perf_counter()
    unpin = current_accelerator().pin(memory.address, memory.capacity)
    took = time.perf_counter() - began
    unpin()
    memory.close()
    yield f"registration of a ring of {scale.ring_bytes >> 20} MiB", f"{took:.2f} s"


def copies(scale: Scale) -> Iterator[tuple[str, str]]:
    there, device = made(scale.copied_bytes), current_accelerator()
    host = device.pinned(there.numel(), there.dtype)
    for name, to, source in (("out", host, there), ("in", there, host)):
        rate = there.nbytes / median_s(lambda to=to, source=source: to.copy_(source, non_blocking=True))  # type: ignore[misc]
        yield f"copies {name}, pinned", f"{rate / 1e9:.1f} GB/s"
    parts = there.chunk(16)
    yield "digests of a state", f"{there.nbytes / median_s(lambda: digests(parts), 3) / 1e9:.2f} GB/s"


def undo(scale: Scale) -> Iterator[tuple[str, str]]:
    here = current_accelerator().torch
    for implementation, kind in (("foreach", "exact"), ("foreach", "preimage"), ("fused", "preimage")):

        def optimizer(implementation: str = implementation) -> torch.optim.AdamW:
            parameters = [
                torch.nn.Parameter(torch.randn(scale.parameters // 20, device=here) * 0.02) for _ in range(20)
            ]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter) * 1e-3
            return torch.optim.AdamW(parameters, lr=1e-3, **{implementation: True})  # type: ignore[arg-type]

        plain, recorded = optimizer(), optimizer()
        parameters: list[torch.Tensor] = recorded.param_groups[0]["params"]
        journal = Journal(recorded, undo=kind)
        applied, taken_back, kept = list[float](), list[float](), 0.0

        def apply(step: int, journal: Journal = journal) -> None:
            journal.begin(step)
            journal.apply_rest()

        for step in range(scale.steps):
            plain_s = took_s(plain.step)
            before = [parameter.detach().clone() for parameter in parameters]
            applied.append(took_s(lambda step=step: apply(step)) / plain_s)  # type: ignore[misc]
            journal.replace_copies()
            kept = journal.extra_bytes / scale.parameters
            taken_back.append(took_s(journal.undo) / plain_s)
            if not all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True)):
                raise AssertionError("the undo has other bits")
            apply(step)
        yield (
            f"AdamW {implementation}, {scale.parameters / 1e6:g} M parameters, undo {kind}",
            f"recorded {statistics.median(applied[WARM_UP:]):.2f} of a plain step, "
            f"taken back {statistics.median(taken_back[WARM_UP:]):.2f}; {kept:.2f} bytes a parameter",
        )


_HOLDER = f"""
import sys, time, torch
began = time.monotonic()
kind = torch.accelerator.current_accelerator()
torch.zeros(1, device=kind)
torch.accelerator.synchronize()
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
held = torch.zeros({HELD_BYTES}, dtype=torch.uint8, device=kind)
torch.accelerator.synchronize()
print("held", flush=True)
sys.stdin.readline()
"""


def context(scale: Scale) -> Iterator[tuple[str, str]]:
    """Another process's context, and its memory after a kill."""
    module = torch.get_device_module(current_accelerator().torch)
    free = getattr(module, "mem_get_info", None)
    before = free()[0] if free else 0
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other:
        try:
            yield "context of a process", f"{float(other.stdout.readline()):.2f} s"
            if free is None:
                yield "memory of a context", "this device does not tell"
                return
            yield "memory of a context", f"{(before - free()[0]) / 2**20:.0f} MiB"
            print(file=other.stdin, flush=True)
            assert other.stdout.readline() == "held\n"
            other.send_signal(signal.SIGKILL)
            began = time.monotonic()
            while free()[0] < before - HELD_BYTES // 2:
                assert time.monotonic() - began < KILLED_S, "the memory of a killed process is not free"
            yield "kill of a process to its memory free", f"{1e3 * (time.monotonic() - began):.0f} ms"
        finally:
            other.kill()


def main() -> None:
    scale = CUDA if current_accelerator().torch.type == "cuda" else SIMULATED
    measured = (copies, recording, ring, undo, context)
    print(json.dumps({name: value for measure in measured for name, value in measure(scale)}))


if __name__ == "__main__":
    main()
