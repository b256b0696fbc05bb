"""The trainer's stages, whole modules and schedules, as a session takes them in.

Each is refused here if a recovery could not give it its state back; else it is told to the parts that must know of it:
the channel logs its boundaries, the updates average its gradients, the state keeps what it holds.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from swift.errors import UsageError
from swift.recovery import Assignment
from swift.runtime import _torch, _torch_calls, sharded
from swift.runtime.adoption import Adoption
from swift.runtime.backends.base import Backend
from swift.runtime.channel import Channel
from swift.runtime.gate import Gate
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.shape_inference import inferred_whole
from swift.runtime.stage import LoggedPipelineStage, adopt, logged_loss
from swift.runtime.state import TrainerState
from swift.runtime.updates import Updates
from swift.runtime.whole_module import WholeModule
from swift.runtime.witness import watch_forwards


class ModelParts:
    """Of one rank; the calls are those of `Session`, which say what they do."""

    def __init__(
        self,
        rank: int,
        assignment: Assignment,
        backend: Backend,
        gate: Gate,
        groups: Mapping[str, ReconfigurableGroup],
        channel: Channel,
        updates: Updates,
        state: TrainerState,
        adoption: Adoption,
    ) -> None:
        self._rank = rank
        self._assignment = assignment
        self._backend = backend
        self._gate = gate
        self._groups = groups
        self._channel = channel
        self._updates = updates
        self._state = state
        self._adoption = adoption

    def pipeline_stage(
        self,
        module: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        options: dict[str, Any],
    ) -> LoggedPipelineStage:
        """`options`: torch's. Raises UsageError."""
        self._check_device(device)
        options.setdefault("group", self._groups["pipeline"])
        stage = LoggedPipelineStage(module, stage_index, num_stages, device, **options)
        stage._attach(self._channel, self._updates)
        self._add(stage)
        return stage

    def adopt(self, stage: Any) -> Any:
        """Raises UsageError."""
        self._check_device(torch.device(getattr(stage, "device", self._backend.device)))
        if stage.group is None and self._assignment.dp_size == 1:
            stage.group = self._groups["pipeline"]
        if stage.group is not self._groups["pipeline"]:
            raise UsageError(
                "the stage communicates over a group that is not rebuilt after a failure; "
                'build it with group=session.groups["pipeline"]'
            )
        self._add(adopt(stage, self._channel, self._updates))
        return stage

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Raises UsageError."""
        ranks = self._assignment.stage_groups
        if ranks > 1:
            raise UsageError(
                f"session.module with {ranks} pipeline ranks; give replicas={len(self._assignment.slots)}, or use "
                "session.pipeline_stage"
            )
        for parameter in module.parameters():
            if parameter.device.type != "meta":  # not materialised yet
                self._check_device(parameter.device)
        whole = WholeModule(module)
        self._add(whole)
        watch_forwards(module, self._channel)
        whole.seeded_by(self._channel.randomness, len(self._state.stages))
        return module

    def whole_modules(self) -> list[WholeModule]:
        return [stage for stage in self._state.stages if isinstance(stage, WholeModule)]

    def ddp(self, module: torch.nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
        """`options`: torch's. Raises UsageError."""
        if self._assignment.replicas == 1:
            raise UsageError("session.ddp needs replicas: Session.from_env(replicas=...), or leave DDP out")
        wrapped = DistributedDataParallel(
            module,
            process_group=self._groups["data"],
            **{"init_sync": False, "find_unused_parameters": True, **options},
        )
        _torch.keep_reference(wrapped)
        return wrapped

    def add_schedule(self, schedule: Any) -> None:
        """Raises UsageError."""
        if not isinstance(schedule, _torch.Schedule):
            raise UsageError(
                f"register(schedule=...) was given a {type(schedule).__name__}; give a schedule of "
                "torch.distributed.pipelining"
            )
        stages = _torch.schedule_stages(schedule)
        if not all(stage in self._state.stages for stage in stages):
            raise UsageError(
                "the schedule runs a stage that is not logged; use session.pipeline_stage or adopt"
            )
        for stage in stages:
            if isinstance(stage.submod, DistributedDataParallel) and _torch.splits_backward(schedule):
                raise UsageError(
                    f"{type(schedule).__name__} computes weight gradients apart, where DistributedDataParallel "
                    "does not see them; give the stage a plain module, the session averages its gradients"
                )
        _torch.wrap_loss(schedule, logged_loss(stages, self._channel))
        if self._adoption.reroute is not None:
            _torch_calls.instead_of_calls(schedule, self._adoption.reroute)
        number = len(self._state.schedules)
        _torch.around_calls(schedule, lambda: self._around_call(number))
        self._state.schedules.append(schedule)

    @contextmanager
    def _around_call(self, number: int) -> Iterator[None]:
        """Of the schedule with this number."""
        self._gate.scheduled()
        self._channel.shapes.schedule = number
        schedule = self._state.schedules[number]
        for stage in _torch.schedule_stages(schedule):
            stage.grad_scale = _torch.schedule_grad_scale(schedule)
        self._updates.communicates()
        with inferred_whole(schedule), self._updates.spoiling(), self._gate.passing():
            yield
        self._channel.randomness.outside()

    def _add(self, stage: Any) -> None:
        self._state.add_stage(stage)
        mine = {self._rank: sorted({each.stage_index for each in self._state.stages})}
        if problem := self._channel.groups.problem(stage.num_stages, mine):
            raise UsageError(problem)
        stage.groups = list(self._groups.values())
        self._channel.fails_at_layers(stage.submod)
        self._updates.reduced_elsewhere(sharded.sharded_parameters(stage.submod, self._groups))
        if isinstance(stage.submod, DistributedDataParallel):
            if stage.submod.process_group is not self._groups["data"]:
                raise UsageError(
                    "DistributedDataParallel over a group that is not made again after a failure; use "
                    "session.ddp(module) in its place"
                )
            if self._updates.shrinks_by:
                raise UsageError(
                    f"strategy={self._updates.shrinks_by!r} with DistributedDataParallel, which divides by the "
                    "ranks of a full world: give the plain module to the session, which averages its gradients"
                )
            self._updates.reduced_elsewhere(stage.submod.parameters())
        elif self._updates.wait_free:
            self._updates.ready_in_backward(stage)

    def _check_device(self, device: torch.device) -> None:
        """Raises UsageError: the backend moves no tensors of another device."""
        if device.type != self._backend.device.type:
            here = f"{self._backend.device.type.upper()} ({self._backend.name})"
            raise UsageError(f"device {device}: this version recovers {here} pipelines only")
