"""Everything that a step changes: what must go back if the step is dropped, and what a checkpoint holds."""

import copy
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from swift.checkpoint.state import split
from swift.errors import ServiceError, UsageError
from swift.runtime import _torch
from swift.runtime.tensors import digest


@dataclass
class _BeforeStep:
    """What is put back when a half-done step is dropped. Parameters are not here: until the optimizer steps
    they have not changed, and after it the step is not dropped."""

    objects: dict[str, Any]
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)


class TrainerState:
    """The stages, optimizers and registered objects of one rank."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.stages: list[Any] = []
        self.schedules: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.objects: dict[str, Any] = {}
        self.version = 0  # optimizer steps done = the next step to run
        self.update_begun = False  # an optimizer has stepped in the step that is under way
        self._before: _BeforeStep | None = None

    # --- registration ---

    def add_optimizer(self, optimizer: torch.optim.Optimizer, on_step: Any) -> None:
        def begun(*_: Any) -> None:
            on_step()
            self.update_begun = True

        optimizer.register_step_pre_hook(begun)
        self.optimizers.append(optimizer)

    def add_object(self, name: str, value: Any) -> None:
        if name in self.objects:
            raise UsageError(f"register({name}=...) was called twice; use another name")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(
                    f"register({name}=...) was given a {type(value).__name__} without {method}(); "
                    "a recovery must be able to take it back, so give it state_dict and load_state_dict"
                )
        self.objects[name] = value

    def check_complete(self) -> None:
        """Raises UsageError, in one line, for a trainer that forgot something a recovery needs."""
        if not self.stages:
            raise UsageError(
                "no pipeline stage: make it with session.pipeline_stage(...) or session.adopt(stage)"
            )
        if not self.optimizers:
            raise UsageError("no optimizer: write optimizer = session.optimizer(torch.optim....)")
        if not self.schedules:
            raise UsageError(
                "the schedule is not registered: call session.register(schedule=schedule, scheduler=..., loader=...) "
                "before session.run"
            )
        known = {id(p) for stage in self.stages for p in stage.submod.parameters() if p.requires_grad}
        held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        if held - known:
            raise UsageError(
                "the optimizer updates parameters that are in no stage; put them into a stage's module"
            )
        if known - held:
            raise UsageError(
                "some parameters of the stages have no optimizer; pass them to session.optimizer or freeze them"
            )

    # --- one step ---

    def begin_step(self) -> None:
        self.update_begun = False
        for stage in self.stages:
            stage.begin_step()
        self._before = _BeforeStep(
            objects={name: copy.deepcopy(value.state_dict()) for name, value in self.objects.items()},
            buffers=[(b, b.detach().clone()) for stage in self.stages for b in stage.submod.buffers()],
        )

    def end_step(self) -> None:
        self._before = None
        self.update_begun = False
        self.version += 1

    @property
    def intact(self) -> bool:
        """False between an optimizer's step and the end of the trainer's step: an update that may be partial."""
        return not self.update_begun

    def drop_step(self) -> None:
        """Takes the half-done step back. The parameters are still those of `version`."""
        for schedule in self.schedules:
            _torch.clear_schedule(schedule)
        for stage in self.stages:
            for parameter in stage.submod.parameters():
                parameter.grad = None
        before, self._before = self._before, None
        if before is None:
            return
        for name, state in before.objects.items():
            self.objects[name].load_state_dict(state)
        with torch.no_grad():
            for buffer, value in before.buffers:
                buffer.copy_(value)

    # --- checkpoints and digests ---

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "stages": {str(stage.stage_index): stage.submod.state_dict() for stage in self.stages},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "objects": {name: value.state_dict() for name, value in self.objects.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ServiceError if the checkpoint was made by another trainer."""
        stages = {str(stage.stage_index): stage for stage in self.stages}
        if set(stages) != set(state["stages"]) or len(self.optimizers) != len(state["optimizers"]):
            raise ServiceError("the checkpoint holds other stages or optimizers than this trainer made")
        if set(self.objects) != set(state["objects"]):
            raise ServiceError(
                f"the checkpoint holds {sorted(state['objects'])}, this trainer registered {sorted(self.objects)}"
            )
        for name, stage in stages.items():
            stage.submod.load_state_dict(state["stages"][name])
        for optimizer, value in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(value)
        for name, value in state["objects"].items():
            self.objects[name].load_state_dict(value)
        self._before = None
        self.update_begun = False
        self.version = int(state["version"])

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part of the state; equal on two runs only if every bit is."""
        state = self.state_dict()
        parts = {"parameters": state["stages"], "optimizer": state["optimizers"], **state["objects"]}
        if "loader" in parts:
            parts["data"] = parts.pop("loader")
        out = {"rng": digest({}, f"{self._seed}|{self.version}")}
        for name, value in parts.items():
            tensors, rest = split(value)
            out[name] = digest(tensors, json.dumps(rest))
        return out
