"""`torch.device("simulated")`: compiles simulated.cpp once, and makes a device module of it.

`load()` changes torch for the whole process: from then on there is an accelerator. So the tests of this folder run in
processes of their own (conftest.py), and nothing else may call it.
"""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "simulated"
SOURCE = Path(__file__).with_suffix(".cpp")
KEPT = Path(__file__).with_name(".compiled")
"""Ignored by git."""
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Werror")
_TORCH = Path(torch.__file__).parent
PROBE_BYTES = 4
"""Size of the message with which each communicator begins."""

# --- compiling ---


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def library() -> Path:
    """Compiles it if this source was not compiled with this torch before."""
    name = f"{torch.__version__} {torch.version.git_version} {FLAGS}".encode()
    target = KEPT / f"{hashlib.sha256(name + SOURCE.read_bytes()).hexdigest()[:16]}.so"
    words = [*FLAGS, f"-I{_TORCH / 'include'}", str(SOURCE), f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    _make(target, words, older="*.so")
    return target


def _make(target: Path, words: list[str], program: str = "", older: str = "") -> None:
    KEPT.mkdir(exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        for old in KEPT.glob(older) if older else ():
            old.unlink()
        made = target.with_suffix(".new")
        command = [compiler() or "g++", *words, "-o", str(made)]
        done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        made.rename(target)


# --- waits of the host ---

_waits: Counter[tuple[str, str]] = Counter()
_refusing = 0
_warning = False
_HERE = str(Path(__file__))
_ROOT = Path(__file__).parents[2]
LINES = 8
"""How many are told of a wait: the innermost one is often a helper."""


def _lines() -> str:
    """Where the program stands that made torch wait: "file:line", then its callers'."""
    lines: list[str] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and len(lines) < LINES:
        path = frame.f_code.co_filename
        if not path.startswith((str(_TORCH), _HERE, "<")):
            lines.append(f"{os.path.relpath(path, _ROOT)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines) or "a thread of torch's own"


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)
def _on_wait(what: bytes) -> int:
    where = _lines()
    _waits[what.decode(), where] += 1
    if directory := os.environ.get("SIMULATED_WAITS"):
        with (Path(directory) / str(os.getpid())).open("a") as file:
            file.write(f"{what.decode()} | {where}\n")
    if _warning:
        warnings.warn(f"called a synchronizing operation: {what.decode()} ({where})", stacklevel=2)
    return _refusing


def set_sync_debug_mode(mode: str) -> None:
    """As torch.cuda's: "warn" lets each wait of the host warn, "default" lets none."""
    global _warning
    _warning = mode == "warn"


def waits() -> dict[tuple[str, str], int]:
    """(what, "file:line < its caller's < …") -> how often the host has waited for a device since the last call.

    With SIMULATED_WAITS=DIRECTORY each process also writes them into a file there, a line each."""
    seen = dict(_waits)
    _waits.clear()
    return seen


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Whatever makes the host wait in here, in any thread, raises RuntimeError instead; and so does the end of this, if
    somebody has swallowed that."""
    global _refusing
    before = _waits.copy()
    _refusing += 1
    try:
        yield
    finally:
        _refusing -= 1
    if _waits != before:
        raise RuntimeError(f"the host was about to wait for a device: {dict(_waits - before)}")


# --- the wires of a session ---

WIRES = ("staged", "nccl")
"""Gloo by way of pinned memory; the fake NCCL's communicators."""
OVER_NCCL = f"{NAME}-nccl"
"""What trainers of the tests are told for the device with communicators."""


def load_with_communicators(directory: Path) -> None:
    """As `load`, in a program that has not begun its session; that one has communicators of the fake NCCL, whose
    messages are counted in the folder (`fake_nccl`)."""
    from swift_ft.comm import NCCL_ENVIRONMENT

    load()
    torch.accelerator.set_device_index(0)  # a rank that uses no device has no communicators
    os.environ.update(NCCL_ENVIRONMENT, FAKE_NCCL=str(directory))
    sys.path.append(str(Path(__file__).with_name("plugin_nccl")))


def sent_over_communicators(directory: Path) -> bool:
    """Returns whether more has passed there than the message with which each communicator begins."""
    lines = [line for path in directory.glob("messages-*") for line in path.read_text().splitlines()]
    return any(line.startswith("sent") and int(line.split()[1]) > PROBE_BYTES for line in lines)


# --- kernels of a program's own ---

_KERNEL = """
#include <cstring>
#include <utility>
#define __global__
using std::memcpy, std::size_t;
thread_local struct { unsigned x; } blockIdx, threadIdx, blockDim, gridDim;
static int atomicAdd(int* at, int by) { return (*at += by) - by; }
__attribute__((unused)) static double sqrt(double x) { return __builtin_sqrt(x); }
__attribute__((unused)) static float sqrt(float x) { return __builtin_sqrtf(x); }
%s
template <class... A, size_t... I>
void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) { kernel(*static_cast<A*>(args[I])...); }
template <class... A>
void call(void (*kernel)(A...), void** args) { call(kernel, args, std::index_sequence_for<A...>()); }
extern "C" void launch(unsigned grid, unsigned block, void** args) {
  gridDim.x = grid, blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) call(%s, args);
}
"""


def _compile_kernel(source: str, name: str, nvcc_options: list[str]) -> Callable[..., None]:
    """As torch has it for CUDA: its threads run one after another, in the current stream."""
    assert nvcc_options == ["--fmad=false"]
    program = _KERNEL % (source, name)
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-x", "c++", "-")
    target = KEPT / f"kernel-{hashlib.sha256(program.encode()).hexdigest()[:16]}.so"
    _make(target, [*flags], program)
    address = ctypes.cast(ctypes.CDLL(str(target)).launch, ctypes.c_void_p).value

    def kernel(grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any]) -> None:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        assert all(tensor.device.type == NAME for tensor in tensors)
        words = [
            struct.pack(
                "<d" if isinstance(value, float) else "<q", 0 if isinstance(value, torch.Tensor) else value
            )
            for value in args
        ]
        places = [place for place, value in enumerate(args) if isinstance(value, torch.Tensor)]
        packed = list(struct.unpack(f"<{len(args)}q", b"".join(words)))
        torch.ops.simulated.launch(address, grid[0], block[0], packed, tensors, places)

    return kernel


# --- what only a test may do ---


def hold(stream: torch.Stream | None = None) -> Callable[[], None]:
    """Lets a stream (the current one) stand still at this place; returns what lets it go on, in any thread."""
    stream = stream or torch.accelerator.current_stream()
    number = torch.ops.simulated.hold(stream.device_index, stream.stream_id)
    return functools.partial(torch.ops.simulated.release, number)


@contextlib.contextmanager
def held(stream: torch.Stream | None = None) -> Iterator[None]:
    """It stands still at this place until the end."""
    release = hold(stream)
    try:
        yield
    finally:
        release()


def engine_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host: what is there now, whatever is still under way."""
    view: torch.Tensor = torch.ops.simulated.engine_view(tensor.detach())
    return view


# --- the device module ---


class _DeviceContext:
    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _index(device: Any = None) -> int:
    index: int | None = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


@contextlib.contextmanager
def _stream_context(stream: torch.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _keep_parameters() -> None:
    """For CUDA, `Module.to` keeps the parameters and only changes their data, so tied weights stay tied. For this kind
    of device torch makes others, unless it swaps what they are; and then `load_state_dict` would swap as well."""
    apply = torch.nn.Module._apply

    def swapping(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return apply(module, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)

    torch.nn.Module._apply = swapping  # type: ignore[method-assign]


@functools.cache
def load() -> types.ModuleType:
    """`torch.simulated`, which is there from now on."""
    torch.ops.load_library(library())
    torch.utils.rename_privateuse1_backend(NAME)
    _keep_parameters()
    ops, accelerator = torch.ops.simulated, torch.accelerator
    generators = tuple(ops.default_generator(index) for index in range(2))

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def seed_current(seed: int) -> None:
        generators[_index()].manual_seed(seed)

    set_up: list[bool] = []
    module: Any = types.ModuleType(f"torch.{NAME}")
    named: dict[str, Callable[..., Any] | type | object] = {
        "default_generators": generators,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "device": _DeviceContext,
        "is_available": lambda: True,
        "is_initialized": lambda: bool(set_up) or ops.initialized(),
        "_is_in_bad_fork": ops.in_bad_fork,
        "_lazy_init": lambda: set_up.append(True),  # also by the choice of a device, as for CUDA
        "device_count": lambda: len(generators),
        "current_device": accelerator.current_device_index,
        "set_device": lambda device: accelerator.set_device_index(_index(device)),
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "stream": _stream_context,
        "synchronize": accelerator.synchronize,
        "empty_cache": accelerator.empty_cache,
        "memory_allocated": accelerator.memory_allocated,
        "max_memory_allocated": accelerator.max_memory_allocated,
        "manual_seed": seed_current,
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
        "set_sync_debug_mode": set_sync_debug_mode,
        "_sleep": ops.sleep,
        "pin": ops.pin,
        "unpin": ops.unpin,
        "_compile_kernel": _compile_kernel,
    }
    vars(module).update(named)
    torch._register_device_module(NAME, module)
    sys.modules[module.__name__] = module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    ops.on_wait(ctypes.cast(_on_wait, ctypes.c_void_p).value)
    return module
