"""The device that a rank computes on, in torch's device-neutral terms: streams, events, pinned memory, generators.

A host that works through an accelerator runs ahead of it: a call returns when its kernels are queued in a stream. What
the session needs of a device is order between streams (events), copies to the host that do not delay training (a
stream of its own, pinned memory), generators to seed, and what tells it from other devices.

``accelerator_of(torch.device)`` returns the `Accelerator`. Who has a tensor of the CPU, whose work is over when a call
returns, needs none of this. What only CUDA has stands in `Cuda`; `torch.cuda` is named in no other module
(`tests/unit/test_project.py` checks it).
"""

import contextlib
import ctypes
import functools
import importlib
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch

from swift_ft.errors import ServiceError


class Event(Protocol):
    """A point in a stream of work."""

    def query(self) -> bool:
        """Returns whether the device has passed it. Does not wait."""


class Accelerator:
    """A device that runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        """`device`: with its index."""
        self.torch = device
        self._module: Any = torch.get_device_module(device)
        self._owed: Event | None = None

    @functools.cached_property
    def _copies(self) -> torch.Stream:
        """All copies of the state: in order, so the newest event stands for all."""
        return self.new_stream()

    def new_stream(self) -> torch.Stream:
        """Returns a stream that runs beside the training stream."""
        return torch.Stream(device=self.torch)

    def adopt(self, stream: torch.Stream) -> None:
        """(a thread of ours) Makes the device and `stream` current in this thread for good: both are per thread."""
        torch.accelerator.set_device_index(self.torch.index)
        torch.accelerator.set_stream(stream)

    def mark(self, stream: torch.Stream | None = None) -> Event:
        """Records an event behind all work queued so far on `stream`, or on the current stream."""
        event = torch.Event(device=self.torch)
        event.record(stream or torch.accelerator.current_stream(self.torch))
        return event

    def hold(self, event: Event, stream: torch.Stream | None = None) -> None:
        """Lets `stream`, or the current stream, wait for the event. The host does not wait."""
        stream = stream or torch.accelerator.current_stream(self.torch)
        stream.wait_event(event)  # type: ignore[arg-type]

    def copy_out(self, to: torch.Tensor, tensor: torch.Tensor, stream: torch.Stream) -> Event:
        """Queues on `stream` a copy of the device's `tensor` into pinned memory, behind all work queued on the current
        stream so far, and returns the event of the end of that. `tensor`'s memory is not given away before the copy is
        over."""
        reached = self.mark()
        self.hold(reached, stream)
        with _current(stream):
            to.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return reached

    def copy_all_out(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queues copies (into pinned memory, of a tensor) in one go on a stream of their own, behind all work queued on
        the current stream so far and all earlier such copies. Returns the event of their end."""
        self.hold(self.mark(), self._copies)
        with _current(self._copies):
            for to, tensor in pairs:
                to.copy_(tensor, non_blocking=True)
        for _, tensor in pairs:
            tensor.record_stream(self._copies)
        return self.mark(self._copies)

    @functools.cached_property
    def _incoming(self) -> torch.Stream:
        return self.new_stream()

    def copy_in(self, tensor: torch.Tensor, host: torch.Tensor, reusable: Event) -> None:
        """Queues a copy of pinned memory into `tensor` on a stream of its own, and lets the current stream wait for it.
        `reusable`: behind all earlier work that uses the tensor's memory. So the copy may overtake later work."""
        self.hold(reusable, self._incoming)
        with _current(self._incoming):
            tensor.copy_(host, non_blocking=True)
        tensor.record_stream(self._incoming)
        self.hold(self.mark(self._incoming))

    def constant(self, host: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the device that every stream may read at once. It is never given back."""
        stream = self.new_stream()
        with _current(stream):
            copy = host.pin_memory().to(self.torch, non_blocking=True)
        until_over(self.mark(stream))
        return copy

    def owe(self, copied: Event) -> None:
        """Lets the next update wait for an event of `copy_all_out`."""
        self._owed = copied

    def wait_for_copies(self) -> None:
        """(before an update or another change of the state) Holds the current stream for the copies that are owed."""
        if self._owed is not None:
            self.hold(self._owed)
            if self._owed.query():  # until then another stream may ask as well
                self._owed = None

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns host memory that the device copies from and to while the host goes on."""
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def pin(self, address: int, size: int) -> Callable[[], None]:
        """Pins host memory that is there; returns a function that unpins it. Raises ServiceError."""
        self._module.pin(address, size)
        return lambda: self._module.unpin(address)

    def wait(self, event: Event) -> None:
        """Makes the host wait for an event of `mark`."""
        event.synchronize()  # type: ignore[attr-defined]

    def moment(self) -> torch.Event:
        """Returns the time at which the device passes this point of the current stream."""
        event = torch.Event(device=self.torch, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.torch))
        return event

    def passed(self, moment: torch.Event) -> bool:
        """Returns whether the device has passed a moment. Does not wait."""
        return moment.query()

    def seconds(self, first: torch.Event, last: torch.Event) -> float:
        """Returns the time from one moment, which the device has passed, to another one."""
        return first.elapsed_time(last) / 1000

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch)

    def generators(self) -> Sequence[torch.Generator]:
        generators: Sequence[torch.Generator] = self._module.default_generators
        return generators

    def facts(self) -> dict[str, str]:
        """Returns what decides which kernels are chosen on devices of this kind, as far as no environment variable
        does. Of all devices that this process sees: which one is the rank's may not be known yet."""
        return {"device": self.torch.type}

    def compile(self, source: str, name: str) -> Callable[..., None] | None:
        """Compiles C++ that has one kernel and no headers, without fused products and sums. Returns None where that
        cannot be done.

        The result is called with `grid` and `block`, three sizes each, and `args`: tensors, ints (of 32 bits), floats
        (of 64)."""
        try:
            kernel: Callable[..., None] = self._module._compile_kernel(
                source, name, nvcc_options=["--fmad=false"]
            )
        except (AttributeError, OSError, RuntimeError):
            return None
        return kernel

    def free_cache(self) -> None:
        """Gives memory that torch keeps for later tensors back to the device."""
        torch.accelerator.empty_cache()


