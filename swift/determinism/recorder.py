"""In a rank: what each step begins with, takes in and computes, as digests of every bit, one line of JSON a step.

(session)  its runtime tells where steps begin, update and end (`swift.runtime.evidence.watch`)
(script)   a step begins with the first forward, outside of `no_grad`, behind an optimizer's step; hooks of torch tell

Either way the calls of modules that no other module has called, and of `backward`, are watched from outside. So a
script needs no change. Nothing is drawn, changed or kept; what a step costs more is a pass over its state.
"""

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swift import events
from swift.checkpoint.state import split
from swift.determinism.records import (
    BUFFERS,
    ENV_DIE_IN,
    ENV_RECORDS,
    GRADIENTS,
    HYPERPARAMETERS,
    INPUTS,
    LOSS,
    OBJECTS,
    OPTIMIZER,
    OUTPUTS,
    PARAMETERS,
    RNG,
    Begin,
    Record,
    line,
)
from swift.errors import UsageError
from swift.runtime import evidence
from swift.runtime.manifest import local
from swift.runtime.rng import digests_of_states
from swift.runtime.state import TrainerState
from swift.runtime.witness import digest_of, tensors_of

_WORD = "swift"
_PLAIN = (bool, int, float, str, type(None))


def text_of(value: Any) -> str:
    """A digest of a tensor, or of what holds tensors; a number or a string as it is."""
    if isinstance(value, torch.Tensor):
        return digest_of(local(value), whole=True).hex()
    if isinstance(value, _PLAIN) or (
        isinstance(value, tuple | list) and all(isinstance(part, _PLAIN) for part in value)
    ):
        return repr(value)
    try:
        tensors, rest = split(value)
    except UsageError:
        return type(value).__name__
    found = xxhash.xxh3_128(repr(rest).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + digest_of(local(tensor), whole=True))
    return found.hexdigest()


def settings() -> dict[str, str]:
    """Those of torch that may change the bits of a result."""
    return {
        "threads": str(torch.get_num_threads()),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "matmul precision": torch.get_float32_matmul_precision(),
        "default dtype": str(torch.get_default_dtype()),
        "cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "cudnn.deterministic": str(torch.backends.cudnn.deterministic),
    }


