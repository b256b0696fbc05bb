"""The session: the interface through which a trainer uses swift.

(every rank) ``Session.from_env()`` joins the job and builds its process group → the trainer makes stages,
schedule, optimizer with it → ``run(train_step, num_steps)``. Launched by ``swift-ft run``.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from swift_ft import events, reinitialization, torch_private, warm_up
from swift_ft.comm import default_backend
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import ProcessGroups
from swift_ft.comm.rank_store import stores_of
from swift_ft.errors import UsageError
from swift_ft.log.ring import Memory
from swift_ft.planner import Assignment
from swift_ft.planner.groups import RecoveryGroups
from swift_ft.planner.strategies import may_copy
from swift_ft.state import fsdp
from swift_ft.state.carried_gradients import WholeModule, accumulating
from swift_ft.state.checkpoint_place import place_at
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.loaders import OriginLoader
from swift_ft.text import ENV_ALLOW_INEXACT, ENV_SPARES, LAUNCHER_SETTINGS, flag_of
from swift_ft.train import rerouted_call, set_up, verification
from swift_ft.train.batch_redistribution import Adoption
from swift_ft.train.boundary_log import Channel
from swift_ft.train.checkpointing import Saving, UnloggedSteps
from swift_ft.train.collective_policy import Gate, groups_behind
from swift_ft.train.config import (
    SessionConfig,
    checkpoint_directory,
    determinism_fingerprint,
    device_problems,
    fitted,
    lines_directory,
    place_from_environment,
)
from swift_ft.train.coordinator_session import Member
from swift_ft.train.engine import Engine
from swift_ft.train.fault_points import FaultInjector
from swift_ft.train.log_session import OwnLog
from swift_ft.train.lossy import CutStep, World
from swift_ft.train.participants import Participant, Site, TrainStep
from swift_ft.train.pipeline_collectives import Crossing, Ties
from swift_ft.train.recording import Recording, Tape, ThoroughWatch
from swift_ft.train.reducer import Reducer, Shares, is_ordered
from swift_ft.train.rehearsal import Rehearsal, Shadow, Warming
from swift_ft.train.rerouting import Rerouting
from swift_ft.train.set_up import SetUp
from swift_ft.train.snapshots import Snapshots
from swift_ft.train.stage import LoggedPipelineStage, adopt, inferred_whole, logged_loss
from swift_ft.train.staggering import Staggering
from swift_ft.train.step import Ending, Lines
from swift_ft.train.step_digests import Witness, watch_forwards
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Losses, Updates
from swift_ft.train.verification import Audit

ENV_METRICS_LISTEN = "SWIFT_METRICS_LISTEN"
ENV_LOCAL_PLACE = "SWIFT_LOCAL_PLACE"
"""Local rank, for the metrics port. LOCAL_RANK does not serve: it names the device, which two ranks may share."""

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
        self.groups: dict[str, ReconfigurableGroup]
        """Process groups that survive failures: ``world`` (all ranks), ``pipeline`` (this rank's pipeline), ``data``
        (the data-parallel ranks of this stage), and with shards ``replicate`` and ``shard``."""
        self._config = config
        self._member = member
        self._assignment, self._slot = assignment, assignment.slots[rank]  # of the full world
        self._wire(rank, assignment, member, checkpoint_dir, config)
        self._end_metrics = self._show_metrics(member.client.job)
        self._closed, self._process = False, os.getpid()
        if self._shadow is not None:
            reinitialization.begin_session(self)
            self._shadow.stand_in()
            return
        if config.setting.calls_again:
            reinitialization.begin_session(self)
        fingerprint = determinism_fingerprint(config.undo)
        Memory.create(config.log_queue_bytes).close()  # refused here, before the rank joins
        checkpoints = place_at(checkpoint_dir)
        member.join(self.world_size, config.agreed(), fingerprint, self._engine, checkpoints=checkpoints)
        self._engine.membership.form()

    @classmethod
    def from_env(
        cls, *, seed: int = 0, checkpoint_every: int = 100, codec: str = "none", **settings: Any
    ) -> "Session":
        """Creates the session of this process, which ``swift-ft run`` has started as a rank. Blocks until all ranks
        have joined.

        `seed`: the root of all randomness in steps. `checkpoint_every`: optimizer steps between checkpoints. `codec`:
        "none", "lz4" or "bitshuffle". `settings`: see `SessionConfig`.
        Raises UsageError (not started by ``swift-ft run``, a wrong setting, or a machine without shared memory for the
        log's queue) and JoinRefused (another rank has different settings, another machine or another world size).
        """
        warm_up.begin_session()
        settings |= _launchers(settings)
        settings.setdefault("rehearse", "start" if os.environ.get(ENV_SPARES, "0") != "0" else "off")
        config = SessionConfig(seed=seed, checkpoint_every=checkpoint_every, codec=codec, **settings)
        place = place_from_environment()
        checkpoint_dir = checkpoint_directory(place.job)
        config, assignment = fitted(config, place.world_size)
        alone = not (reinitialization.is_called_again() or warm_up.is_warming_up())
        if config.setting.calls_again and alone:
            raise UsageError(
                "strategy='reinit': nobody calls the training function again: start the script with `swift-ft run`, or "
                "decorate the function with swift_ft.reinit"
            )
        member = reinitialization.handed_on() or Member(
            place.coordinator, place.job, place.rank, place.incarnation
        )
        events.configure(f"rank{place.rank}")
        return cls(
            rank=place.rank,
            assignment=assignment,
            member=member,
            checkpoint_dir=checkpoint_dir,
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
        them, and after `run` there are none. Has no effect in a forked child process."""
        if not self._closed and os.getpid() == self._process:
            self._closed = True
            self._end_metrics()
            self._engine.close()
            # this session's parts are gone before the process creates its next session
            if self._config.setting.calls_again or self._shadow is not None:
                torch_private.undo_patches()

    # --- where this rank stands ---

    @property
    def replicas(self) -> int:
        """D: the number of replicas, that is, of ranks that hold the same state."""
        return self._assignment.replicas

    @property
    def dp_rank(self) -> int:
        """This rank's number among the data-parallel ranks of its stage, which train on batches of their own. While
        this rank computes the batch of a lost rank (`lost_shard`), it is the lost rank's number."""
        return self._channel.origin // self._assignment.tensor

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks of a stage: replicas * shards."""
        return self._assignment.dp_size // self._assignment.tensor

    @property
    def tp_rank(self) -> int:
        """This rank's number among those that compute the same batch together (`tensor_parallel`)."""
        return self._slot.dp_rank % self._assignment.tensor

    @property
    def tp_size(self) -> int:
        """The number of ranks that compute the same batch together."""
        return self._assignment.tensor

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
        """The device mesh of this rank's stage, for ``fully_shard`` and ``parallelize_module``. Its dimensions are
        "replicate", "shard" and "tensor", without those of one rank: ``session.mesh["tensor"]`` is for layers that are
        split over ranks, and the others are for FSDP2.

        It stays valid through failures, as do meshes of your own (`init_device_mesh`) that are made after the session.
        Shard a module before `pipeline_stage`, and create its optimizer after that.
        """
        return fsdp.device_mesh(self._assignment, self.groups)

    # --- registration ---

    def pipeline_stage(
        self,
        module: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> LoggedPipelineStage:
        """Creates a `torch.distributed.pipelining.PipelineStage` whose boundaries are logged. `options` are torch's.

        The stage's group is this rank's pipeline. With replicas, the session averages the gradients of `module` over
        them before the optimizer's step, unless `module` averages them itself (`session.ddp`, FSDP2 on
        `session.mesh`). Raises UsageError if the stage does not fit the groups.
        """
        options.setdefault("group", self.groups["pipeline"])
        stage = LoggedPipelineStage(module, stage_index, num_stages, torch.device(device), **options)
        stage._attach(self._channel, self._updates)
        self._add(stage)
        return stage

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Registers a whole model that is trained without a pipeline, and returns the same module. There may be several
        (a GAN's).

        The session averages the gradients of `module` over the replicas before the optimizer's step; with
        updates='wait_free', while backward goes on. It does not if `module` averages them itself (`session.ddp`, FSDP2
        on `session.mesh`). No schedule is needed. Raises UsageError if there are several pipeline ranks.
        """
        ranks = self._assignment.stage_groups
        if ranks > 1:
            raise UsageError(
                f"session.module with {ranks} pipeline ranks; give replicas={len(self._assignment.slots)}, or use "
                "session.pipeline_stage"
            )
        whole = WholeModule(module)
        self._add(whole)
        channel = self._channel  # what a trainer may keep must not keep the session
        watch_forwards(module, lambda: channel.witness)
        whole.seeded_by(self._channel.randomness, len(self._state.stages))
        return module

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulates gradients: backward passes inside of this context only add to the gradients of `session.module`.
        Run the last backward pass of a step outside of it."""
        with accumulating([stage for stage in self._state.stages if isinstance(stage, WholeModule)]):
            yield

    def ddp(self, module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
        """Wraps `module` as a DistributedDataParallel over the replicas, for `pipeline_stage`. `options` are torch's.

        It differs from a DistributedDataParallel that a trainer creates itself in two ways. Its group is rebuilt after
        a failure. And its buckets are never rearranged after the first step, because a replacement would rearrange them
        in another step. Raises UsageError without replicas.
        """
        if self._assignment.replicas == 1:
            raise UsageError("session.ddp needs replicas: Session.from_env(replicas=...), or leave DDP out")
        wrapped = DistributedDataParallel(
            module,
            process_group=self.groups["data"],
            **{"init_sync": False, "find_unused_parameters": True, **options},
        )
        torch_private.keep_reference(wrapped)
        self._state.wrapped.append(wrapped)
        return wrapped

    def adopt(self, stage: Any) -> Any:
        """Turns an existing stage (for example one that `pipeline().build_stage` has built) into a logged one, and
        returns it. Raises UsageError for a wrong group, or a stage that is logged already."""
        pipeline = self.groups["pipeline"]
        same = getattr(stage.group, "ranks", None) == pipeline.ranks  # a group of the trainer's own
        if same or (stage.group is None and self._assignment.dp_size == 1):
            stage.group = pipeline
        if stage.group is not pipeline:
            raise UsageError(
                "the stage communicates over a group that is not rebuilt after a failure, or not over its pipeline; "
                'build it with group=session.groups["pipeline"]'
            )
        self._add(adopt(stage, self._channel, self._updates))
        return stage

    def optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Registers an optimizer with the session, and returns the same object. It must hold parameters of stages only.

        From then on its `step` is carried out bucket by bucket, with bit-identical results. Create it after the stages.
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

        ``make_module(stage_index)`` returns a new module of that stage on the CPU, as that stage's rank creates it for
        `pipeline_stage`. Its weights are overwritten. The module must share nothing with this rank's own stages or with
        earlier modules of this function, and must keep no state outside of parameters and buffers. Replays are shared
        in pipelines without replicas, under torch's schedules except ScheduleLoopedBFS, by at most
        `SessionConfig.helpers` ranks.
        """
        self._engine.help_replay(make_module)

    def register(self, *, schedule: Any = None, **objects: Any) -> None:
        """Registers the other objects that a recovery must restore: the pipeline schedule, and every object with state
        that a step changes (LR scheduler, data loader, gradient scaler), under any name.

        The objects' state_dict is copied at every step, so keep it small. `loader` counts as data position. A
        `torch.utils.data.DataLoader` (with a state, as torchdata's StatefulDataLoader, or without) or `IterableDataset`
        is followed by what it gives: register it before you iterate over it, and keep its iterator over steps.
        Generators (of torch, `random`, numpy), lists, dicts and deques may be passed as they are. Raises UsageError for
        any other object without state_dict and load_state_dict.
        """
        if schedule is not None:
            self._add_schedule(schedule)
        for name, value in objects.items():
            self._state.add_object(name, value)

    def loader(self, make: Callable[[int], Any], name: str = "loader") -> OriginLoader:
        """Registers a data loader that can give other data-parallel ranks' batches as well, and returns it.

        ``make(dp_rank)`` returns the loader of that data-parallel rank, with state_dict and load_state_dict. Its state
        must be the same on all data-parallel ranks at the same step (a position). The returned object stands in for
        that loader: attributes, iteration and `next` are those of the rank whose batch is computed. Needed only where
        other ranks compute a lost rank's batches (`lost_shard` "redistribute" and "reroute", and strategy "adaptive").
        """
        loader = OriginLoader(make, self.dp_rank, lambda: self.dp_rank)
        self._state.add_object(name, loader)
        self._origin_loaders[name] = loader
        return loader

    def run(self, train_step: TrainStep, num_steps: int) -> None:
        """Calls ``train_step(step)`` for every remaining step below `num_steps`. Returns when all ranks have done all
        steps.

        `train_step` does one whole optimizer step. When a rank is lost, a torch exception cuts it short, and it is
        called again with the step at which the job resumes. A replacement also calls it for the steps that it replays;
        `replaying` is True then.

        Raises UsageError if the job has run before, or its trainer cannot be recovered.
        """
        if num_steps < 0:
            raise UsageError(f"num_steps={num_steps}; give 0 or more")
        if self._config.setting.calls_again and not reinitialization.is_open(self):
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
        self._check_devices()
        self._set_up.agree(self._gate.made)
        if self._shadow is not None:
            self._shadow.run(self._gate.around(train_step), num_steps)
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
        reported its metrics (`log` reports them exactly once). Also True in a rehearsal (`swift_ft.is_warming_up`)."""
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

        Any rank may call it: only the last one of a pipeline, which has the loss, or all. Replicas of a stage must take
        the same decision, so sum what the decision depends on over them (`dist.all_reduce`). The job is then FINISHED.
        If it is started again with the same number of steps, it returns at once; with more, it goes on. `reason` is
        text for people.
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
        """(inside a step) Checks a loss that the session does not see: the loss of a whole module, if it is computed
        outside of the module's forward.

        If it is not finite, `SessionConfig.non_finite_loss` decides what happens.
        """
        self._losses.check(self.step, "the loss", loss)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Averages this optimizer's gradients over the replicas now, unless that was done since its last step.

        `clip_grad_norm_` and `optimizer.step()` do this themselves. Call it before anything else that reads gradients
        (a gradient scaler's `unscale_`). With several optimizers, pass the one that is about to step.
        """
        self._crossing.reduce_gradients(optimizer)

    def unscale_(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Runs `scaler.unscale_(optimizer)`, and tells all stages whether one of them has found inf or nan.

        Then `scaler.step(optimizer)` skips the update on all ranks or on none, and `scaler.update()` changes the scale
        equally. Gradients are averaged over replicas first. The result is reduced over all stages by a collective, and
        is logged. `scaler` is a `torch.amp.GradScaler` that was registered; each rank passes its own.
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
        """Runs `torch.nn.utils.clip_grad_norm_` over the parameters of all stages, and returns the global norm.

        Each rank passes its own parameters. With replicas, gradients are averaged over them first. The global norm is
        a collective over all stages, and is logged. A weight that was passed to `tie` counts once. If ranks share a
        weight in another way, all but one of them pass it in `uncounted`: there it is clipped, but left out of the
        norm.
        """
        return self._crossing.clip_grad_norm_(parameters, max_norm, norm_type, uncounted)

    # --- inside ---

    def _wire(
        self, rank: int, assignment: Assignment, member: Member, checkpoint_dir: str, config: SessionConfig
    ) -> None:
        """Creates all parts in the order of their dependencies. `assignment`: the full world's. Raises UsageError if
        `checkpoint_dir` is not writable.

        Two parts may depend on each other: the updates call the vote, which belongs to the engine, and the engine is
        created from the state that has the updates. Then one part has an attribute that is set here, or looks the value
        up at each call: a generation's store and assignment exist only once there is a generation.
        """
        logs: list[OwnLog] = []  # the groups hold the backend, and must not keep the engine alive

        def assigned() -> Assignment:
            """Returns the assignment of the current generation."""
            return engine.membership.assignment

        def shares() -> Shares | None:
            return None if adoption is None else adoption.shares()

        def world_now() -> World:
            return World.of(engine.membership.generation, assigned(), rank)

        backend = default_backend(lambda: _service_ports(member, logs))
        moves = config.strategy if config.redistributes or config.drops else ""
        gate = Gate(assignment.group(rank), assignment.cell(rank), moves)
        groups = groups_behind(gate, rank, assignment.process_groups(rank), backend)
        # The session's own votes and copies bypass the gate.
        world = ReconfigurableGroup("all", groups["world"].ranks, rank, backend)
        faults = FaultInjector(rank)
        # With a strategy that can shrink the world a rank may load its replicas' checkpoints too.
        twins = assignment.peers(rank) if config.shrinks else ()
        store = CheckpointStore(
            checkpoint_dir, rank, member, twins, lambda version: faults.at("save", version - 1)
        )
        try:
            store.check()
        except UsageError:
            if not member.replaces_another():  # a replacement of a lost rank goes on without it
                raise
        all_groups = (*groups.values(), world)
        communicator = ProcessGroups(
            backend, rank, all_groups, default=groups["world"], stores=stores_of(member.client)
        )
        channel = Channel(
            rank,
            assignment,
            config.seed,
            faults,
            lambda: communicator.store,
            member.check,
            communicator.check_whole,
            RecoveryGroups.parse(config.groups),
        )
        channel.readings.arrivals = lambda: communicator.fabric
        channel.finishes_cut_steps = config.finishes_cut_steps
        losses = Losses(config.non_finite_loss, channel)
        witness = Witness(
            member.say_differs,
            lambda: communicator.broken is not None,
            losses.check,
            readings=channel.readings,
        )
        channel.witness = witness
        tape = Tape(witness)
        for group in groups.values():
            group.tape = tape
        reducer = None  # no other rank has gradients of the same parameters
        if (dp_size := len(groups["data"].ranks)) > 1:
            ordered = is_ordered(config.reduction, dp_size)
            reducer = Reducer(groups["data"], lambda: world_now().divisor, ordered=ordered, shares=shares)
        cut_step = CutStep(config.finishes_cut_steps, rank, reducer, world_now)
        updates = Updates(
            config,
            reducer,
            ties=Ties(channel, groups["pipeline"]),
            cut_step=cut_step,
            channel=channel,
            votes=assignment.dp_size > 1,
        )
        replicate = groups.get("replicate", groups["data"])
        state = TrainerState(channel.randomness, updates, replicate if assignment.shards > 1 else None)
        state.iterators.install()
        state.checkpoints = store.newest_first
        watch = ThoroughWatch(witness, state.stages, state.parameter_names)
        site = Site(
            rank=rank,
            config=config,
            assignment=assignment,
            member=member,
            communicator=communicator,
            world=world,
            channel=channel,
            state=state,
            store=store,
            faults=faults,
            witness=witness,
        )
        recording = Recording(site, watch, tape)
        loaders: dict[str, OriginLoader] = {}
        log = OwnLog(site)
        logs.append(log)
        saving = Saving(site, recording)
        ending = Ending(site, saving)
        lines = Lines(lines_directory(checkpoint_dir) / "metrics" / f"rank{rank}.jsonl")
        audit = None
        if assignment.replicas > 1 and may_copy(config.strategy):
            audit = Audit(replicate, state)
        adoption = None
        if config.redistributes:
            kind = Rerouting if config.reroutes else Adoption
            adoption = kind(site, assigned, groups, loaders)
        if config.staggered:
            site.staggering = Staggering(site, assigned)
        if config.steps_to_snapshot:
            site.snapshots = Snapshots(site, lambda: engine.membership)
        # In this order: recordings begin before other parts change the state; a version is compared before it is saved;
        # snapshots come last, because a rank that is lost in one must not cost a checkpoint. (No job has both snapshots
        # and batches of lost ranks.)
        participants: list[Participant] = [
            participant
            for participant in (
                adoption,
                recording,
                ending,
                site.staggering,
                verification.Observers(state, rank),
                lines,
                audit,
                saving,
                UnloggedSteps(member, lambda: log.writer),
                site.snapshots,
            )
            if participant is not None
        ]
        engine = Engine(
            site,
            participants,
            log=log,
            saving=saving,
            ending=ending,
            lines=lines,
            recording=recording,
        )

        def before_update() -> None:
            tape.check_seeing()
            verification.before_update(state)

        def before_reduction() -> None:
            for participant in participants:
                participant.before_reduction()

        updates.unreduced = watch.gradients
        updates.before_update = before_update
        updates.before_reduction = before_reduction
        cut_step.held_over = engine.held_over
        gate.channel, gate.updates, gate.participants = channel, updates, participants
        self._set_up = SetUp(site, engine.membership, engine.failures, alone=warm_up.is_warming_up())
        gate.set_up = self._set_up.begin
        torch_private.carry_objects_by(set_up.encoded, set_up.decoded, lambda: not gate.over)
        torch_private.split_by_new_groups(lambda: not gate.over)
        self._shadow: Shadow | None = None
        """Run of a process that holds no rank (a warm-up or a rehearsal); None in a rank."""
        if warm_up.is_warming_up():
            self._shadow = Warming(site)
            if warm_up.this_run().rehearses:
                self._shadow = Rehearsal(site, watch, tape)
        self._gate, self.groups = gate, groups
        self._channel, self._updates, self._state = channel, updates, state
        self._origin_loaders, self._losses, self._lines, self._engine = loaders, losses, lines, engine
        self._crossing = Crossing(site, groups)
        self._reroute: Callable[..., object] | None = None if adoption is None else adoption.reroute
        """Runs calls of a schedule in which ranks are missing."""

    def _add_schedule(self, schedule: Any) -> None:
        """Registers a schedule. Raises UsageError for another type, an unlogged stage, or DDP with split backward."""
        if not isinstance(schedule, torch_private.Schedule):
            raise UsageError(
                f"register(schedule=...) was given a {type(schedule).__name__}; give a schedule of "
                "torch.distributed.pipelining"
            )
        stages = torch_private.schedule_stages(schedule)
        if not all(stage in self._state.stages for stage in stages):
            raise UsageError(
                "the schedule runs a stage that is not logged; use session.pipeline_stage or adopt"
            )
        for stage in stages:
            if isinstance(stage.submod, DistributedDataParallel) and torch_private.splits_backward(schedule):
                raise UsageError(
                    f"{type(schedule).__name__} computes weight gradients apart, where DistributedDataParallel "
                    "does not see them; give the stage a plain module, the session averages its gradients"
                )
        torch_private.wrap_loss(schedule, logged_loss(stages, self._channel))
        if self._reroute is not None:
            rerouted_call.instead_of_calls(schedule, self._reroute)
        number = len(self._state.schedules)
        around = partial(_around_call, schedule, number, self._gate, self._channel, self._updates)
        torch_private.around_calls(schedule, around)
        self._state.schedules.append(schedule)

    def _add(self, stage: Any) -> None:
        for name, part in stage.submod.named_modules():
            if isinstance(part, torch.jit.ScriptModule):
                raise UsageError(
                    f"{name or 'the module'} is TorchScript (torch.jit.script or trace): what it keeps besides "
                    "parameters and buffers cannot be looked at; give the Python module, or torch.compile of it"
                )
        self._state.add_stage(stage)
        mine = {self.rank: sorted({each.stage_index for each in self._state.stages})}
        if problem := self._channel.groups.problem(stage.num_stages, mine):
            raise UsageError(problem)
        stage.groups = list(self.groups.values())  # the trainer's own are parts of "world"
        state = self._state
        stage.called_too = lambda: (torch_private.loss_functions(state.schedules), state.objects)
        self._channel.fails_at_layers(stage.submod, whole=isinstance(stage, WholeModule))
        self._updates.elsewhere.update(fsdp.reduced_by_fsdp(stage.submod, self.groups))
        if isinstance(stage.submod, DistributedDataParallel):
            if stage.submod.process_group is not self.groups["data"]:
                raise UsageError(
                    "DistributedDataParallel that the session has not made: its buckets are arranged anew in a "
                    "process's first step, which is another one in a replacement; use session.ddp(module) in its place"
                )
            if self._updates.shrinks_by:
                raise UsageError(
                    f"strategy={self._updates.shrinks_by!r} with DistributedDataParallel, which divides by the "
                    "ranks of a full world: give the plain module to the session, which averages its gradients"
                )
            # DDP ignores parameters that are frozen at its construction. If a later step trains them, the session
            # averages their gradients.
            self._updates.elsewhere.update(p for p in stage.submod.parameters() if p.requires_grad)
        elif self._updates.wait_free:
            self._updates.awaited.add(stage)

    def _check_devices(self) -> None:
        """Raises UsageError if a stage is on another device than the current one, or on one that may compute other bits
        the next time."""
        parameters = (p for stage in self._state.stages for p in stage.submod.parameters())
        on = {p.device for p in parameters if p.device.type != "cpu"}
        if not on:
            return
        here = [device for device in on if device.type != "meta"]  # of those, what is not materialised yet
        if any(device.index != torch.accelerator.current_device_index() for device in here):
            raise UsageError(
                f"stages are on {', '.join(sorted(map(str, here)))}, which is not the current device: call "
                "torch.accelerator.set_device_index(local_rank) at the script's start, and use one device a rank"
            )
        if self._config.allow_inexact:
            return
        if problems := device_problems(determinism_fingerprint(self._config.undo)):
            raise UsageError(
                f"the job would not be exact on its devices: {'; '.join(problems)}. Set it at its start, or say "
                "allow_inexact=True (--allow-inexact)"
            )

    def _show_metrics(self, job: str) -> Callable[[], None]:
        listen = self._config.metrics_listen or os.environ.get(ENV_METRICS_LISTEN, "")
        if not listen or warm_up.is_warming_up():
            return lambda: None
        from swift_ft.train import metrics

        local_rank = int(os.environ.get(ENV_LOCAL_PLACE) or os.environ.get("LOCAL_RANK", "0"))
        return metrics.serve_metrics(listen, job, self.rank, local_rank, self._engine.progress)


@contextmanager
def _around_call(
    schedule: Any, number: int, gate: Gate, channel: Channel, updates: Updates
) -> Iterator[None]:
    """Wraps each call of the schedule with this number."""
    gate.scheduled()
    channel.shapes.schedule = number
    for stage in torch_private.schedule_stages(schedule):
        stage.grad_scale = torch_private.schedule_grad_scale(schedule)
    updates.communicates()
    with inferred_whole(schedule), updates.spoiling(), gate.passing():
        yield
    channel.randomness.outside()


def _service_ports(member: Member, logs: Sequence[OwnLog]) -> list[int]:
    addresses = [member.client.address, *(address for log in logs for address in log.servers_of_job)]
    return [int(address.rpartition(":")[2]) for address in addresses]


_USUAL = SessionConfig()


def _launchers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the session settings given to `swift-ft run`. Raises UsageError if the script sets other values."""
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