class Cuda(Accelerator):
    def facts(self) -> dict[str, str]:
        cuda: Any = torch.cuda
        backends: Any = torch.backends.cuda
        blas: Any = backends.matmul
        dnn: Any = torch.backends.cudnn
        seen = (cuda.get_device_properties(index) for index in range(cuda.device_count()))
        devices = {
            f"{each.name}, {each.multi_processor_count} multiprocessors, {each.total_memory >> 30} GiB, "
            f"capability {each.major}.{each.minor}"
            for each in seen
        }
        attentions = {
            "flash": backends.flash_sdp_enabled(),
            "efficient": backends.mem_efficient_sdp_enabled(),
            "cudnn": backends.cudnn_sdp_enabled(),
            "math": backends.math_sdp_enabled(),
        }
        inductor: Any = sys.modules.get("torch._inductor.config")  # reads the variables where it is imported
        autotune = inductor is not None and (inductor.max_autotune or inductor.max_autotune_gemm)
        return {
            **super().facts(),
            "gpu": "; ".join(sorted(devices)),
            "gpu_driver": _driver(),
            "cuda": str(torch.version.cuda or getattr(torch.version, "hip", None)),
            "cublas": _cublas_version(),
            "cudnn": str(dnn.version()),
            "nccl": str(cuda.nccl.version()) if torch.distributed.is_nccl_available() else "",
            "triton": _version_of("triton"),
            "cuda_matmul_precision": blas.fp32_precision,
            "cudnn_precision": f"{dnn.conv.fp32_precision}, {dnn.rnn.fp32_precision}",
            "cuda_reduced_precision": f"{blas.allow_fp16_reduced_precision_reduction}, "
            f"{blas.allow_bf16_reduced_precision_reduction}, {blas.allow_fp16_accumulation}",
            "cuda_libraries": f"{backends.preferred_blas_library()}, {backends.preferred_linalg_library()}",
            "cuda_attention": " ".join(name for name, enabled in attentions.items() if enabled),
            "cudnn_enabled": str(dnn.enabled),
            "cudnn_benchmark": str(dnn.benchmark),
            "tunable_op": str(cuda.tunable.is_enabled() and cuda.tunable.tuning_is_enabled()),
            "max_autotune": str(autotune or any(os.environ.get(name) == "1" for name in _AUTOTUNE)),
        }

    def compile(self, source: str, name: str) -> Callable[..., None] | None:
        try:
            extension: Any = importlib.import_module("torch.utils.cpp_extension")
        except ImportError:  # it needs setuptools
            return None
        # torch's runtime compiler asks for the toolkit's folder, where the headers are that this does without.
        home, extension.CUDA_HOME = extension.CUDA_HOME, extension.CUDA_HOME or ""
        try:
            return super().compile(source, name)
        finally:
            extension.CUDA_HOME = home

    def pin(self, address: int, size: int) -> Callable[[], None]:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(cudart.cudaHostRegister(address, size, 0))
        if error:
            raise ServiceError(
                f"{size} bytes of the log's queue cannot be pinned (CUDA error {error}); give a smaller log_queue_bytes"
            )
        return lambda: cudart.cudaHostUnregister(address)


_AUTOTUNE = ("TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM")


