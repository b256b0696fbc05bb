"""Everything that a step changes: the state that a dropped step restores, and the contents of a checkpoint."""

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash

from swift_ft import torch_private
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.device import accelerator_in_use, wait_for_copies
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state import fsdp
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.digests import digests
from swift_ft.state.exact_undo import OPTIMIZERS_OWN, Kept
from swift_ft.state.journal import UndoResult
from swift_ft.state.loaders import Iterators, RegisteredLoader, is_loader
from swift_ft.state.module_state import (
    KeptModules,
    ModuleState,
    load_module,
    load_optimizer,
    naming,
    put_into,
    state_of_module,
    states_of,
)
from swift_ft.state.rng import Randomness, kept, seed_all
from swift_ft.state.tensors import digest
from swift_ft.state.torch_settings import Settings
from swift_ft.state.transfer import local
from swift_ft.state.tree import split
from swift_ft.text import tell_if_possible
from swift_ft.train.updates import Standing, Updates

# Registered objects that a recovery can restore: anything with a state, random generators, and plain lists, dicts and
# deques.

# Seed of the default generators while an object loads its state.
_LOADING = 0x5EED_10AD


class _Generator:
    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]):
        self._get, self._put = get, put

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._get()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._put(state["state"])


class _Container:
    """Plain list, dict or deque. Its items are restored in place into the existing lists and tensors, because the
    script may also hold them by another name
    (``best = stats["best"]``, ``pairs = list(zip(model.parameters(), ema))``)."""

    def __init__(self, value: Any):
        self._value = value

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._value.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        put_into(self._value, state["state"])


