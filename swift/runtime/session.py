"""The session: what a trainer sees of swift.

(every rank) ``Session.from_env()`` joins the job and builds its process group → the trainer makes stages,
schedule, optimizer with it → ``run(train_step, num_steps)``. Launched by ``swift-ft run``.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from swift import events, reinitializing, warm_up
from swift.errors import UsageError
from swift.names import ENV_ALLOW_INEXACT, LAUNCHER_SETTINGS, flag_of
from swift.recovery import Assignment
from swift.runtime import _torch, sharded
from swift.runtime.config import SessionConfig
from swift.runtime.fingerprint import determinism_fingerprint
from swift.runtime.gradients import accumulating
from swift.runtime.launched import from_environment
from swift.runtime.member import Member
from swift.runtime.origin_loaders import OriginLoader
from swift.runtime.stage import LoggedPipelineStage
from swift.runtime.step_runner import TrainStep
from swift.runtime.wiring import Parts

ENV_MEASURE_UNDO = "SWIFT_UNDO_MEASURE"
ENV_PARANOID = "SWIFT_PARANOID"
ENV_METRICS_LISTEN = "SWIFT_METRICS_LISTEN"
ENV_LOCAL_PLACE = "SWIFT_LOCAL_PLACE"
"""LOCAL_RANK names the device, which two ranks of a machine may share."""

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


class Session:
    """One rank's part in a job that survives the loss of ranks."""

    def __init__(
        self, *, rank: int, assignment: Assignment, member: Member, checkpoint_dir: str, config: SessionConfig
    ):
        self.rank = rank
        """This process's number among all ranks, from 0. A process that replaces a lost rank has the same number."""
        self.world_size = len(assignment.slots)
        """The number of ranks in the job."""
        parts = Parts.wired(rank, assignment, member, checkpoint_dir, config)
        self.groups = parts.groups
        """Process groups that survive failures: ``world`` (all ranks), ``pipeline`` (this rank's pipeline), ``data``
        (the data-parallel ranks of this stage), and with shards ``replicate`` and ``shard``."""
        self._config = config
        self._member = member
        self._assignment, self._slot = assignment, assignment.slots[rank]  # of the full world
        self._gate = parts.gate
        self._channel, self._updates = parts.channel, parts.updates
        self._state = parts.state
        self._origin_loaders = parts.adoption.loaders
        self._crossing = parts.crossing
        self._model_parts = parts.model_parts
        self._losses = parts.losses
        self._lines = parts.lines
        self._engine = parts.engine
        self._end_metrics = self._show_metrics(member.client.job)
        self._closed = False
        self._warming = parts.warming if warm_up.is_warming_up() else None
        if self._warming is not None:
            reinitializing.begin_session(self)
            self._warming.stand_in()
            return
        if warm_up.was_warmed_up():
            self._engine.begin_again()
        if config.strategy == "reinit":
            reinitializing.begin_session(self)
            if member.joined:
                self._engine.begin_again()
        fingerprint = determinism_fingerprint(config.undo)
        with warm_up.waiting():
            member.join(self.world_size, config.agreed(), fingerprint, self._engine)
            self._engine.membership.form()

    @classmethod
    def from_env(
        cls, *, seed: int = 0, checkpoint_every: int = 100, codec: str = "none", **settings: Any
    ) -> "Session":
        """Makes the session of this process, which ``swift-ft run`` has started as a rank. Blocks until all ranks have
        joined.

        `seed`: the root of all randomness in steps. `checkpoint_every`: optimizer steps between checkpoints. `codec`:
        "none", "lz4", "bitshuffle" or "auto". `settings`: see `SessionConfig`.
        Raises UsageError (not started by ``swift-ft run``, or a wrong setting) and JoinRefused (another rank has other
        settings, another machine or another world size).
        """
        settings.setdefault("paranoid", bool(os.environ.get(ENV_PARANOID)))
        settings.setdefault("measure_undo", bool(os.environ.get(ENV_MEASURE_UNDO)))
        settings |= _launchers(settings)
        config = SessionConfig(seed=seed, checkpoint_every=checkpoint_every, codec=codec, **settings)
        here = from_environment(config)
        place, config = here.place, here.config
        alone = not (reinitializing.is_called_again() or warm_up.is_warming_up())
        if config.strategy == "reinit" and alone:
            raise UsageError(
                "strategy='reinit': nobody calls the training function again: start the script with `swift-ft run`, or "
                "decorate the function with swift.reinit"
            )
        member = reinitializing.handed_on() or Member(
            place.coordinator, place.job, place.rank, place.incarnation
        )
        events.configure(f"rank{place.rank}")
        return cls(
            rank=place.rank,
            assignment=here.assignment,
            member=member,
            checkpoint_dir=here.checkpoint_dir,
            config=config,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the job. Records that the log has not acknowledged are dropped: after an error no rank will replay
        them, and after `run` there are none."""
        if not self._closed:
            self._closed = True
            self._end_metrics()
            self._engine.close()
            # The next session of this process is made where this one's parts are gone.
            if self._config.strategy == "reinit" or self._warming is not None:
                _torch.let_go()

    # --- where this rank stands ---

    @property
    def replicas(self) -> int:
        """D: the number of ranks that hold the same state."""
        return self._assignment.replicas

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data-parallel ranks of its stage. Each trains on batches of its own. While the
        batch of a lost rank is computed here (`lost_shard`), it is that one's number."""
        return self._channel.origin

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks of a stage: replicas * shards."""
        return self._assignment.dp_size

    @property
    def pipeline_rank(self) -> int:
        """This rank's position in its pipeline, from 0."""
        return self._slot.stage_group

    @property
    def pipeline_ranks(self) -> int:
        """The number of ranks in a pipeline."""
        return self._assignment.stage_groups

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh for ``fully_shard(module, mesh=session.mesh)``. Its dimensions are ("replicate", "shard"), or
        ("shard",) with one replica.

        It stays valid through failures. Shard a module before `pipeline_stage`, and make its optimizer after that.
        """
        return sharded.device_mesh(self._assignment, self.groups)

    # --- what the trainer makes ---

    def pipeline_stage(
        self,
        module: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> LoggedPipelineStage:
        """Makes a `torch.distributed.pipelining.PipelineStage` whose boundaries are logged. `options` are torch's.

        The stage's group is this rank's pipeline. With replicas, the session averages the gradients of `module` over
        them before the optimizer's step, unless `module` averages them itself (`session.ddp`, FSDP2 on
        `session.mesh`). Raises UsageError: the device is not the backend's, or the stage does not fit the groups.
        """
        return self._model_parts.pipeline_stage(
            module, stage_index, num_stages, torch.device(device), options
        )

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Registers a whole model that is trained without a pipeline, and returns the same module. There may be several
        (a GAN's).

        The session averages the gradients of `module` over the replicas before the optimizer's step; with
        updates='wait_free', while backward goes on. It does not if `module` averages them itself (`session.ddp`, FSDP2
        on `session.mesh`). No schedule is needed.
        """
        return self._model_parts.module(module)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulates gradients: backward passes inside of this context only add to the gradients of `session.module`.
        Run the last backward pass of a step outside of it."""
        with accumulating(self._model_parts.whole_modules()):
            yield

    def ddp(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Wraps `module` as a DistributedDataParallel over the replicas, for `pipeline_stage`. `options` are torch's.

        It differs from a DistributedDataParallel that a trainer makes itself in two ways. Its group is rebuilt under it
        after a failure. And its buckets are never rearranged after the first step, because a replacement would
        rearrange them in another step.
        """
        return self._model_parts.ddp(module, options)

    def adopt(self, stage: Any) -> Any:
        """Turns an existing stage (for example one that `pipeline().build_stage` has built) into a logged one, and
        returns it."""
        return self._model_parts.adopt(stage)

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Registers an optimizer with the session, and returns the same object. It must hold parameters of stages only.

        From then on its `step` is carried out bucket by bucket, with the same bits. Make it after the stages.
        """
        self._state.add_optimizer(optimizer)
        return optimizer

    def tie(self, parameter: torch.nn.Parameter, ranks: Sequence[int]) -> None:
        """Ties this weight to the weights that the other `ranks` pass in the same call (an embedding and the head).

        `ranks`: the pipeline ranks whose stages have the weight, this one among them. All begin with the first rank's
        value. Their gradients are summed, in rank order, before the norm is taken or an optimizer steps. With equal
        optimizers they stay equal. Call it on each of these ranks, in the same order, before `run`. The gradients need
        no `all_reduce`, and `clip_grad_norm_` counts the weight once.
        """
        self._updates.tie(parameter, ranks)

    def help_replay(self, make_module: Callable[[int], torch.nn.Module]) -> None:
        """Lets this rank help when another rank's stage is replayed, instead of waiting for it.

        ``make_module(stage_index)`` returns a new module of that stage on the CPU, as that stage's rank makes it for
        `pipeline_stage`. Its weights are overwritten. The module must share nothing with this rank's own stages or with
        earlier modules of this function, and must keep no state outside of parameters and buffers. Replays are shared
        in pipelines without replicas, under torch's schedules except ScheduleLoopedBFS, by at most
        `SessionConfig.helpers` ranks.
        """
        self._engine.help_replay(make_module)

    def register(self, *, schedule: Any = None, **objects: Any) -> None:
        """Registers the other objects that a recovery must restore: the pipeline schedule, and everything with a state
        of its own that a step changes (LR scheduler, data loader, gradient scaler), under any name.

        The objects' state_dict is copied at every step, so keep it small. `loader` counts as data position. Generators
        (of torch, `random`, numpy), lists, dicts and deques may be passed as they are. Raises UsageError for any other
        object without state_dict and load_state_dict.
        """
        if schedule is not None:
            self._model_parts.add_schedule(schedule)
        for name, value in objects.items():
            self._state.add_object(name, value)

    def loader(self, make: Callable[[int], Any], name: str = "loader") -> OriginLoader:
        """Registers a data loader that can give other data-parallel ranks' batches as well, and returns it.

        ``make(dp_rank)`` returns the loader of that data-parallel rank, with state_dict and load_state_dict. Its state
        must be the same on all data-parallel ranks at the same step (a position). What is returned is used as that
        loader is: attributes, iteration and `next` are those of the rank whose batch is computed. Needed only where
        others compute a lost rank's batches (`lost_shard` "redistribute" and "reroute", and strategy "adaptive"). With
        `SessionConfig.fetch_batches` it is called for this rank's own data-parallel rank alone.
        """
        loader = OriginLoader(
            make, self._slot.dp_rank, lambda: self._channel.origin, fetches=self._config.fetch_batches
        )
        self._state.add_object(name, loader)
        self._origin_loaders.add(loader, name)
        return loader

    def transient(self, *names: str) -> None:
        """Names attributes of modules, and variables of the script, that need not survive a failure.

        By default, an attribute of a module that a step changes (the last loss, an attention map) is a part of the
        rank's state. And by default, a job is reported as not exact after a failure if a step changes a variable of the
        script (``count``, or ``trainer.count``) that is not registered.
        """
        self._state.beside.transient.update(names)

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Calls ``train_step(step)`` for every step below `num_steps` that is still to do. Returns when all ranks have
        done all steps.

        `train_step` does one whole optimizer step. When a rank is lost, an exception of torch's cuts it short, and it
        is called again with the step where the job goes on. A replacement also calls it for the steps that it replays;
        `replaying` is True then.

        Variables of the script that `train_step` changes and that are not registered are named on standard error.
        Raises UsageError if the job has run before, or its trainer cannot be recovered.
        """
        if num_steps < 0:
            raise UsageError(f"num_steps={num_steps}; give 0 or more")
        if self._config.strategy == "reinit" and not reinitializing.is_open(self):
            raise UsageError(
                "the training function was called again, and the session is the one of before: with strategy='reinit' "
                "make the session in that function"
            )
        if self._gate.over:
            raise UsageError(
                "session.run was called before, and with it the job has finished: call it once, with all steps, and do "
                "what is due every so many steps (a validation, say) inside of train_step"
            )
        self._state.check_complete()
        self._state.remember()
        if self._warming is not None:
            self._warming.run(self._gate.around(train_step))
        events.emit("run_begin", rank=self.rank, script_seconds=warm_up.script_seconds())
        self._engine.run(self._gate.around(train_step), num_steps)
        self._gate.over = True

    # --- inside a step ---

    @property
    def step(self) -> int:
        """The number of the step under way. It equals the number of updates done."""
        return self._state.version

    @property
    def replaying(self) -> bool:
        """True while a step is replayed from the log. The lost rank had begun that step before, and may or may not have
        reported its metrics (`log` reports them exactly once). Also True in the first computation of a step that
        `paranoid` computes twice."""
        return self._channel.replaying or self._channel.rehearsing

    def log(self, **values: object) -> None:
        """Writes one line of JSON for this step to `metrics/rank<R>.jsonl` in the job's checkpoint directory. Each
        step's line is written exactly once and in order, whatever fails. Several calls in a step make one line.

        `values`: numbers, strings, and tensors of one number. Raises UsageError for others. Call it before
        `optimizer.step()`. Values that are passed after the update may be lost: if the rank dies right there, it is
        restored from a replica that has done the update, and does not run that code again.
        """
        self._lines.add(values)

    def stop(self, reason: str = "") -> None:
        """(inside a step) Ends the job early: all ranks do this step to its end, and then `run` returns.

        Any rank may call it: only the last one of a pipeline, which has the loss, or all. Replicas of a stage must
        decide alike, so sum over them what the decision depends on (`dist.all_reduce`). The job is then FINISHED. If
        it is started again with the same number of steps, it has nothing to do; with more, it goes on. `reason` is for
        people.
        """
        self._gate.check_in_step("session.stop")
        self._engine.ending.call(" ".join(reason.split()))

    def all_reduce(self, tensor: torch.Tensor, name: str, ranks: Sequence[int] | None = None) -> torch.Tensor:
        """Returns the sum of `tensor` over the ranks of this rank's pipeline, as a new tensor of the same shape, and
        logs it.

        A replay has no peers, so it reads the result from the log. The same holds for torch's own functions that give
        all ranks the same result (`dist.all_reduce` and the like); others are refused. The sum is taken in rank order,
        so its bits do not depend on a backend's algorithm. `name` appears in messages. `ranks`: the pipeline ranks that
        take part, this one among them; by default all.
        """
        return self._crossing.all_reduce(tensor, name, ranks)

    def check_loss(self, loss: torch.Tensor) -> None:
        """(inside a step) Checks a loss that the session does not see: that of a whole module, if it is computed
        outside of the module's forward.

        If it is not finite, `SessionConfig.non_finite_loss` decides what happens.
        """
        self._losses.look(self.step, "the loss", loss)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Averages this optimizer's gradients over the replicas now, unless that was done since its last step.

        `clip_grad_norm_` and `optimizer.step()` do this themselves. Call it before anything else that reads gradients
        (a gradient scaler's `unscale_`). With several optimizers, pass the one that is about to step.
        """
        self._crossing.reduce_gradients(optimizer)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Does `scaler.unscale_(optimizer)`, and lets all stages know if one of them has found inf or nan.

        Then `scaler.step(optimizer)` skips the update on all ranks or on none, and `scaler.update()` changes the scale
        alike. Gradients are averaged over replicas first. What was found is a collective over all stages, and is
        logged. `scaler` is a `torch.amp.GradScaler` that was registered; each rank passes its own.
        """
        self._crossing.unscale_(scaler, optimizer)

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.nn.Parameter] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        uncounted: Iterable[torch.nn.Parameter] = (),
    ) -> torch.Tensor:
        """Does `torch.nn.utils.clip_grad_norm_` over the parameters of all stages, and returns the global norm.

        Each rank passes its own parameters. With replicas, gradients are averaged over them first. The global norm is
        a collective over all stages, and is logged. A weight that was passed to `tie` counts once. If ranks share a
        weight in another way, all but one of them pass it in `uncounted`: there it is clipped, but left out of the
        norm.
        """
        return self._crossing.clip_grad_norm_(parameters, max_norm, norm_type, uncounted)

    # --- inside ---

    def _show_metrics(self, job: str) -> Callable[[], None]:
        listen = self._config.metrics_listen or os.environ.get(ENV_METRICS_LISTEN, "")
        if not listen or warm_up.is_warming_up():
            return lambda: None
        from swift.runtime import metrics

        local_rank = int(os.environ.get(ENV_LOCAL_PLACE) or os.environ.get("LOCAL_RANK", "0"))
        progress = self._engine.progress
        return metrics.start(listen, job, self.rank, local_rank, lambda: metrics.Progress.of(progress()))


_USUAL = SessionConfig()


def _launchers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `swift-ft run` was told of a session's settings. Raises UsageError: the script says something else."""
    told: dict[str, Any] = {}
    for name, variable in LAUNCHER_SETTINGS.items():
        word = os.environ.get(variable)
        if not word:
            continue
        kind = type(getattr(_USUAL, name))
        try:
            value = {"on": True, "off": False}[word] if kind is bool else kind(word)
        except (KeyError, ValueError):
            wanted = "on or off" if kind is bool else "a number"
            raise UsageError(
                f"{variable}={word}: give {wanted} ({flag_of(name)} of swift-ft run sets it)"
            ) from None
        if settings.get(name, value) != value:
            raise UsageError(
                f"swift-ft run was given {flag_of(name)} {word}, and the script says {name}={settings[name]!r}: leave "
                "one out"
            )
        told[name] = value
    if os.environ.get(ENV_ALLOW_INEXACT):
        told["allow_inexact"] = True
    return told