def _driver(told: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", told.read_text())
    except OSError:
        return "unknown"
    return found[0] if found else "unknown"


def _cublas_version() -> str:
    """Asks the library that torch has loaded. torch itself does not tell."""
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        numbers = [ctypes.c_int() for _ in range(3)]  # major, minor, patch
        for which, number in enumerate(numbers):
            library.cublasGetProperty(which, ctypes.byref(number))
    except (OSError, AttributeError):
        return "unknown"
    return ".".join(str(number.value) for number in numbers)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@contextlib.contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    """Makes the stream current in this thread. (``with stream`` keeps the one before in the stream: two threads that do
    so at a time would get each other's.)"""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def facts() -> dict[str, str]:
    """Returns `Accelerator.facts` of the device in use; empty without one. Sets none up: a trainer may stay on the CPU
    of a machine that has devices."""
    accelerator = accelerator_in_use()
    return {} if accelerator is None else accelerator.facts()


def wait_for_copies() -> None:
    """`Accelerator.wait_for_copies` of the device in use, if there is one."""
    if (accelerator := accelerator_in_use()) is not None:
        accelerator.wait_for_copies()


_POLL_S = 0.0001


def until_over(event: Event) -> None:
    """(a thread of ours, none of the trainer's) Waits for an event without holding a lock of the device's."""
    while not event.query():
        time.sleep(_POLL_S)


def accelerator_of(device: torch.device) -> Accelerator:
    """Returns the device that tensors on `device`, which is not the CPU, are on."""
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return _accelerator(device.type, index)


@functools.cache
def _accelerator(kind: str, index: int) -> Accelerator:
    return (Cuda if kind == "cuda" else Accelerator)(torch.device(kind, index))


def current_accelerator() -> Accelerator:
    """Returns this process's current accelerator, which is there. Its use sets it up."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return _accelerator(kind.type, torch.accelerator.current_device_index())


def accelerator_in_use() -> Accelerator | None:
    """Returns this process's current accelerator if it has been set up. Does not set one up: a process that has used a
    device cannot fork ranks that use it."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.get_device_module(kind).is_initialized():
        return None
    return current_accelerator()


def device_types() -> list[str]:
    """Returns the types of devices whose tensors this process may have: the CPU and torch's accelerator, if any."""
    kind = torch.accelerator.current_accelerator()
    return ["cpu"] if kind is None else ["cpu", kind.type]


def cause_on_device(error: BaseException) -> torch.AcceleratorError | None:
    """Returns the device's own error that has caused this one, or None. Such an error is sticky: every later call on
    the device fails in this process. One that says that memory is used up is not."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.AcceleratorError) and getattr(seen, "error_code", None) != _NO_MEMORY:
            return seen
        seen = seen.__cause__ or seen.__context__  # autograd and pipelining wrap it
    return None


_NO_MEMORY = 2
"""cudaErrorMemoryAllocation: of calls that are not torch's allocator, which raises OutOfMemoryError."""


def break_device() -> None:
    """(fault injection) Queues a kernel that fails on the current accelerator. Raises ServiceError without one."""
    if (there := accelerator_in_use()) is None:
        raise ServiceError("kind=device: this rank has used no device")
    torch.zeros(1, device=there.torch).index_select(0, torch.ones(1, dtype=torch.int64, device=there.torch))


class Arrivals(Protocol):
    """Messages whose waits order streams only (`swift_ft.comm.backend.Fabric`)."""

    def arriving(self) -> Accelerator | None: ...

    def begin_check(self) -> Callable[[], None]: ...

    def check_arrived(self) -> None: ...


def surely() -> bool:
    return True


class Readings:
    """What the host wants to know of a step's tensors on a device, read at the step's one wait for the device.

    (any part of the step) ``later``, ``then`` … (before the first update; at the step's end) ``read``; ``drop``

    What waits is answered in the order of the calls. `later` answers for a tensor of the host at once; who needs the
    order says so by `then`.
    """

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._device: Accelerator | None = None
        self.arrivals: Callable[[], Arrivals | None] = lambda: None
        """Returns those of this generation."""
        self._checked: tuple[Arrivals | None, int] = (None, 0)
        """Checks that have found all whole: of which generation, how many."""

    def later(self, tensor: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Calls ``use(copy on the host)`` with the values that `tensor` has now in its stream."""
        if tensor.device.type == "cpu":
            use(tensor)
            return
        self._device = accelerator_of(tensor.device)
        host = self._device.pinned(tensor.numel(), tensor.dtype)
        # In the training stream: the next kernel there may overwrite the tensor.
        host.copy_(tensor.detach().reshape(-1), non_blocking=True)
        self._waiting.append(lambda: use(host.view(tensor.shape)))

    def then(self, use: Callable[[], None]) -> None:
        if self._waiting:
            self._waiting.append(use)
        else:
            use()

    def read(self) -> None:
        """Waits once for the device if something waits for it, or messages arrive there, and answers. Raises what an
        answer raises, and RuntimeError if a message is lost."""
        arrivals = self.arrivals()
        arriving = None if arrivals is None else arrivals.arriving()
        device = arriving or (self._device if self._waiting else None)
        if device is None:
            return
        check = None if arrivals is None else arrivals.begin_check()
        device.wait(device.mark())
        if check is not None:
            check()  # not before the wait: an abort may end it
            self._checked = arrivals, 1 + self._checks_of(arrivals)
        waiting, self._waiting = self._waiting, []
        for use in waiting:
            use()

    def read_arrivals(self) -> None:
        """Settles if messages arrive: what is applied next must be whole."""
        arrivals = self.arrivals()
        if arrivals is not None and arrivals.arriving() is not None:
            self.read()

    def check_arrived(self) -> None:
        """Raises RuntimeError if an abort may have left garbage in what the host knows. Does not wait."""
        if (arrivals := self.arrivals()) is not None:
            arrivals.check_arrived()

    def wholeness(self) -> Callable[[], bool]:
        """Returns what tells whether all that the device is to do up to now has been done with whole messages. It is
        asked once the device has done that. `surely` if none of them is under way: no abort is any of its own."""
        arrivals = self.arrivals()
        if arrivals is None or arrivals.arriving() is None:
            return surely
        checks = self._checks_of(arrivals)

        def is_whole() -> bool:
            if self._checks_of(arrivals) > checks:
                return True  # an abort after that is none of theirs
            try:
                arrivals.check_arrived()
            except RuntimeError:
                return False
            return True

        return is_whole

    def _checks_of(self, arrivals: Arrivals | None) -> int:
        return self._checked[1] if self._checked[0] is arrivals else 0

    def drop(self) -> None:
        """Answers nothing of what was asked: the step is dropped."""
        self._waiting.clear()


class Pulse:
    """Tells a device that hangs from a host that is slow or waits: in a step that runs past its bound, the training
    stream is never seen idle. Asks (`query`) and waits for nothing, and only past the bound: a graph that is captured
    would not survive the question.

    (trainer's thread) ``step`` around each step; (lease thread) ``hangs`` at each heartbeat
    """

    LOOKS = 5
    """A step has one wait of the host at least, so a device that works is idle in one of so many looks."""

    def __init__(self, bound_s: float = 30.0, factor: float = 10.0) -> None:
        """A step's bound is `factor` times the longest of the recent ones, and at least `bound_s` (as the
        coordinator's, unless it was given others)."""
        self._bound_s, self._factor = bound_s, factor
        self._recent_s: deque[float] = deque(maxlen=32)
        self._limit_s = math.inf  # before the end of a first step
        self._under_way: tuple[float, torch.Stream] | None = None
        self._busy = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        began, there = time.monotonic(), accelerator_in_use()
        self._busy = 0
        if there is not None:
            self._under_way = began, torch.accelerator.current_stream(there.torch)
        try:
            yield
            self._recent_s.append(time.monotonic() - began)
            self._limit_s = max(self._bound_s, self._factor * max(self._recent_s))
        finally:
            self._under_way = None

    def hangs(self) -> str:
        """Returns why the device seems to hang; empty if it does not."""
        under_way = self._under_way
        if under_way is None:
            return ""
        began, stream = under_way
        age_s = time.monotonic() - began
        if age_s <= self._limit_s:
            return ""
        try:
            self._busy = 0 if stream.query() else self._busy + 1
        except RuntimeError as error:  # the trainer's thread gets it too, if it does not hang
            return f"its step has run for {age_s:.1f} s, and its device has failed: {error}"
        if self._busy < self.LOOKS:
            return ""
        return (
            f"its step has run for {age_s:.1f} s, and its device is never idle: it hangs, or computes so long"
        )


# --- Default generators ---


def seed_generators(seed: int) -> None:
    """Seeds the default generators of the CPU and, if an accelerator is in use, of the current device. The CPU's takes
    1 µs, where `torch.manual_seed` takes 72 µs."""
    torch.default_generator.manual_seed(seed)
    if (there := accelerator_in_use()) is not None:
        there.generators()[there.torch.index].manual_seed(seed)


def generator_states() -> list[torch.Tensor]:
    """Returns the states of the default generators: the CPU's, then those of all accelerators once they are set up. An
    accelerator's state is a seed and an offset that the host keeps: reading it waits for no device."""
    return [generator.get_state() for generator in _default_generators()]


def set_generator_states(states: Sequence[torch.Tensor]) -> None:
    for generator, state in zip(_default_generators(), states, strict=False):
        generator.set_state(state)


def _default_generators() -> list[torch.Generator]:
    there = accelerator_in_use()
    return [torch.default_generator, *([] if there is None else there.generators())]
