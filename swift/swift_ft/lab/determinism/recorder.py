"""Runs in a rank: records each step's values, with all bits, as one line of JSON. A recording for a rehearsal observes
the same values (`swift_ft.train.recording`).

(session)  the runtime reports where steps begin, update and end (`swift_ft.train.verification.watch`)
(script)   a step begins with the first forward outside of `no_grad` after an optimizer's step; torch's hooks report it

Both kinds patch calls of outermost modules and of `backward`, so the script needs no change. Recording draws no random
numbers and changes no values. It costs a pass over the state in each step.
"""

import atexit
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from swift_ft import torch_private
from swift_ft.errors import UsageError
from swift_ft.lab.determinism.verify import ENV_DIE_IN, ENV_RECORDS, GENERATOR, PARAMETER, Record
from swift_ft.state import fsdp
from swift_ft.state.rng import digests_of_states
from swift_ft.state.tree import split
from swift_ft.train import verification
from swift_ft.train.config import determinism_fingerprint
from swift_ft.train.recording import ThoroughWatch
from swift_ft.train.step_digests import Witness, tensors_of
from swift_ft.train.training_state import TrainerState
from swift_ft.train.transcript import LOSS


class Recorder(ABC):
    """Recorder of one process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        # Validation (no grad) is not part of a step.
        self._witness = Witness(_ignored, lambda: not torch.is_grad_enabled(), _ignored, whole=True)
        self._names: dict[torch.nn.Parameter, str] = {}
        self._watch = ThoroughWatch(self._witness, (), lambda: self._names)
        self._step = -1
        self._settings: dict[str, str] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        """Modules whose calls from outside are recorded, by id."""
        self._updated: set[torch.Tensor] = set()
        """Parameters whose gradients were recorded in this step."""
        self._inside = False
        """True during a module's forward: modules that it calls are not outermost."""

    def install(self) -> None:
        """Patches torch so that every step is recorded. Called once in a process."""
        called, backward = torch.nn.Module.__call__, torch.autograd.backward

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return called(module, *args, **kwargs)
            return self._call(module, lambda: called(module, *args, **kwargs), (args, kwargs))

        def watched_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self._witness.thorough and not torch_private.is_in_backward() and not self.infers():
                for root in [each for each in tensors_of(tensors) if each.numel() == 1]:
                    self._witness.saw(LOSS, 0, self._witness.count(LOSS, ""), 0, root)
            return backward(tensors, *args, **kwargs)

        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.backward = watched_backward
        atexit.register(self.end)

    def _call(self, module: torch.nn.Module, run: Callable[[], Any], values: Any) -> Any:
        if (
            self._inside
            or torch_private.is_in_backward()
            or not torch.is_grad_enabled()
            or not self.called(module)
        ):
            return run()
        self._inside = True
        try:
            self._witness.called(values)
            outputs = run()
            self._witness.returned(outputs)
            return outputs
        finally:
            self._inside = False

    @abstractmethod
    def called(self, module: torch.nn.Module) -> bool:
        """Returns whether the call of an outermost module belongs to a step."""

    def infers(self) -> bool:
        """Returns whether modules run only to infer shapes, with arbitrary values."""
        return False

    @abstractmethod
    def end(self) -> None:
        """Records the final state when the process ends."""

    def _begin(self, step: int) -> None:
        self._watch.end()  # discards a dropped step
        self._step, self._updated = step, set()
        self._settings = self._settings or determinism_fingerprint("")
        self._witness.forget()
        self._witness.begin(step)
        self._watch.begin()

    def _see_generators(self) -> None:
        self._watch.state({f"{GENERATOR}{name}": state for name, state in digests_of_states().items()})

    def _see_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Records the gradients as the update uses them, each once in a step."""
        parameters = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        fresh = [p for p in parameters if p.grad is not None and p not in self._updated]
        self._updated.update(fresh)
        with torch.enable_grad():
            self._watch.gradients(fresh)

    def _write(self, *, last: bool = False) -> None:
        self._watch.end()
        rank, seen = int(os.environ.get("RANK", "0")), self._witness.transcript()
        # File names sort in the order in which their processes began.
        self._path = self._path or self._directory / f"{time.monotonic_ns():020}-rank{rank}.jsonl"
        with self._path.open("a") as file:
            file.write(Record(rank, self._step, seen, self._settings, last).line())


class OfSession(Recorder):
    """Recorder of a script with a session; receives the events of `swift_ft.train.verification`."""

    _stages: tuple[Any, ...] = ()
    _done: TrainerState | None = None

    def install(self) -> None:
        super().install()
        verification.watch(self)

    def called(self, module: torch.nn.Module) -> bool:
        return self._witness.thorough and id(module) in self._modules and not self.infers()

    def infers(self) -> bool:
        return any(getattr(stage, "inferring", False) for stage in self._stages)

    def step_begins(self, state: TrainerState, rank: int, *, replay: bool) -> None:
        """(runtime) Records all state that the session knows."""
        self._names, self._stages = dict(state.parameter_names()), tuple(state.stages)
        self._modules = {id(stage.submod): stage.submod for stage in state.stages}
        self._begin(state.version)
        for key, stage in state.keyed().items():
            self._watch.also(stage, stage.submod, key)
        self._watch.state(state.begun_with())
        self._see_generators()

    def before_update(self, state: TrainerState) -> None:
        """(runtime) Records the gradients, which are reduced by now."""
        if self._witness.thorough:
            self._see_gradients(state.optimizers)

    def step_ended(self, state: TrainerState) -> None:
        """(runtime) Writes the record of a step that was not dropped."""
        self.before_update(state)  # gradients of a second optimizer
        self._write()
        self._done = state

    def end(self) -> None:
        if self._done is not None and self._done.present:
            self._begin(self._done.version)
            self._watch.state(self._done.parts())
            self._write(last=True)


class OfScript(Recorder):
    """Recorder of a script without a session. Records a module or optimizer when a step first uses it."""

    def __init__(self, directory: Path, die_in: int | None = None) -> None:
        """`die_in`: step, counted in this process, in which it kills itself."""
        super().__init__(directory)
        self._die_in = die_in
        self._stepped = True
        """True once an optimizer has stepped in this step."""
        self._in_optimizer = 0
        """Number of optimizers inside their step. Forwards there (of a closure) begin no new step."""
        self._optimizers: list[torch.optim.Optimizer] = []

    def install(self) -> None:
        super().install()
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)
        # A data loader's worker does no step, whatever modules it calls.
        os.register_at_fork(after_in_child=lambda: setattr(self, "_inside", True))

    def called(self, module: torch.nn.Module) -> bool:
        if self._stepped and not self._in_optimizer:
            self._next()
        self._see_module(module)
        return True

    def before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """(torch's hook) Records the optimizer, and its gradients unless a closure computes them."""
        again = self._stepped and any(known is optimizer for known in self._optimizers)
        if self._step < 0 or (again and not self._in_optimizer):
            self._next()
        self._see_optimizer(optimizer)
        # A closure computes the gradients itself; those present are the last step's.
        if not any(callable(value) for value in (*args[1:], *kwargs.values())):
            self._see_gradients([optimizer])
        if self._die_in == self._step and not self._stepped:
            os.kill(os.getpid(), signal.SIGKILL)
        self._in_optimizer += 1

    def after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """(torch's hook) Records gradients that were computed inside the optimizer's step."""
        self._in_optimizer -= 1
        self._see_gradients([optimizer])
        self._stepped = True

    def _next(self) -> None:
        """Writes the previous step's record and begins the next step."""
        if self._step >= 0:
            self._write()
        self._modules, self._optimizers, self._names, self._stepped = {}, [], {}, False
        self._begin(self._step + 1)
        self._see_generators()

    def end(self) -> None:
        if self._step < 0 or not self._stepped:
            return
        modules, optimizers = self._modules.values(), self._optimizers
        self._next()
        for module in modules:
            self._see_module(module)
        for optimizer in optimizers:
            self._see_optimizer(optimizer)
        self._write(last=True)

    def _see_module(self, module: torch.nn.Module) -> None:
        if id(module) in self._modules:
            return
        word = type(module).__name__
        alike = sum(type(known).__name__ == word for known in self._modules.values())
        name = f"{word}{alike + 1}" if alike else word
        self._modules[id(module)] = module
        for part, parameter in module.named_parameters():
            self._names.setdefault(parameter, f"{name}.{part}")
        buffers = dict(module.named_buffers())
        saved = module.state_dict(keep_vars=True) if buffers else {}
        parts = {
            f"{PARAMETER}{name}": dict(module.named_parameters()),
            f"buffer {name}": {part: b for part, b in buffers.items() if part in saved},
            f"buffer with persistent=False {name}": {p: b for p, b in buffers.items() if p not in saved},
        }
        self._watch.state(fsdp.localized(parts)[0])
        self._watch.also(None, module, name)

    def _see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if any(known is optimizer for known in self._optimizers):
            return
        name = f"optimizer {len(self._optimizers)}"
        self._optimizers.append(optimizer)
        groups = dict(enumerate(optimizer.param_groups))
        every = {p: f"{n}.{place}" for n in groups for place, p in enumerate(groups[n]["params"])}
        own = {p: place for p, place in every.items() if p not in self._names}  # in no module
        self._names |= {p: f"{name}.{place}" for p, place in own.items()}
        # Keyed by parameter name, so that the order in which the optimizer got them does not matter.
        states = {name: dict(optimizer.state[p]) for p, name in self._names.items() if p in optimizer.state}
        parts = {
            f"{PARAMETER}{name}": {place: p for p, place in own.items()},
            f"{name}.param_groups": {
                n: {key: value for key, value in group.items() if key != "params"}
                for n, group in groups.items()
            },
            f"{name}.state": states,
        }
        self._watch.state(fsdp.localized(_tellable(parts))[0])


def _tellable(value: Any) -> Any:
    """Replaces values that cannot be split into tensors by their type's name."""
    if isinstance(value, Mapping):
        return {key: _tellable(item) for key, item in value.items()}
    try:
        split(value)
    except UsageError:
        return type(value).__name__
    return value


def _ignored(*_: Any) -> None:
    """Ignores its arguments: the runs are compared later, when both are over."""


def install(*, session: bool) -> None:
    """Starts recording in this process, if the environment names a directory for it."""
    if directory := os.environ.get(ENV_RECORDS):
        rank, _, step = os.environ.get(ENV_DIE_IN, "").partition(":")
        die_in = int(step) if step and rank == os.environ.get("RANK", "0") else None
        made = OfSession(Path(directory)) if session else OfScript(Path(directory), die_in)
        made.install()