def as_registered(value: Any) -> Any:
    """Returns `value` itself, or a wrapper if it is a generator of torch, `random` or numpy, or a plain container."""
    if isinstance(value, torch.Generator):
        return _Generator(value.get_state, value.set_state)
    if isinstance(value, random.Random):
        return _Generator(value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _Generator(lambda: value.get_state(legacy=False), value.set_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if type(value) in (list, dict, deque):
        return _Container(value)
    return value


def load_object(name: str, thing: Any, state: Any) -> None:
    """Loads the object's state with seeded generators, so that any draws are equal in every process. Raises
    ServiceError, with the object's name, if it cannot load its state."""
    with kept():
        seed_all(_LOADING)
        with naming(f"register({name}=...)"):
            thing.load_state_dict(state)


# The parameters at the start of a process. A step must not create or remove any, nor change their types and shapes:
# a process that replaces a lost rank creates its modules as the script does before `session.run`, and can load only
# those parameters.


_Forms = dict[str, tuple[torch.dtype, torch.Size]]


def _forms(named: Mapping[str, torch.nn.Parameter]) -> _Forms:
    return {name: (parameter.dtype, parameter.shape) for name, parameter in named.items()}


def _check_first(first: _Forms, now: _Forms) -> None:
    """Raises UsageError if a step has created or removed parameters, or changed a type or shape. A step may put another
    object in a parameter's place, if it has the name, type and shape of the first."""
    if other := first.keys() ^ now.keys():
        raise UsageError(
            f"train_step has made or removed parameters ({', '.join(sorted(other)[:3])}): a process that "
            "replaces a lost rank makes the modules as they are before session.run, and cannot load them; make all "
            "parameters there, frozen (requires_grad_(False)) and out of use until a step wants them"
        )
    if changed := [name for name, form in now.items() if form != first[name]]:
        raise UsageError(
            f"train_step has changed the type or the shape of parameters ({', '.join(changed[:3])}): a process "
            "that replaces a lost rank makes the modules as they are before session.run, and cannot load them; "
            "make them so there"
        )


def check_ready(module: torch.nn.Module) -> None:
    """Raises UsageError for a module that creates its parameters in its first forward, or whose state is sparse."""
    lazy = (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(tensor, lazy):
            raise UsageError(
                f"{name} of a lazy module has no shape yet; call the module once (under torch.no_grad()) before you "
                "pass it to the session, and make the optimizer after that"
            )
        if tensor.layout is not torch.strided and name in state_of_module(module):
            raise UsageError(
                f"{name} of a module is sparse ({tensor.layout}), which checkpoints do not hold: register the buffer "
                "with persistent=False if no step changes it, or keep its indices and values in buffers of their own"
            )


# Membership of parameters in the groups of their optimizers, by name, and the groups' hyperparameters.
#
# An optimizer's own state identifies its parameters by number. So a state that goes to another process has their
# names, in the order of the groups, and the optimizer there adopts that order first: a script may have taken its
# parameters out of a set, or moved them to other groups while it trained. (Frozen flags belong to the modules:
# `swift_ft.state.module_state`.)

Named = Mapping[str, torch.nn.Parameter]
Optimizers = Sequence[torch.optim.Optimizer]
Groups = list[list[list[str]]]
"""Names of the parameters in each group of each optimizer."""
Begun = list[list[dict[str, str]]]
"""Groups of each optimizer at the start of a process: hyperparameters as strings, and a digest of parameter names."""
_NAMES = "params"
_SAID_MAX = 5


class ParamGroups:
    """``ParamGroups(optimizers)`` … ``restore()``: undoes a dropped step's changes to the groups."""

    def __init__(self, optimizers: Optimizers) -> None:
        self._groups = [
            (optimizer, [(group, list(group["params"])) for group in optimizer.param_groups])
            for optimizer in optimizers
        ]

    def restore(self) -> None:
        for optimizer, groups in self._groups:
            optimizer.param_groups[:] = [group for group, _ in groups]
            for group, parameters in groups:
                group["params"][:] = parameters


def groups_by_name(named: Named, optimizers: Optimizers) -> Groups:
    names = {id(parameter): name for name, parameter in named.items()}
    return [
        [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def regroup(named: Named, optimizers: Optimizers, wanted: Groups) -> None:
    """Restores groups as `groups_by_name` returned them. Raises ServiceError for names that this trainer lacks."""
    for optimizer, groups in zip(optimizers, wanted, strict=True):
        if groups_by_name(named, [optimizer]) == [groups]:
            continue
        try:
            parameters = [[named[name] for name in group] for group in groups]
        except KeyError as error:
            raise ServiceError(
                f"the state's optimizer has a parameter {error} that this trainer lacks"
            ) from None
        called = {
            id(p): name
            for group in optimizer.param_groups
            for p, name in zip(group["params"], group.get("param_names", ()))
        }
        # Their hyperparameters come with the optimizer's state.
        made = [{**optimizer.defaults, "params": []} for _ in groups[len(optimizer.param_groups) :]]
        optimizer.param_groups[:] = [*optimizer.param_groups[: len(groups)], *made]
        for group, own in zip(optimizer.param_groups, parameters, strict=True):
            group["params"][:] = own
            if "param_names" in group:
                group["param_names"] = [called.get(id(parameter), "") for parameter in own]
        kept = {id(parameter) for own in parameters for parameter in own}
        for gone in [tensor for tensor in optimizer.state if id(tensor) not in kept]:
            del optimizer.state[gone]


def agree_on_groups(
    named: Named, optimizers: Optimizers, broadcast: Callable[[list[torch.Tensor]], None]
) -> None:
    """(every replica, at the start) Adopts the first replica's order. `broadcast` gives all replicas its values.

    Raises UsageError, with the first parameter that differs, if the replicas' groups differ otherwise.
    """
    forms = {name: f"{p.dtype}{list(p.shape)}" for name, p in named.items()}
    words = json.dumps([groups_by_name(named, optimizers), forms]).encode()
    size = torch.tensor([len(words)])
    broadcast([size])
    data = torch.frombuffer(bytearray(words.ljust(int(size)))[: int(size)], dtype=torch.uint8)
    broadcast([data])
    theirs, their_forms = json.loads(data.numpy().tobytes())
    own = _places(groups_by_name(named, optimizers), forms)
    other = _places(theirs, their_forms)
    if different := [name for name in {**own, **other} if own.get(name) != other.get(name)]:
        raise UsageError(
            f"{different[0]} has another shape or type than on the first replica, or is in another group of an "
            "optimizer: make the same model and the same groups on all replicas"
        )
    regroup(named, optimizers, theirs)


def _places(groups: Groups, forms: dict[str, str]) -> dict[str, list[Any]]:
    places: dict[str, list[Any]] = {name: [form] for name, form in forms.items()}
    for number, of_one in enumerate(groups):
        for index, names in enumerate(of_one):
            for name in names:
                places[name].append((number, index))
    return places


# --- hyperparameters at the script's start ---


def begun(named: Named, optimizers: Optimizers) -> Begun:
    """Returns the groups' hyperparameters as strings. Leaves out values that are no number or string."""
    return [
        [
            {_NAMES: xxhash.xxh3_64_hexdigest("\n".join(sorted(names)).encode())}
            | {key: word for key, value in group.items() if (word := _word(value)) is not None}
            for group, names in zip(optimizer.param_groups, of_one, strict=True)
        ]
        for optimizer, of_one in zip(optimizers, groups_by_name(named, optimizers), strict=True)
    ]


def say_overruled(optimizers: Optimizers, script: Begun, job: Begun) -> None:
    """(a state is loaded, which takes precedence over the script) Prints the hyperparameters that the script has
    changed since the job began, with the values that the loaded groups have."""
    found: list[str] = []
    for number, (optimizer, mine, theirs) in enumerate(zip(optimizers, script, job)):
        groups = optimizer.param_groups
        for index, (own, other) in enumerate(zip_longest(mine, theirs, fillvalue=dict[str, str]())):
            group = groups[index] if index < len(groups) else {}
            which = f"group {index} of " if len(groups) > 1 else ""
            where = f"{which}optimizer {number} ({type(optimizer).__name__})"
            for key in {**own, **other}:
                if key != _NAMES and _word(group.get(key)) == own.get(key):
                    continue  # set in a step meanwhile
                if own.get(key) != other.get(key):
                    value = f"{key}={_word(group.get(key))} of {where}, not {own.get(key)}"
                    found.append(f"the parameters of {where}" if key == _NAMES else value)
    if found:
        more = f" and {len(found) - _SAID_MAX} others" if len(found) > _SAID_MAX else ""
        tell_if_possible(
            "the script has other hyperparameters than when the job began, and what the job has goes on: "
            f"{'; '.join(found[:_SAID_MAX])}{more}; to change them, set them in train_step, from a step on"
        )


def _word(value: Any) -> str | None:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    plain = isinstance(value, bool | int | float | str | None) or (
        isinstance(value, tuple | list) and all(isinstance(item, int | float) for item in value)
    )
    return str(value) if plain else None


HYPERPARAMETERS = "hyperparameters of an optimizer"
# Steps from the start of a process in which every bit of frozen parameters is compared.
_STEPS_LOOKED_AT = 3


@dataclass(kw_only=True)
class _BeforeStep:
    """State that is restored when a half-done step is dropped. Parameters are not part of it: until the optimizer steps
    they have not changed, or the journal restores them, and after it the step is not dropped."""

    objects: dict[str, Any]
    placements: dict[str, str]
    modes: list[tuple[torch.nn.Module, bool]]
    """Training mode of each module: a validation that is cut short leaves modules in eval mode."""
    iterators: list[list[Any]]
    param_groups: ParamGroups


class Stopped(NamedTuple):
    reason: str
    num_steps: int
    """Number of steps of the run that it ends. A run with more steps goes on."""


def in_common(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state without module attributes that have a different value on each replica."""
    modules = state["modules"]
    values = {path: value for path, value in modules["values"].items() if path not in modules["apart"]}
    return {**state, "modules": {**modules, "values": values}}


def _version(parameter: torch.nn.Parameter) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


def _digests_by_id(parameters: Sequence[torch.nn.Parameter]) -> dict[int, bytes]:
    return dict(zip(map(id, parameters), digests(parameters), strict=True))


class TrainerState:
    def __init__(
        self, randomness: Randomness, updates: Updates, replicate: ReconfigurableGroup | None
    ) -> None:
        """`randomness` is the channel's. `replicate`: the replicas of this rank's shard, if there are shards."""
        self.randomness = randomness
        self.updates = updates
        self.replicate = replicate
        self.stages: list[Any] = []
        self.schedules: list[Any] = []
        self.wrapped: list[torch.nn.Module] = []
        """Modules that `session.ddp` has created. A stage may contain such a module."""
        self.objects: dict[str, Any] = {}
        self.version = 0  # optimizer steps done, which is also the number of the next step
        self.present = False  # True while this rank holds a version, from its start or restored
        self.lived = False  # True once this process has run with the others and logged its sends
        self._before: _BeforeStep | None = None
        self.gradients = updates.left
        self._begun: Begun = []
        """Hyperparameters with which the script began the job."""
        self._groups: list[Kept] = []  # the optimizers' hyperparameters when the step began
        self._kept = KeptModules(())
        self._versions: dict[torch.nn.Parameter, tuple[int, int]] = {}
        """Data pointer and torch's version counter of each parameter when the step began."""
        self._changing: dict[int, torch.nn.Parameter] = {}
        """Parameters by id that no optimizer updates, but that steps change (a momentum encoder's)."""
        self._steps_here = 0
        self._digests: dict[int, bytes] | None = None
        """Digests, by id, of the frozen parameters outside of `_changing`. None: a step has not begun since the last
        load."""
        self.modules = ModuleState()
        self.settings = Settings()
        self._first: _Forms | None = None
        """The parameters at `session.run`."""
        self.iterators = Iterators(self.randomness, lambda: self.objects)
        self.checkpoints: Callable[[], Iterator[dict[str, Any]]] = lambda: iter(())
        """Yields this rank's checkpoints, the newest first."""
        self.stopped: Stopped | None = None
        """Set if the trainer ends the run with this version."""
        self.updated = False
        """True once an optimizer that is registered with the session has stepped in this process."""
        self.apart: list[str] = []
        """Paths of module attributes that have a different value on each replica (`swift_ft.train.verification`)."""

    # --- registration ---

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.updates.optimizers

    def add_stage(self, stage: Any) -> None:
        """Registers a stage. Raises UsageError for a stage or a module that is registered already."""
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
        """Returns the stages by their names in states: pipeline stages by their index, whole modules numbered in the
        order of registration."""
        whole = [stage for stage in self.stages if isinstance(stage, WholeModule)]
        keys = {str(stage.stage_index): stage for stage in self.stages if stage not in whole}
        word = "module" if keys else ""
        return keys | {f"{word}{number}": stage for number, stage in enumerate(whole)}

    def _check_early(self, what: str) -> None:
        """Raises UsageError once `session.run` has begun: a process that takes over a rank would lack the object."""
        if self.modules.remembered:
            raise UsageError(
                f"the session was given {what} in train_step: a process that replaces a lost rank begins without it; "
                "make all of them before session.run, and let steps choose which they use"
            )

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_early("an optimizer")
        self.updates.add(optimizer)

    def add_object(self, name: str, value: Any) -> None:
        """Registers an object whose state belongs to the trainer's.

        Raises UsageError if `session.run` has begun, if the name is taken, or if a state method is missing.
        """
        self._check_early(f"register({name}=...)")
        if name in self.objects:
            raise UsageError(f"register({name}=...) was called twice; use another name")
        if is_loader(value):
            number = sum(isinstance(other, RegisteredLoader) for other in self.objects.values())
            earlier = lambda: (state["objects"][name] for state in self.checkpoints())  # noqa: E731
            value = RegisteredLoader(value, number, self.iterators, earlier)
        value = as_registered(value)
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise UsageError(
                    f"register({name}=...) was given a {type(value).__name__} without {method}(); "
                    "a recovery must be able to take it back, so give it state_dict and load_state_dict"
                )
        self.objects[name] = value

    def check_complete(self) -> None:
        """Raises UsageError, in one line, if the trainer has not registered everything that a recovery needs."""
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
        for module in (*(stage.submod for stage in self.stages), *self.wrapped):
            if why := torch_private.why_ddp_is_refused(module):
                raise UsageError(why)
        self.updates.check_complete(self.objects)
        for optimizer in self.optimizers:
            fsdp.check_optimizer(optimizer)
        states_of(self.optimizers)
        held = self._optimized_parameters()
        self.updates.ties.check(held)
        if any(p.requires_grad and p not in held for p in self._parameters()):
            raise UsageError(
                "some parameters of the stages have no optimizer; pass them to session.optimizer or freeze them"
            )

    def _optimized_parameters(self) -> set[torch.nn.Parameter]:
        """Returns the parameters that the optimizers update. Raises UsageError for one that belongs to no stage,
        because a process that takes over this rank would not have it."""
        held = {p for o in self.optimizers for group in o.param_groups for p in group["params"]}
        if held.difference(self._parameters()):
            raise UsageError(
                "the optimizer updates parameters that are in no stage; put them into a stage's module"
            )
        return held

    def remember(self) -> None:
        """(all is registered, and no state is loaded yet) Remembers the state with which a new process begins."""
        self.modules.remember({key: stage.submod for key, stage in self.keyed().items()})
        self.settings.remember()
        named = self._named_parameters(sharded_too=True)
        self._first = _forms(named)
        self._begun = begun(named, self.optimizers)

    # --- one step ---

    def begin_step(self) -> None:
        """Keeps the state that a step restores if it is cut short."""
        self.modules.between_steps = None
        self.updates.begin_step(self.version)
        self.settings.begin_step()
        self.gradients.begin(self._parameters())
        for stage in self.stages:
            stage.begin_step()
        self.iterators.begin_step(self.version)
        for loader in self._loaders():
            loader.begin_step()
        objects, placements = fsdp.localized(self._places())
        self._before = _BeforeStep(
            objects=copy.deepcopy(objects),
            iterators=self.iterators.state(),
            placements=placements,
            modes=[(part, part.training) for stage in self.stages for part in stage.submod.modules()],
            param_groups=ParamGroups(self.optimizers),
        )
        self._kept.roots = [stage.submod for stage in self.stages]
        self._kept.keep(self._changing.values())
        self._versions = {p: _version(p) for p in self._parameters() if not fsdp.is_sharded(p)}
        if self._digests is None:
            self._digests = _digests_by_id(self._frozen())
        # A trainer may set them anywhere in its step (`group["lr"] = …` for this step). Ranks that were interrupted at
        # different places are replicas only with the values of the step's start.
        self._groups = [Kept(group, but=("params",)) for o in self.optimizers for group in o.param_groups]
        # The optimizer's other attributes; LR schedulers record there that it has stepped.
        self._groups += [Kept(vars(o), but=OPTIMIZERS_OWN, states=False) for o in self.optimizers]
        self.randomness.begin_step(self.version)  # undoes draws that objects made in state_dict

    def draw_as_other(self, loaders: Collection[str]) -> None:
        """(a step for another data-parallel rank has begun, under that rank's randomness) Makes the registered objects
        draw from here on what that rank's objects would. `loaders`: names of objects whose state must be loaded for
        that. All others are loaded only if there are iterators of torch's data loaders: these are created again with
        that rank's seeds."""
        before = self._before
        assert before is not None
        self.iterators.restore(before.iterators)
        objects = fsdp.globalized(copy.deepcopy(before.objects), before.placements, self._parameters())
        for name, state in objects.items():
            if isinstance(self.objects[name], RegisteredLoader):
                continue
            if before.iterators or name in loaders:
                load_object(name, self.objects[name], state)

    def end_step(self) -> None:
        """Ends the step: drops the state that was kept for a restore, and raises the version by one."""
        if self._first is not None:
            _check_first(self._first, _forms(self._named_parameters(sharded_too=True)))
        self._before, self._groups = None, []
        self.settings.end_step()
        self._learn_changing()
        self._kept.forget()
        self.gradients.end(self._parameters(), updated=self.updates.stepped > 0)
        self.updated = self.updated or self.updates.stepped > 0
        self.version += 1
        self.updates.begin_step(self.version)

    def drop_step(self) -> None:
        """Restores the state of the step's start, except for buckets that are applied: `undo` reverts these."""
        self.updates.voting = False  # the step's stack is gone, so it cannot be finished any more
        for schedule in self.schedules:
            torch_private.clear_schedule(schedule)
        for stage in self.stages:
            torch_private.reset_sharded(stage.submod)
        before, self._before = self._before, None
        if before is None:  # no step is under way
            return
        self.gradients.restore(self._parameters())
        for part, training in before.modes:
            part.training = training
        self.iterators.restore(before.iterators)
        objects = fsdp.globalized(before.objects, before.placements, self._parameters())
        for name, state in objects.items():
            if isinstance(self.objects[name], torch.amp.GradScaler):
                torch_private.forget_unscaled(self.objects[name])
            try:
                if isinstance(thing := self.objects[name], RegisteredLoader):
                    thing.drop_step()
                else:
                    load_object(name, thing, state)
            except ServiceError as error:
                self.present = False  # a restore follows, which may succeed
                tell_if_possible(f"{error}: the state of this rank is restored")
        if self.present and self._changed_otherwise():
            self.present = False  # the old values are lost; they are kept from the next step on
            self._changing |= {id(p): p for p in self._changed_silently()}
        self._kept.restore()
        self._put_back_groups()
        before.param_groups.restore()

    def standing(self) -> Standing:
        """Returns this rank's recovery offer. In the vote, it may be that the step can only be finished."""
        if not self.present:
            return Standing(version=None)
        standing = self.updates.standing(self.version)
        if (standing.version is None and standing.undo_to is None) or self.can_drop:
            return standing
        return replace(standing, version=None, undo_to=None, undo_exact=False)

    @property
    def can_drop(self) -> bool:
        """(a step is under way) Returns whether it can be dropped."""
        return self._before is None or not self._changed_otherwise()

    def _changed_otherwise(self) -> bool:
        """Returns whether anything but the session's update has changed a parameter whose old value was not kept."""
        kept = set(self._changing)
        if self.updates.begun or self.updates.partial:  # the update is undone by the journal
            kept |= {id(p) for p in self.updates.bucket_of}
        seen = any(id(p) not in kept and _version(p) != was for p, was in self._versions.items())
        return seen or self._kept.lacks_values or bool(self._changed_silently())

    def _changed_silently(self) -> list[torch.nn.Parameter]:
        """(a step is cut short) Returns frozen parameters that have changed without their version counters (`.data`),
        in this step or before it."""
        known = self._digests or {}
        frozen = [p for p in self._versions if id(p) in known and id(p) not in self._changing]
        return [p for p, now in zip(frozen, digests(frozen), strict=True) if now != known[id(p)]]

    def _frozen(self) -> list[torch.nn.Parameter]:
        """Returns the parameters that no optimizer updates, without those that steps are known to change."""
        held = self._optimized_parameters()
        return [
            p for p in self._versions if not (p in held and p.requires_grad) and id(p) not in self._changing
        ]

    def _learn_changing(self) -> None:
        """(a step is done) Finds frozen parameters that steps change. Compares all bits in the first steps only."""
        frozen, known = self._frozen(), self._digests or {}
        changing = []
        if self._steps_here < _STEPS_LOOKED_AT:
            found = _digests_by_id(frozen)
            changing = [p for p in frozen if known.get(id(p), found[id(p)]) != found[id(p)]]
            self._digests = found
        else:
            self._digests = {id(p): known[id(p)] for p in frozen if id(p) in known}
            self._digests |= _digests_by_id([p for p in frozen if id(p) not in known])
        if not self._steps_here:  # raises now if the state that a first step created cannot be saved
            split(states_of(self.optimizers))
        self._steps_here += 1
        for parameter in (*changing, *(p for p in frozen if _version(p) != self._versions[p])):
            self._changing[id(parameter)] = parameter

    def undo(self) -> list[UndoResult]:
        """(after `drop_step`) Reverts the applied part of the update. Raises ServiceError if that is impossible."""
        results = self.updates.undo()
        self._put_back_groups()  # the undo of a copied optimizer leaves them as they were when its bucket was applied
        self.updates.begin_step(self.version)
        return results

    def _put_back_groups(self) -> None:
        for group in self._groups:
            group.restore()

    def align(self) -> None:
        """(first start) Gives all replicas the weights and buffers of the first one, as DDP does.

        Each shard of a sharded tensor goes to its own replicas.
        """
        agree_on_groups(self._named_parameters(sharded_too=True), self.optimizers, self.updates.broadcast)
        for stage in self.stages:
            tensors = [*stage.submod.parameters(), *stage.submod.buffers()]
            whole = [t for t in tensors if t.layout is torch.strided and not fsdp.is_sharded(t)]
            self.updates.broadcast([tensor.detach() for tensor in whole])
            if self.replicate is not None:
                fsdp.broadcast(self.replicate, [local(t) for t in tensors if fsdp.is_sharded(t)])
        self.updates.ties.align()

    # --- checkpoints and digests ---

    def destinations(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that a copy of a replica's state is received into, by their path in `state_dict`.

        Buffers are left out: the replica's may have grown or changed type by now.
        """
        wait_for_copies()
        state = {key: value for key, value in self.shared_dict().items() if key != "modules"}
        tensors, _ = split(state | {"stages": {key: parameters for key, parameters, _ in self._halves()}})
        return tensors

    def _halves(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """Yields each stage's name, and its parameters and its buffers, as they are in states."""
        for key, stage in self.keyed().items():
            tensors, _ = fsdp.localized(state_of_module(stage.submod))
            names = {name for name, _ in stage.submod.named_parameters(remove_duplicate=False)}
            parameters = {name: tensor for name, tensor in tensors.items() if name in names}
            yield key, parameters, {name: tensor for name, tensor in tensors.items() if name not in names}

    def shared_dict(self) -> dict[str, Any]:
        return in_common(self.state_dict(whole=False))

    def state_dict(self, *, whole: bool = True) -> dict[str, Any]:
        """Returns the state with local tensors that share memory with the live ones. `placements` marks shards.
        `whole`: with this rank's own states of data loaders."""
        state = {
            "version": self.version,
            "stages": {key: state_of_module(stage.submod) for key, stage in self.keyed().items()},
            "optimizers": states_of(self.optimizers),
            "groups": groups_by_name(self._named_parameters(sharded_too=True), self.optimizers),
            "begun": self._begun,
            "objects": self._object_states(whole=whole),
            "modules": {**self.modules.state(), "apart": self.apart},
            "iterators": self.iterators.state(),
        }
        if self.stopped is not None:
            state["stopped"] = self.stopped._asdict()
        if settings := self.settings.state():
            state["settings"] = settings
        if left := self.gradients.state(self._named_parameters()):
            state["gradients"] = left
        state, placements = fsdp.localized(state)
        return {**state, "placements": placements} if placements else state

    def changed_by_updates(self) -> set[int]:
        """Returns the addresses of a device's tensors that only updates change: the optimizers' parameters and states.
        Other tensors of the state may be changed by any part of a step."""
        if accelerator_in_use() is None:
            return set()
        trained = [parameter for parameter in self._optimized_parameters() if parameter.requires_grad]
        states = [
            value
            for optimizer in self.optimizers
            for parameter in trained
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor)
        ]
        return {local(tensor).data_ptr() for tensor in (*trained, *states)}

    def parts(self) -> dict[str, Any]:
        """Returns the state that replicas must have in common, by part names for messages; objects by name."""
        state, _ = fsdp.localized(
            {
                "optimizers": states_of(self.optimizers),
                "iterators": self.iterators.state(),
                "objects": self._places(),
            }
        )
        parameters: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        for key, of_stage, others in self._halves():
            parameters |= {f"{key}.{name}": tensor for name, tensor in of_stage.items()}
            buffers |= {f"{key}.{name}": tensor for name, tensor in others.items()}
        groups = [group for optimizer in state["optimizers"] for group in optimizer["param_groups"]]
        return {
            # First, because a difference here makes everything else differ.
            HYPERPARAMETERS: [{k: v for k, v in group.items() if k != "params"} for group in groups],
            "parameters": parameters,
            "optimizer": state["optimizers"],
            "iterators of data loaders": state["iterators"],
            "a buffer": buffers,
            **self.gradients.parts(self._named_parameters(), self.updates.bucket_of, self.updates.elsewhere),
            **{f"register({name}=...)": value for name, value in sorted(state["objects"].items())},
        }

    def begun_with(self) -> dict[str, Any]:
        """(a step has begun) Returns the step's initial state, by part names for messages. The results of updates
        (parameters, optimizer state) come last, after their inputs. Does not call any object's `state_dict` again."""
        before = self._before
        assert before is not None
        told: dict[str, Any] = {
            f"register({name}=...)": state for name, state in sorted(before.objects.items())
        }
        told["iterator of a data loader"] = before.iterators
        told["attribute"] = self.modules.state()["values"]
        parameters: dict[str, Any] = {}
        updated: dict[str, Any] = {}
        for key, of_stage, buffers in self._halves():
            parameters[f"parameter {key}"], told[f"buffer {key}"] = of_stage, buffers
        for number, state in enumerate(states_of(self.optimizers)):
            for part, value in fsdp.localized(state)[0].items():
                (told if part == "param_groups" else updated)[f"optimizer {number}.{part}"] = value
        return told | parameters | updated

    def parameter_names(self) -> dict[torch.nn.Parameter, str]:
        return {parameter: name for name, parameter in self._named_parameters(sharded_too=True).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state. Raises ServiceError if it is another trainer's or another shard's, or, with its name, if one
        of the trainer's objects cannot load it."""
        wait_for_copies()
        self.modules.between_steps = None
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
        regroup(self._named_parameters(sharded_too=True), self.optimizers, state["groups"])
        placements = state.get("placements", {})
        fsdp.check_placements(self.state_dict(whole=False).get("placements", {}), placements, "state.stages.")
        state = fsdp.globalized(state, placements, self._parameters())
        for name, stage in stages.items():
            with naming(f"stage {name}"):
                load_module(stage.submod, state["stages"][name], self.modules.names_at_begin(name))
        for number, (optimizer, value) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            with naming(f"optimizer {number} ({type(optimizer).__name__})"):
                load_optimizer(optimizer, value)
        if not self.randomness.dp_rank:
            say_overruled(self.optimizers, self._begun, state["begun"])
        self._begun = state["begun"]
        self.iterators.restore(state["iterators"])
        for name, value in state["objects"].items():
            load_object(name, self.objects[name], value)
        self.modules.load(state["modules"])
        self.apart = list(state["modules"]["apart"])
        self.settings.load(state.get("settings", {}))
        self.stopped = Stopped(**state["stopped"]) if "stopped" in state else None
        self.gradients.load(self._named_parameters(), state.get("gradients", {}))
        self._before, self._groups, self._digests = None, [], None
        self.version = int(state["version"])
        self.updates.begin_step(self.version)

    def _object_states(self, *, whole: bool) -> dict[str, Any]:
        return {
            name: value.state_dict()
            if whole or not isinstance(value, RegisteredLoader)
            else value.shared_state()
            for name, value in self.objects.items()
        }

    def _places(self) -> dict[str, Any]:
        """Returns what the objects are compared by: the states, and the places of data loaders."""
        return {
            name: value.place() if isinstance(value, RegisteredLoader) else value.state_dict()
            for name, value in self.objects.items()
        }

    def _loaders(self) -> list[RegisteredLoader]:
        return [value for value in self.objects.values() if isinstance(value, RegisteredLoader)]

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for stage in self.stages for parameter in stage.submod.parameters()]

    def _named_parameters(self, *, sharded_too: bool = False) -> dict[str, torch.nn.Parameter]:
        return {
            f"{key}.{name}": parameter
            for key, stage in self.keyed().items()
            for name, parameter in stage.submod.named_parameters()
            if sharded_too or not fsdp.is_sharded(parameter)
        }

    def gradient_bytes(self) -> dict[int, int]:
        bytes_of: dict[int, int] = {}
        for stage in self.stages:
            own = sum(p.nbytes for p in stage.submod.parameters() if p.requires_grad)
            bytes_of[stage.stage_index] = bytes_of.get(stage.stage_index, 0) + own
        return bytes_of

    def digests(self) -> dict[str, str]:
        """Returns the SHA-256 of each part of the state; equal on two runs only if every bit is. Attributes with a
        value of each replica's own are left out: a process that replaces a replica begins without them."""
        state = self.shared_dict()
        parts = {"parameters": state["stages"], "optimizer": state["optimizers"], **state["objects"]}
        modules = {key: value for key, value in state["modules"].items() if key != "apart"}
        if modules["values"] or modules["gone"]:
            parts["modules"] = modules
        if "loader" in parts:
            parts["data"] = parts.pop("loader")
        out = {"rng": self.randomness.digest(self.version)}
        for name, value in parts.items():
            tensors, rest = split(value)
            out[name] = digest(tensors, json.dumps(rest))
        return out