@dataclass
class _Step:
    """The step under way."""

    number: int
    replay: bool = False
    stepped: bool = False
    """An optimizer has."""
    settings: dict[str, str] = field(default_factory=settings)
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    unsaved: list[str] = field(default_factory=list)
    modules: dict[int, tuple[str, torch.nn.Module]] = field(default_factory=dict)
    """By id: those that were called, and what they are called here."""
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """Of parameters, by id."""

    def __post_init__(self) -> None:
        self.put(RNG, digests_of_states())

    def put(self, kind: str, values: Mapping[str, str]) -> None:
        """What is known already stays: it is what the step has begun with."""
        known = self.values.setdefault(kind, {})
        for name, value in values.items():
            known.setdefault(name, value)

    def see_module(self, name: str, module: torch.nn.Module) -> None:
        """Its parameters and buffers, the first time."""
        if id(module) in self.modules:
            return
        self.modules[id(module)] = (name, module)
        for part, parameter in module.named_parameters():
            self.names.setdefault(id(parameter), f"{name}.{part}")
            self.put(PARAMETERS, {self.names[id(parameter)]: text_of(parameter)})
        self.put(BUFFERS, {f"{name}.{part}": text_of(buffer) for part, buffer in module.named_buffers()})
        saved = module.state_dict(keep_vars=True).keys() if self.values[BUFFERS] else ()
        self.unsaved += [f"{name}.{part}" for part, _ in module.named_buffers() if part not in saved]

    def knows(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(known is optimizer for known in self.optimizers)

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Its parameters, their state and its hyperparameters, the first time."""
        if self.knows(optimizer):
            return
        word = f"optimizer{len(self.optimizers)}"
        self.optimizers.append(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            own = {f"{word}.group{number}.{key}": text_of(v) for key, v in group.items() if key != "params"}
            self.put(HYPERPARAMETERS, own)
            for place, parameter in enumerate(group["params"]):
                name = self.names.setdefault(id(parameter), f"{word}.group{number}.{place}")
                self.put(PARAMETERS, {name: text_of(parameter)} if name.startswith(word) else {})
                state = optimizer.state.get(parameter, {})
                self.put(OPTIMIZER, {f"{name}.{key}": _of_state(value) for key, value in state.items()})

    def see_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Those that are there."""
        for parameter in parameters:
            name, gradient = self.names.get(id(parameter)), parameter.grad
            if name is None or gradient is None or name in self.values.get(GRADIENTS, {}):
                continue
            self.put(GRADIENTS, {name: text_of(gradient)})
            if gradient.layout is torch.strided and gradient.is_floating_point():
                norm = torch.linalg.vector_norm(local(gradient).detach(), dtype=torch.float64)
                self.norms[name] = float(norm)

    def number_of(self, kind: str, prefix: str, tensors: Iterable[torch.Tensor]) -> None:
        known = len(self.values.get(kind, {}))
        self.put(kind, {f"{prefix} {known + n}": text_of(tensor) for n, tensor in enumerate(tensors)})

    def record(self, *, last: bool = False) -> Record:
        return Record(
            step=self.number,
            values=self.values,
            norms=self.norms,
            settings=self.settings,
            unsaved=self.unsaved,
            replay=self.replay,
            last=last,
        )


def _of_state(value: Any) -> str:
    """A counter is shown, not digested."""
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1 and value.dim() == 0
    return repr(value.item()) if is_number else text_of(value)


def _infers(stage: Any) -> bool:
    """It runs for its shapes only, with arbitrary bits."""
    return bool(getattr(stage, "inferring", False))


def _has_closure(args: Any, kwargs: Any) -> bool:
    """The optimizer computes the gradients itself: those that are there before are the last step's."""
    return any(callable(value) for value in (*args[1:], *kwargs.values()))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Recorder:
    """One process's."""

    def __init__(self, directory: Path, *, session: bool, die_in: int | None = None) -> None:
        """`session`: its runtime tells of steps. `die_in`: the step, counted in this process, in which it kills
        itself."""
        self._directory = directory
        self._session = session
        self._die_in = die_in
        self._path: Path | None = None
        self._step: _Step | None = None
        self._done = 0
        self._depth = threading.local()
        self._in_backward = False
        """Forwards there are computed again, and are nobody's input."""
        self._in_optimizer = 0
        """How many optimizers are in their step: forwards there (of a closure) are no step's begin."""
        self._stages: dict[int, tuple[str, Any]] = {}
        """By the id of their modules: their names, and they themselves."""
        self._begun_with = digests_of_states()

    # --- what is watched ---

    def install(self) -> None:
        """From here on everything is seen. Once in a process."""
        _wrap_call(self)
        _wrap_backward(self)
        if self._session:
            evidence.watch(self)
        else:
            register_optimizer_step_pre_hook(self.before_optimizer)
            register_optimizer_step_post_hook(self.after_optimizer)
        atexit.register(self.end)

    def call(self, module: torch.nn.Module, run: Callable[[], Any], values: Any) -> Any:
        """A module is called. What it takes and returns is seen if no other module has called it."""
        depth = getattr(self._depth, "value", 0)
        if (
            depth
            or self._in_backward
            or not torch.is_grad_enabled()
            or (name := self._name_of(module)) is None
        ):
            return run()
        assert self._step is not None
        step, self._depth.value = self._step, depth + 1
        try:
            step.see_module(name, module)
            step.number_of(INPUTS, "input", tensors_of(values))
            outputs = run()
            step.number_of(OUTPUTS, "output", tensors_of(outputs))
            return outputs
        finally:
            self._depth.value = depth

    def _name_of(self, module: torch.nn.Module) -> str | None:
        """None: its call belongs to no step."""
        if self._session:
            name, stage = self._stages.get(id(module), (None, None))
            return None if self._step is None or _infers(stage) else name
        if self._step is None or (self._step.stepped and not self._in_optimizer):
            self._next()
        assert self._step is not None
        if id(module) in self._step.modules:
            return self._step.modules[id(module)][0]
        word = type(module).__name__
        alike = sum(type(known).__name__ == word for _, known in self._step.modules.values())
        return f"{word}{alike + 1}" if alike else word

    @contextlib.contextmanager
    def backward(self, roots: Any) -> Any:
        """A backward pass from these tensors."""
        inferring = any(_infers(stage) for _, stage in self._stages.values())
        if self._step is not None and not (self._in_backward or inferring):
            losses = [root for root in tensors_of(roots) if root.numel() == 1]
            self._step.number_of(LOSS, "loss", losses)
        before, self._in_backward = self._in_backward, True
        try:
            yield
        finally:
            self._in_backward = before

    # --- a script without a session ---

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """(torch's hook)"""
        again = self._step is not None and self._step.stepped and self._step.knows(optimizer)
        if self._step is None or (again and not self._in_optimizer):
            self._next()
        assert self._step is not None
        self._step.see_optimizer(optimizer)
        if not _has_closure(args, kwargs):
            self._step.see_gradients(parameters_of(optimizer))
        if self._die_in == self._step.number and not self._step.stepped:
            os.kill(os.getpid(), signal.SIGKILL)
        self._in_optimizer += 1

    def after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """(torch's hook)"""
        self._in_optimizer -= 1
        assert self._step is not None
        if _has_closure(args, kwargs):
            self._step.see_gradients(parameters_of(optimizer))
        self._step.stepped = True

    def _next(self) -> None:
        """A step begins, and with it the last one is over."""
        if self._step is not None:
            self._write(self._step.record())
            self._done += 1
        self._step = _Step(self._done)

    # --- a session ---

    def step_begins(self, state: TrainerState, rank: int, *, replay: bool) -> None:
        """(runtime) All that the session knows of is seen."""
        self._step = _Step(state.version, replay)
        self._see_state(self._step, state)
        self._stages = {id(stage.submod): (f"stage {key}", stage) for key, stage in state.keyed().items()}

    def _see_state(self, step: _Step, state: TrainerState) -> None:
        for key, stage in state.keyed().items():
            step.see_module(f"stage {key}", stage.submod)
        for optimizer in state.optimizers:
            step.see_optimizer(optimizer)
        step.put(OBJECTS, {name: text_of(value.state_dict()) for name, value in state.objects.items()})

    def before_update(self, state: TrainerState) -> None:
        """(runtime) Gradients are what the update will see."""
        if self._step is not None:
            for optimizer in state.optimizers:
                self._step.see_gradients(parameters_of(optimizer))

    def step_ended(self, state: TrainerState) -> None:
        """(runtime) It was not dropped."""
        if self._step is None:
            return
        self.before_update(state)  # those of a second optimizer
        self._write(self._step.record())
        self._step, self._at_end = None, state

    _at_end: TrainerState | None = None

    # --- what is written ---

    def end(self) -> None:
        """The state in which this process ends."""
        if self._session:
            if self._at_end is not None and self._at_end.present:
                step = _Step(self._at_end.version)
                self._see_state(step, self._at_end)
                self._write(step.record(last=True))
            return
        if self._step is None or not self._step.stepped:
            return
        self._write(self._step.record())
        step = _Step(self._done + 1)
        for name, module in self._step.modules.values():
            step.see_module(name, module)
        for optimizer in self._step.optimizers:
            step.see_optimizer(optimizer)
        step.values.pop(RNG)  # whatever is drawn behind the last step
        self._write(step.record(last=True))

    def _write(self, record: Record) -> None:
        """One write, so a SIGKILL tears nothing but the last line."""
        text = line(record)
        if self._path is None:
            rank = int(os.environ.get("RANK", "0"))
            self._path = self._directory / f"rank{rank}-{os.getpid()}.jsonl"
            begin = Begin(rank=rank, at=events.now(), rng=self._begun_with, hash=str(hash(_WORD)))
            text = line(begin) + text
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _wrap_call(recorder: Recorder) -> None:
    called = torch.nn.Module.__call__

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return called(self, *args, **kwargs)
        return recorder.call(self, lambda: called(self, *args, **kwargs), (args, kwargs))

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def _wrap_backward(recorder: Recorder) -> None:
    backward, grad = torch.autograd.backward, torch.autograd.grad

    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.backward(tensors):
            return backward(tensors, *args, **kwargs)

    def watched_grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with recorder.backward(()):
            return grad(outputs, *args, **kwargs)

    torch.autograd.backward = watched
    torch.autograd.grad = watched_grad


def install(*, session: bool) -> None:
    """Records this process, if the environment says where to."""
    directory = os.environ.get(ENV_RECORDS)
    if directory:
        rank, _, step = os.environ.get(ENV_DIE_IN, "").partition(":")
        mine = bool(step) and rank == os.environ.get("RANK", "0")
        Recorder(Path(directory), session=session, die_in=int(step) if mine else None).install()
