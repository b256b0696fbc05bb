"""What capture and undo cost on a CUDA device, as ratios of one run. `scripts/gpu` prints it."""

import statistics
import sys
import time
from collections.abc import Callable

import torch

from swift_ft.device import Cuda
from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar_client import SidecarWriter
from swift_ft.state.journal import Journal
from swift_ft.train.boundary_log import DeviceCapture
from tests.unit.log.service import JOB, InProcess

SIDE, PRODUCTS = 8192, 8
"""A step of training is so many products of square bf16 matrices of this side."""
RECORD_BYTES = (16 << 20, 64 << 20)
STEPS = 12
RING_BYTES = 2 << 30
PARAMETERS = 100_000_000


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no CUDA device here", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    for size in RECORD_BYTES:
        _capture(size)
    for implementation, undo in (("foreach", "exact"), ("foreach", "preimage"), ("fused", "preimage")):
        _undo(implementation, undo)
    return 0


def _took_s(do: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    do()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _pinned_copy_s(tensor: torch.Tensor) -> float:
    """The limit: the same bytes into pinned memory of torch's."""
    to = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return statistics.median(_took_s(lambda: to.copy_(tensor, non_blocking=True)) for _ in range(9))


def _capture(size: int) -> None:
    left = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    sent = torch.randn(size // 2, device="cuda", dtype=torch.bfloat16)

    def train() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right)

    host = torch.empty(sent.shape, dtype=sent.dtype)
    ways: dict[str, list[float]] = {"plain": [], "capture": [], "blocking copy": []}
    calls: list[float] = []
    with InProcess() as server:
        writer = SidecarWriter([server.address], JOB, 1, queue_bytes=RING_BYTES)
        capture = DeviceCapture(writer, Cuda(torch.device("cuda", 0)))

        def captured(step: int) -> None:
            began = time.perf_counter()
            capture.record("s0.F", RecordKey(step, 0, 0), sent, now=False, keep=False)
            calls.append(time.perf_counter() - began)
            train()
            capture.wait_copied()

        def copied() -> None:
            host.copy_(sent)
            train()

        try:
            for step in range(STEPS):
                ways["plain"].append(_took_s(train))
                ways["capture"].append(_took_s(lambda step=step: captured(step)))  # type: ignore[misc]
                ways["blocking copy"].append(_took_s(copied))
                writer.flush(60.0)
            limit_s = _pinned_copy_s(sent)
            alone = [
                _took_s(lambda step=step: _alone(capture, sent, step)) for step in range(STEPS, STEPS + 9)
            ]  # type: ignore[misc]
        finally:
            writer.close(0.0)
    median = {way: statistics.median(times[2:]) for way, times in ways.items()}
    plain = median["plain"]
    print(
        f"capture of {size >> 20} MiB in a step of {plain * 1e3:.1f} ms: step {median['capture'] / plain:.3f} of the "
        f"plain one, with a blocking copy {median['blocking copy'] / plain:.3f}; the call takes "
        f"{statistics.median(calls[2:]) * 1e6:.0f} us; alone {statistics.median(alone) / limit_s:.2f} of a copy into "
        f"pinned memory, which moves {size / limit_s / 1e9:.1f} GB/s"
    )


def _alone(capture: DeviceCapture, sent: torch.Tensor, step: int) -> None:
    capture.record("s0.F", RecordKey(step, 0, 0), sent, now=False, keep=False)
    capture.finish()
    capture.wait_copied()


def _undo(implementation: str, undo: str) -> None:
    def made() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = [
            torch.nn.Parameter(torch.randn(PARAMETERS // 20, device="cuda") * 0.02) for _ in range(20)
        ]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter) * 1e-3
        return parameters, torch.optim.AdamW(parameters, lr=1e-3, **{implementation: True})  # type: ignore[arg-type]

    times: dict[str, list[float]] = {"plain": [], "recording": [], "undo": []}
    parameters, optimizer = made()
    _, plain = made()
    journal = Journal(optimizer, undo=undo)
    for step in range(9):
        times["plain"].append(_took_s(plain.step))
        before = [p.detach().clone() for p in parameters]
        times["recording"].append(_took_s(lambda step=step: _recorded(journal, step)))  # type: ignore[misc]
        journal.settle()
        kept = journal.extra_bytes / PARAMETERS
        times["undo"].append(_took_s(journal.undo))
        if not all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True)):
            raise AssertionError("the undo has other bits")
        _recorded(journal, step)
    plain_s = statistics.median(times["plain"][3:])
    way = "copies" if journal.mode == "preimage" else "codes"
    print(
        f"AdamW {implementation}, {PARAMETERS // 1_000_000}M float32 parameters, a step of {plain_s * 1e3:.2f} ms: "
        f"recording by {way} {statistics.median(times['recording'][3:]) / plain_s:.2f} of it, "
        f"the undo {statistics.median(times['undo'][3:]) / plain_s:.2f}, {kept:.2f} bytes a parameter"
    )


def _recorded(journal: Journal, step: int) -> None:
    journal.begin(step)
    journal.apply_rest()


if __name__ == "__main__":
    raise SystemExit(main())
