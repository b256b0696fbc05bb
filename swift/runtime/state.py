"""Everything that a step changes: what must go back if the step is dropped, and what a checkpoint holds."""

import copy
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import xxhash

from swift.checkpoint.state import split
from swift.errors import ServiceError, UsageError
from swift.optim.journal import UndoResult
from swift.optim.state_snapshot import OPTIMIZERS_OWN, Kept
from swift.runtime import _torch, _torch_hooks, sharded
from swift.runtime.before import Before, Looks
from swift.runtime.beside import Beside
from swift.runtime.first_parameters import FirstParameters, check_ready
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.loaders import Iterators
from swift.runtime.loading import load_module, load_optimizer, naming, states_of
from swift.runtime.made import fill_hooks
from swift.runtime.manifest import local
from swift.runtime.object_states import ObjectStates
from swift.runtime.param_groups import Groups, ParamGroups, become, told
from swift.runtime.rng import Randomness, as_registered
from swift.runtime.settings import Settings
from swift.runtime.standing import Standing
from swift.runtime.tensors import byte_view, digest, plain
from swift.runtime.updates import Updates
from swift.runtime.whole_module import WholeModule

HYPERPARAMETERS = "hyperparameters of an optimizer"
# Of a process, in which every bit of frozen parameters is compared; later what tells cheaply.
_STEPS_LOOKED_AT = 3
_COMPARED = ("values", "made")


@dataclass(kw_only=True)
class _BeforeStep:
    """What is put back when a half-done step is dropped. Parameters are not here: until the optimizer steps
    they have not changed, or the journal takes them back, and after it the step is not dropped."""

    objects: dict[str, Any]
    placements: dict[str, str]
    modes: list[tuple[torch.nn.Module, bool]]
    """Whether each module trains: a validation that is cut short leaves them evaluating."""
    iterators: list[list[Any]]
    param_groups: ParamGroups


class Stopped(NamedTuple):
    """What a trainer has said with `session.stop`."""

    reason: str
    num_steps: int
    """Those of the run that it ends: one that is to do more goes on."""


