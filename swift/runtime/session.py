"""The session: what a trainer sees of swift.

(every rank) ``Session.from_env()`` joins the job and builds its process group → the trainer makes stages,
schedule, optimizer with it → ``run(train_step, num_steps)``. Launched by ``swift-ft run``.
"""

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from swift import events
from swift.checkpoint.store import CheckpointStore
from swift.errors import UsageError
from swift.runtime import _torch
from swift.runtime.channel import Channel
from swift.runtime.communicator import Communicator
from swift.runtime.config import SessionConfig
from swift.runtime.engine import Engine, TrainStep
from swift.runtime.faults import FaultInjector
from swift.runtime.fingerprint import determinism_fingerprint
from swift.runtime.member import Member
from swift.runtime.stage import LoggedPipelineStage, adopt, logged_loss
from swift.runtime.state import TrainerState

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class Session:
    """One rank's part in a job that survives the loss of ranks."""

    def __init__(
        self, *, rank: int, world_size: int, member: Member, checkpoint_dir: str, config: SessionConfig
    ):
        self.rank = rank
        self.world_size = world_size
        self._config = config
        self._member = member
        self._faults = FaultInjector(rank)
        self._state = TrainerState(config.seed)
        store = CheckpointStore(checkpoint_dir, rank)
        self._communicator = Communicator(rank, world_size, service_ports=self._service_ports)
        self._channel = Channel(
            rank, config.seed, torch.device("cpu"), self._faults, self._communicator.store, member.check
        )
        self._engine = Engine(
            rank, config, member, self._communicator, self._channel, self._state, store, self._faults
        )
        member.join(world_size, config.agreed(), determinism_fingerprint(), self._engine.interrupt)
        self._engine.form()

    @classmethod
    def from_env(
        cls, *, seed: int = 0, checkpoint_every: int = 100, codec: str = "none", **settings: Any
    ) -> "Session":
        """The session of the rank that ``swift-ft run`` made of this process.

        `seed`: root of all randomness inside the stages. `checkpoint_every`: steps between checkpoints.
        `codec`: "none" or "lz4". Other settings: see `SessionConfig`. Blocks until all ranks have joined.
        Raises UsageError (not launched, bad setting), JoinRefused (another rank differs).
        """
        config = SessionConfig(seed=seed, checkpoint_every=checkpoint_every, codec=codec, **settings)
        try:
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            coordinator, job = os.environ["SWIFT_COORDINATOR"], os.environ["SWIFT_JOB"]
            incarnation, checkpoints = os.environ["SWIFT_INCARNATION"], os.environ["SWIFT_CHECKPOINT_DIR"]
        except KeyError as error:
            raise UsageError(f"{error.args[0]} is not set; start the trainer with `swift-ft run`") from None
        events.configure(f"rank{rank}")
        checkpoints = os.path.join(checkpoints, job)  # two jobs may share a directory
        member = Member(coordinator, job, rank, incarnation)
        return cls(rank=rank, world_size=world_size, member=member, checkpoint_dir=checkpoints, config=config)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the job. Records that are not acked yet are given up: after an error nobody will replay them,
        and after `run` there are none."""
        self._engine.close()

    # --- what the trainer makes ---

    def pipeline_stage(
        self,
        module: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> LoggedPipelineStage:
        """A `torch.distributed.pipelining.PipelineStage` whose boundaries are logged; `options` are torch's."""
        device = torch.device(device)
        if device.type != "cpu":
            raise UsageError(f"device {device}: this version recovers CPU (gloo) pipelines only")
        stage = LoggedPipelineStage(module, stage_index, num_stages, device, **options)
        stage._attach(self._channel)
        self._state.stages.append(stage)
        return stage

    def adopt(self, stage: Any) -> Any:
        """Makes a stage that exists already (built by `pipeline().build_stage`, say) a logged one."""
        self._state.stages.append(adopt(stage, self._channel))
        return stage

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Tells the session of an optimizer; returns the same object. It must hold parameters of stages only."""

        def begins() -> None:
            if not self._channel.replaying:
                self._faults.at("optimizer", self.step)

        self._state.add_optimizer(optimizer, begins)
        return optimizer

    def register(self, *, schedule: Any = None, **objects: Any) -> None:
        """What a recovery must know besides: the pipeline schedule, and everything with a state of its own
        that a step changes (LR scheduler, data loader, gradient scaler), under any name.

        The objects' state_dict is copied at every step, so keep it small. `loader` counts as data position.
        Raises UsageError for an object without state_dict and load_state_dict.
        """
        if schedule is not None:
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
            _torch.wrap_loss(schedule, logged_loss(stages, self._channel))
            self._state.schedules.append(schedule)
        for name, value in objects.items():
            self._state.add_object(name, value)

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Calls ``train_step(step)`` for every step below `num_steps` that is still to do.

        `train_step` does one whole optimizer step. When a rank is lost it is cut short by an exception of
        torch's, and called again with the step where the job goes on; a replacement calls it for the steps
        that it replays as well (`replaying` is True then). Returns when all ranks have done all steps.
        """
        if num_steps < 0:
            raise UsageError(f"num_steps={num_steps}; give 0 or more")
        self._state.check_complete()
        self._engine.run(train_step, num_steps)

    # --- inside a step ---

    @property
    def step(self) -> int:
        """The step that is under way, which is also the number of updates done."""
        return self._state.version

    @property
    def replaying(self) -> bool:
        """True while a step is replayed from the log: its metrics were reported before."""
        return self._channel.replaying

    def all_reduce(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The sum of `tensor` over all ranks, as a new tensor; its result is logged.

        Every collective whose result a step depends on must go through the session, because a replay has
        nobody to communicate with (tied embeddings: the sum of their gradients). Summed in rank order, so the
        bits do not depend on the algorithm of a backend. `name` is for messages. Not after optimizer.step().
        """
        self._before_update(name)
        return self._channel.collective(name, lambda: self._sum_in_rank_order(tensor))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.nn.Parameter] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` over the parameters of all ranks; returns the global norm.

        Each rank gives its own parameters. The global norm is a crossing collective: its result is logged.
        """
        self._before_update("clip_grad_norm_")
        own = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        infinite = norm_type == float("inf")

        def total() -> torch.Tensor:
            local = torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None], norm_type)
            if infinite:
                return torch.stack(self._gather(local.float())).max()
            return self._sum_in_rank_order(local.float() ** norm_type) ** (1.0 / norm_type)

        norm = self._channel.collective("clip_grad_norm_", total)
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
        return norm

    # --- inside ---

    def _before_update(self, name: str) -> None:
        if self._state.update_begun:
            raise UsageError(
                f"collective {name!r} comes after optimizer.step(); move it before: a rank that is cut short "
                "in it would have to be rebuilt"
            )

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous())
        return parts

    def _sum_in_rank_order(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._gather(tensor.detach())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def _service_ports(self) -> list[int]:
        addresses = [self._member.client.address, *self._engine.log_servers]
        return [int(address.rpartition(":")[2]) for address in addresses]