class TrainerState:
    """The stages, optimizers and registered objects of one rank."""

    def __init__(
        self, randomness: Randomness, updates: Updates, replicate: ReconfigurableGroup | None
    ) -> None:
        """`randomness`: the channel's. `replicate`: the replicas of this rank's shard, if there are shards."""
        self.randomness = randomness
        self.updates = updates
        self.replicate = replicate
        self.stages: list[Any] = []
        self.schedules: list[Any] = []
        self.objects: dict[str, Any] = {}
        self._given: dict[str, Any] = {}
        """What the trainer has registered, itself."""
        self.version = 0  # optimizer steps done = the next step to run
        self.present = False  # until the first version is ours, by birth or by restore
        self.lived = False  # until this process has run with the others, and logged what it sent
        self._before: _BeforeStep | None = None
        self.gradients = updates.left
        self._groups_first: Groups | None = None
        """Of the optimizers, in any process that begins."""
        self._groups: list[Kept] = []  # the optimizers' hyperparameters when the step began
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """Around optimizers' steps, and what they were."""
        self._modules = Before(())
        self._looks = Looks()
        self._changing: dict[int, torch.nn.Parameter] = {}
        """Parameters that no optimizer updates, and that a step changes all the same (a momentum encoder's)."""
        self._steps_here = 0
        self._digests: dict[int, bytes] = {}
        self.beside = Beside()
        self.settings = Settings()
        self._first = FirstParameters()
        self.iterators = Iterators(self.randomness, lambda: self.objects)
        self.loads = ObjectStates()
        self.stopped: Stopped | None = None
        """The trainer ends the run with this version."""
        self.updated = False
        """An optimizer that the session was told of has stepped in this process."""
        self.apart: list[str] = []
        """What replicas have each of its own (`swift.runtime.audit`)."""

    # --- registration ---

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.updates.optimizers

    def add_stage(self, stage: Any) -> None:
        """Raises UsageError for a stage, or a module, that is there already."""
        self._check_early("a module")
        whole = isinstance(stage, WholeModule)
        for other in self.stages:
            if other.submod is stage.submod:
                raise UsageError("one module was given to the session twice; give it once")
            if whole or isinstance(other, WholeModule):
                continue
            if other.stage_index == stage.stage_index:
                raise UsageError(
                    f"two stages {stage.stage_index} on one rank: a rank can have several stages of one pipeline, not "
                    "two pipelines; make one pipeline of both, or give a whole model to session.module"
                )
        check_ready(stage.submod)
        self.stages.append(stage)

    def keyed(self) -> dict[str, Any]:
        """The stages by the names that they have in states: pipeline stages by their index, whole modules in the order
        in which the session was told of them."""
        whole = [stage for stage in self.stages if isinstance(stage, WholeModule)]
        keys = {str(stage.stage_index): stage for stage in self.stages if stage not in whole}
        word = "module" if keys else ""
        return keys | {f"{word}{number}": stage for number, stage in enumerate(whole)}

    def _check_early(self, what: str) -> None:
        """Raises UsageError behind the begin of `session.run`: a process that takes over a rank would not have it."""
        if self.beside.remembered:
            raise UsageError(
                f"the session was given {what} in train_step: a process that replaces a lost rank begins without it; "
                "make all of them before session.run, and let steps choose which they use"
            )

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_early("an optimizer")
        self.updates.add(optimizer)

    def add_object(self, name: str, value: Any) -> None:
        """Registers an object whose state belongs to the trainer's.

        Raises UsageError: too late, a name that is taken, or no `state_dict` and `load_state_dict`.
        """
        self._check_early(f"register({name}=...)")
        if name in self.objects:
            raise UsageError(f"register({name}=...) was called twice; use another name")
        given, value = value, as_registered(value)
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(
                    f"register({name}=...) was given a {type(value).__name__} without {method}(); "
                    "a recovery must be able to take it back, so give it state_dict and load_state_dict"
                )
        self.objects[name] = value
        self._given[name] = given

    def check_complete(self) -> None:
        """Raises UsageError, in one line, for a trainer that forgot something a recovery needs."""
        if not self.stages:
            raise UsageError(
                "no pipeline stage: make it with session.pipeline_stage(...) or session.adopt(stage); a whole "
                "model is registered with session.module(model)"
            )
        if not self.optimizers:
            raise UsageError("no optimizer: write optimizer = session.optimizer(torch.optim....)")
        if not self.schedules and not all(isinstance(stage, WholeModule) for stage in self.stages):
            raise UsageError(
                "the schedule is not registered: call session.register(schedule=schedule, scheduler=..., loader=...) "
                "before session.run"
            )
        for stage in self.stages:
            if hooks := _torch.communication_hooks_of(stage.submod):
                raise UsageError(
                    f"a DistributedDataParallel has a communication hook ({hooks[0]}): a reduction that a failure cuts "
                    "short in a hook cannot be taken back; leave register_comm_hook out"
                )
        self.updates.check_complete(self.objects)
        for optimizer in self.optimizers:
            sharded.check_optimizer(optimizer)
        states_of(self.optimizers)
        parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        known, trained = {id(p) for p in parameters}, {id(p) for p in parameters if p.requires_grad}
        updated = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        self.updates.ties.check(updated)
        held = {id(p) for p in updated}
        if held - known:
            raise UsageError(
                "the optimizer updates parameters that are in no stage; put them into a stage's module"
            )
        if trained - held:
            raise UsageError(
                "some parameters of the stages have no optimizer; pass them to session.optimizer or freeze them"
            )
        self._groups_first = told(self._named_parameters(sharded_too=True), self.optimizers)

    def remember(self) -> None:
        """(all is registered, and nothing is loaded yet) What a new process begins with."""
        modules = {key: stage.submod for key, stage in self.keyed().items()}
        self.beside.remember(modules, self.optimizers, self._given)
        self.settings.remember()
        self._first.remember(self._parameters(), list(self._named_parameters(sharded_too=True)))

    def told(self) -> list[Any]:
        """What the session was told of: all of it is captured."""
        given = self._given.values()
        return [*(stage.submod for stage in self.stages), *self.optimizers, *self.schedules, *given]

    def code(self) -> list[Any]:
        """The trainer's code that a step runs besides its own function: forwards, hooks, optimizers, loss functions,
        and what registered objects do."""
        modules = [part for stage in self.stages for part in stage.submod.modules()]
        hooks = _torch_hooks.hooks_of(modules, self.optimizers)
        losses, given = _torch.loss_functions(self.schedules), self._given.values()
        return [*modules, *hooks, *self.optimizers, *losses, *given]

    # --- one step ---

    def begin_step(self) -> None:
        """Keeps what a step that is cut short must give back."""
        self.updates.begin_step(self.version)
        self.settings.begin_step()
        self.gradients.begin(self._parameters())
        for stage in self.stages:
            stage.begin_step()
        self.iterators.begin_step(self.version)
        objects, placements = sharded.localized(self._object_states())
        self.loads.compare(objects)
        self._before = _BeforeStep(
            objects=copy.deepcopy(objects),
            iterators=self.iterators.state(),
            placements=placements,
            modes=[(part, part.training) for stage in self.stages for part in stage.submod.modules()],
            param_groups=ParamGroups(self.optimizers),
        )
        self.beside.held.begin_step()
        self._modules.roots = [stage.submod for stage in self.stages]
        self._modules.keep(self._changing.values())
        self._looks.keep(p for p in self._parameters() if not sharded.is_sharded(p))
        # A trainer may set them at any place in its step (`group["lr"] = …` for this step): ranks that it has left at
        # different places are replicas only with what they began with.
        self._groups = [Kept(group, but=("params",)) for o in self.optimizers for group in o.param_groups]
        # What it keeps besides; LR schedulers note there that it has stepped.
        self._groups += [Kept(vars(o), but=OPTIMIZERS_OWN, states=False) for o in self.optimizers]
        self._hooks = [(h, h.copy()) for o in self.optimizers for _, h in _torch_hooks.optimizer_hooks(o)]
        self.randomness.begin_step(self.version)  # whatever objects have drawn to tell their state

    def draw_as_other(self, loaders: Collection[str]) -> None:
        """(a step for another data-parallel rank has begun, which the randomness is of) What its registered objects
        would draw is what these draw from here on. `loaders`: those that have to be given the state for it; the others
        make their iterators of torch's data loaders again, with that rank's numbers."""
        before = self._before
        assert before is not None
        self.iterators.restore(before.iterators)
        objects = sharded.globalized(copy.deepcopy(before.objects), before.placements, self._parameters())
        for name, state in objects.items():
            if before.iterators or name in loaders:
                self.loads.load(name, self.objects[name], state)
        self.beside.held.lend()

    def end_step(self) -> None:
        """The step is done: what was kept for taking it back is let go, and the version rises by one."""
        self._first.check(self._parameters(), list(self._named_parameters(sharded_too=True)))
        self._before, self._groups, self._hooks = None, [], []
        self.settings.end_step()
        self._learn_changing()
        self._modules.forget()
        self.gradients.end(self._parameters(), updated=self.updates.stepped > 0)
        self.updated = self.updated or self.updates.stepped > 0
        self.version += 1
        self.updates.begin_step(self.version)

    def drop_step(self) -> None:
        """Takes the half-done step back, but for the buckets that are applied: `undo` does that."""
        self.updates.voting = False  # its stack is gone: it cannot be finished any more
        for schedule in self.schedules:
            _torch.clear_schedule(schedule)
        for stage in self.stages:
            _torch.reset_sharded(stage.submod)
        before, self._before = self._before, None
        if before is None:  # no step is under way
            return
        self.gradients.put_back(self._parameters())
        for part, training in before.modes:
            part.training = training
        self.iterators.restore(before.iterators)
        objects = sharded.globalized(before.objects, before.placements, self._parameters())
        self.beside.held.prepare()
        for name, state in objects.items():
            if isinstance(self.objects[name], torch.amp.GradScaler):
                _torch.forget_unscaled(self.objects[name])
            try:
                self.loads.load(name, self.objects[name], state)
            except ServiceError as error:
                self.present = False  # it is restored, which may do better
                print(f"swift: {error}: the state of this rank is restored", file=sys.stderr)
        self.beside.held.put_back()
        if self._changed_otherwise():
            self.present = False  # values of before the step are nowhere; from its next one on they are kept
        self._modules.put_back()
        self._put_back_groups()
        before.param_groups.put_back()

    def standing(self) -> Standing:
        """What this rank holds, and where it can go. In the vote it may be that its step can only be finished."""
        if not self.present:
            return Standing(version=None)
        standing = self.updates.standing(self.version)
        if self.can_drop:
            return standing
        return replace(standing, version=None, undo_to=None, undo_exact=False)

    @property
    def can_drop(self) -> bool:
        """(a step is under way) It can be taken back."""
        return self._before is None or not self._changed_otherwise()

    def _changed_otherwise(self) -> bool:
        """A parameter was changed by something else than the session's update, and nobody has kept what it was."""
        kept = set(self._changing)
        if self.updates.begun or self.updates.partial:  # the update is undone
            kept |= {id(p) for p in self.updates.bucket_of}
        return any(id(p) not in kept and self._looks.changed(p) for p in self._looks)

    def _learn_changing(self) -> None:
        """(a step is done) In the first steps of a process every bit of frozen parameters is looked at."""
        held = {id(p) for o in self.optimizers for group in o.param_groups for p in group["params"]}
        frozen = [
            p
            for p in self._looks
            if (id(p) not in held or not p.requires_grad) and id(p) not in self._changing
        ]
        if self._steps_here < _STEPS_LOOKED_AT:
            digests = {id(p): xxhash.xxh3_128_digest(byte_view(plain(p)).data) for p in frozen if p.numel()}
            before = digests | self._digests
            changing = [p for p in frozen if before.get(id(p)) != digests.get(id(p))]
            self._digests = digests
        else:
            changing, self._digests = [], {}
        if not self._steps_here:  # what a first step has made is told now if it cannot be saved
            split(states_of(self.optimizers))
        self._steps_here += 1
        for parameter in (*changing, *(p for p in frozen if self._looks.changed(p))):
            self._changing[id(parameter)] = parameter

    def undo(self) -> list[UndoResult]:
        """(after `drop_step`) Takes back what is applied of its update. Raises ServiceError if that cannot be done."""
        results = self.updates.undo()
        self._put_back_groups()  # a copied optimizer's are what they were when its bucket was applied
        self.updates.begin_step(self.version)
        return results

    def _put_back_groups(self) -> None:
        for group in self._groups:
            group.put_back()
        for hooks, were in self._hooks:
            fill_hooks(hooks, were)

    def align(self) -> None:
        """(first start) Replicas begin with the weights and buffers of the first one, as DDP's do.

        Of what is sharded, each shard goes to its own replicas.
        """
        for stage in self.stages:
            tensors = [*stage.submod.parameters(), *stage.submod.buffers()]
            self.updates.broadcast([t.detach() for t in tensors if not sharded.is_sharded(t)])
            if self.replicate is not None:
                sharded.broadcast(self.replicate, [local(t) for t in tensors if sharded.is_sharded(t)])
        self.updates.ties.align()

    # --- checkpoints and digests ---

    def destinations(self) -> dict[str, torch.Tensor]:
        """The tensors that a copy of a replica's state is received into, by their path in `state_dict`.

        No buffers: the replica's may have grown, or be of another type by now.
        """
        state = self.state_dict()
        stages: dict[str, Any] = {}
        for key, stage in self.keyed().items():
            names = {name for name, _ in stage.submod.named_parameters(remove_duplicate=False)}
            stages[key] = {name: tensor for name, tensor in state["stages"][key].items() if name in names}
        tensors, _ = split(
            {key: value for key, value in state.items() if key != "beside"} | {"stages": stages}
        )
        return tensors

    def shared_dict(self) -> dict[str, Any]:
        """What replicas have in common; the names of what each has of its own are in it."""
        state = self.state_dict()
        beside = state["beside"]
        shared = {part: {k: v for k, v in beside[part].items() if k not in self.apart} for part in _COMPARED}
        return {**state, "beside": {**beside, **shared, "apart": list(self.apart)}}

    def state_dict(self) -> dict[str, Any]:
        """Local tensors that share the memory of what they are the state of; `placements` says which are shards."""
        state = {
            "version": self.version,
            "stages": {key: stage.submod.state_dict() for key, stage in self.keyed().items()},
            "optimizers": states_of(self.optimizers),
            "objects": self._object_states(),
            "beside": self.beside.state(),
            "iterators": self.iterators.state(),
        }
        if self.stopped is not None:
            state["stopped"] = self.stopped._asdict()
        if settings := self.settings.state():
            state["settings"] = settings
        if left := self.gradients.state(self._named_parameters()):
            state["gradients"] = left
        groups = told(self._named_parameters(sharded_too=True), self.optimizers)
        if self._groups_first is not None and groups != self._groups_first:
            state["groups"] = groups
        state, placements = sharded.localized(state)
        return {**state, "placements": placements} if placements else state

    def parts(self) -> dict[str, Any]:
        """What replicas must have in common, by the name that a message gives it; registered objects by theirs."""
        state = self.state_dict()
        names = {
            f"{key}.{name}"
            for key, stage in self.keyed().items()
            for name, _ in stage.submod.named_parameters()
        }
        tensors = {f"{i}.{n}": t for i, stage in state["stages"].items() for n, t in stage.items()}
        groups = [group for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
        return {
            # First: where these differ, all else differs for it.
            HYPERPARAMETERS: [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "parameters": {name: tensor for name, tensor in tensors.items() if name in names},
            "optimizer": state["optimizers"],
            "iterators of data loaders": state["iterators"],
            "a buffer": {name: tensor for name, tensor in tensors.items() if name not in names},
            **self.gradients.parts(self._named_parameters(), self.updates.bucket_of, self.updates.elsewhere),
            **{f"register({name}=...)": value for name, value in sorted(state["objects"].items())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ServiceError if the state is another trainer's or another shard's, or if one of the trainer's objects
        cannot load it, with its name."""
        stages = self.keyed()
        if set(stages) != set(state["stages"]) or len(self.optimizers) != len(state["optimizers"]):
            raise ServiceError(
                f"the checkpoint holds stages {sorted(state['stages'])} and {len(state['optimizers'])} optimizer(s), "
                f"this trainer made stages {sorted(stages)} and {len(self.optimizers)} optimizer(s)"
            )
        if set(self.objects) != set(state["objects"]):
            raise ServiceError(
                f"the checkpoint holds {sorted(state['objects'])}, this trainer registered {sorted(self.objects)}"
            )
        if groups := state.get("groups", self._groups_first):
            become(self._named_parameters(sharded_too=True), self.optimizers, groups)
        placements = state.get("placements", {})
        sharded.check_placements(self.state_dict().get("placements", {}), placements, "state.stages.")
        state = sharded.globalized(state, placements, self._parameters())
        for name, stage in stages.items():
            with naming(f"stage {name}"):
                load_module(stage.submod, state["stages"][name], self.beside.names_at_begin(name))
        for number, (optimizer, value) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            with naming(f"optimizer {number} ({type(optimizer).__name__})"):
                load_optimizer(optimizer, value)
        self.iterators.restore(state["iterators"])
        self.beside.held.prepare()
        for name, value in state["objects"].items():
            self.loads.load(name, self.objects[name], value)
        self.beside.load(state["beside"])
        self.settings.load(state.get("settings", {}))
        self.stopped = Stopped(**state["stopped"]) if "stopped" in state else None
        self.gradients.load(self._named_parameters(), state.get("gradients", {}))
        self._before, self._groups, self._hooks = None, [], []
        self.version = int(state["version"])
        self.updates.begin_step(self.version)

    def _object_states(self) -> dict[str, Any]:
        return {name: value.state_dict() for name, value in self.objects.items()}

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def _named_parameters(self, *, sharded_too: bool = False) -> dict[str, torch.nn.Parameter]:
        """By the names that they have in states."""
        return {
            f"{key}.{name}": parameter
            for key, stage in self.keyed().items()
            for name, parameter in stage.submod.named_parameters()
            if sharded_too or not sharded.is_sharded(parameter)
        }

    def gradient_bytes(self) -> dict[int, int]:
        """Of each stage's parameters that are trained."""
        bytes_of: dict[int, int] = {}
        for stage in self.stages:
            own = sum(p.nbytes for p in stage.submod.parameters() if p.requires_grad)
            bytes_of[stage.stage_index] = bytes_of.get(stage.stage_index, 0) + own
        return bytes_of

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part of the state; equal on two runs only if every bit is."""
        state = self.state_dict()
        parts = {"parameters": state["stages"], "optimizer": state["optimizers"], **state["objects"]}
        if any(state["beside"][part] for part in ("values", "gone", "made")):
            parts["modules"] = state["beside"]
        if "loader" in parts:
            parts["data"] = parts.pop("loader")
        out = {"rng": self.randomness.digest(self.version)}
        for name, value in parts.items():
            tensors, rest = split(value)
            out[name] = digest(tensors, json.dumps(rest))
        return out
