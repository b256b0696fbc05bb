"""Variables of the trainer's script that a step changes, and which the session does not know.

They are not captured: a new process begins with what its script makes there, a step that is cut short leaves its traces
in them, and they do not go back with a checkpoint. So the first change is said (once, on standard error), and after
a failure in which it counted the job is not exact, which is said with the variable's name.

Which variables there are is read from the step's code (`swift.runtime.reach`), whether they change from what tells
cheaply (`swift.runtime.signs`). All are looked at in the first steps of a process, at checkpoints, when a step is cut
short and at the end; those that are known to change in every step, but only quickly.

    (engine) ``begin`` → the step → ``end``, or ``drop``; ``look`` behind the last step
"""

import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from swift import events
from swift.runtime.before import memory_of
from swift.runtime.reach import Reach
from swift.runtime.signs import Look, Reads, Signs, everything, parts_of

_STEPS_LOOKED_AT = 3
_QUICKLY_S = 0.01
_SHARE = 0.02
"""Of the time, at most, goes into looks behind the first step that take longer than `_QUICKLY_S`."""
_NAMED = 3


_ANY = (
    "",
    "give it to session.register(...), or, if it need not outlive a failure, its name to session.transient('NAME')",
)
_HOMES: dict[type, tuple[str, str]] = {
    torch.optim.Optimizer: ("an optimizer ", "give it to session.optimizer(...) before session.run"),
    torch.nn.Module: (
        "a module ",
        "give it to session.module(...) before session.run, or, if nothing trains it, to session.register(...)",
    ),
}
"""What it is, and where it belongs."""


class Script:
    """One rank's. Trainer's thread only."""

    def __init__(
        self,
        told: Callable[[], Iterable[Any]],
        transient: set[str],
        differs: Callable[[int, str], None],
        *,
        warns: bool,
        untellable: Callable[[], Mapping[str, Any]],
        held: Callable[[Reads], Mapping[str, dict[str, Any]]],
    ) -> None:
        """`told`: what the session knows. `transient`: names that need not outlive a failure. `differs(step, words)`:
        the job is not exact from there on. `warns`: this rank speaks for all. `untellable`: attributes of modules that
        are of no state, because nobody can tell what they are. `held`: numbers of data sets that registered objects
        hold, and that their states lack."""
        self._told = told
        self._untellable = untellable
        self._held = held
        self._numbers: Mapping[str, dict[str, Any]] | None = None
        """In this look: what `held` gives."""
        self._transient = transient
        self._differs = differs
        self._warns = warns
        self._reach: Reach | None = None
        self._code: Callable[[], Iterable[Any]] = tuple
        self._known: set[str] = set()  # names of what changes
        self._homes: dict[str, tuple[str, str]] = {}
        self._ids: set[int] = set()
        self._memory: set[int] = set()
        """Where tensors lie that the session was told of."""
        self._roots: set[str] = set()  # the variables that they are in
        self._all: Signs = {}  # when all was looked at last
        self._begun: Signs | None = None
        """(in a step) What is known to change, as it was at its start."""
        self._steps = 0
        self._not_before = 0.0
        """(monotonic time) The next look, but for those that must be."""
        self._next = 0  # the step that the variables are at
        self._stale: tuple[int, str] | None = None
        """From where on they are of another step than the state, and why."""
        self._amiss: set[str] = set()
        self._to_say: list[tuple[int, str]] = []

    def begin_again(self) -> None:
        """(before the first step) This process has done steps before: what it has of them is not that of a new one."""
        self._next = -1

    def begin(
        self, step: int, train_step: Callable[[int], object], besides: Callable[[], Iterable[Any]]
    ) -> None:
        """`besides`: other code of the trainer's that the step runs (forwards, loss functions)."""
        if self._reach is None:
            self._code = lambda: (train_step, *besides())
            self._read()
        if step != self._next:
            why = "began anew with the process" if not self._steps else f"is of step {self._next}"
            self._stale = self._stale or (step, why)
            self._next = step
            self._say_stale(self._known)
        self._say()
        self._begun = self._all if self._steps < _STEPS_LOOKED_AT else self._look(self._roots, quick=True)

    def end(self, step: int, *, checkpoint: bool) -> None:
        """The step is done. `checkpoint`: at the version that it has made."""
        self._begun = None  # what is dropped between two steps has changed nothing
        self._next = step + 1
        self._steps += 1
        due = checkpoint or self._steps <= _STEPS_LOOKED_AT
        if self._steps == 1 or (due and time.monotonic() >= self._not_before):
            self.look()
        if self._steps <= _STEPS_LOOKED_AT:
            self._read()  # what a first step makes, imports, hangs upon a module

    def look(self) -> None:
        """At all of them, whether they have changed since the last time."""
        if self._reach is None:
            return
        began = time.monotonic()
        before, self._all = self._all, self._look()
        self._learn(self._changed(before, self._all))
        self._say()
        now = time.monotonic()
        self._not_before = now + (now - began) / _SHARE if now - began > _QUICKLY_S else now

    def drop(self, step: int) -> None:
        """The step was cut short. What nobody has known of may have changed before it, and is named all the same."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        before, self._all = self._all, self._look()
        if begun is before:
            changed = self._changed(before, self._all)
        else:
            known = set(self._roots)
            changed = self._changed(_without(known, before), _without(known, self._all))
            changed |= self._changed(begun, self._look(known))
        if changed:
            self._learn(changed)
            self._to_say.append((step, self._words(changed, "was changed by a step that was cut short")))

    def loads(self, attribute: str) -> bool:
        """The step's code may look at an attribute of that name, or call it."""
        return self._reach is None or self._reach.loads(attribute)

    @property
    def amiss(self) -> str:
        """The names of what is of another step than the state."""
        return _listed(sorted(self._amiss))

    # --- inside ---

    def _read(self) -> None:
        """Which variables there are by now; they are what they are."""
        before, self._reach = self._reach, Reach(self._code(), self._told_ids())
        self._reach.variables["parameter"] = self._attributes_of_parameters
        self._reach.variables["module (attributes)"] = self._attributes_of_modules
        for path in self._held(self._reach.reads):
            self._reach.variables[path] = partial(self._numbers_of, path)
        if before is None or not self._reach.same_as(before):
            self._all = self._look()

    def _attributes_of_parameters(self) -> types.SimpleNamespace:
        """``p.mean``, ``p.seen``: the session keeps the values of parameters, and not what hangs on them."""
        assert self._reach is not None
        attributes: dict[str, list[Any]] = {}
        for module in self._told():
            for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
                for name, value in parts_of(parameter, everything):
                    if self._reach.loads(name):
                        attributes.setdefault(name, []).append(value)
        return types.SimpleNamespace(**attributes)

    def _attributes_of_modules(self) -> types.SimpleNamespace:
        """``module.ids``: an iterator, an object with slots."""
        attributes: dict[str, list[Any]] = {}
        for path, value in self._untellable().items():
            attributes.setdefault(path.rpartition(".")[2], []).append(value)
        return types.SimpleNamespace(**attributes)

    def _numbers_of(self, path: str) -> types.SimpleNamespace:
        """``loader.dataset``: a count, an array of priorities."""
        assert self._reach is not None
        if self._numbers is None:
            self._numbers = self._held(self._reach.reads)
        return types.SimpleNamespace(**self._numbers.get(path, {}))

    def _look(self, roots: set[str] | None = None, *, quick: bool = False) -> Signs:
        """At all, or at `roots`. `quick`: large ones are taken for changed."""
        assert self._reach is not None
        if roots is not None and not roots:
            return {}
        if roots is None:
            self._ids = self._told_ids()
        self._numbers = None
        look = Look(self._ids, self._reach.reads, self._memory, quick=quick)
        for name, get in self._reach.variables.items():
            if (roots is None or name in roots) and self._transient.isdisjoint(_words_of(name)):
                look.variable(name, get())
        return look.signs

    def _told_ids(self) -> set[int]:
        ids: set[int] = set()
        self._memory = set()
        for thing in self._told():
            ids.add(id(thing))
            if isinstance(thing, torch.nn.Module):
                for part in thing.modules():
                    tensors = [
                        t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None
                    ]
                    ids.update(map(id, (part, *tensors, *vars(part).values())))
                    self._memory |= memory_of(tensors)
            elif isinstance(thing, torch.optim.Optimizer):
                ids.update(map(id, vars(thing).values()))
                for group in thing.param_groups:
                    ids.update((id(group), id(group["params"])))
            elif isinstance(thing, dict | list | tuple | deque):
                ids.update(map(id, thing.values() if isinstance(thing, dict) else thing))
            else:
                ids.update(map(id, getattr(thing, "__dict__", {}).values()))
        return ids - set(map(id, self._untellable().values()))

    def _say(self) -> None:
        """Not from within `drop`: a failure is being handled there."""
        to_say, self._to_say = self._to_say, []
        for version, words in to_say:
            self._differs(version, words)

    def _changed(self, before: Signs, now: Signs) -> set[str]:
        """Names, as a reader would write them: to the first attribute, without what is inside of containers."""
        changed = set()
        for path in before.keys() | now.keys():
            if before.get(path, Signs) == now.get(path, Signs):
                continue
            root, _, rest = path.partition("\0")
            self._roots.add(root)
            parts = rest.removeprefix(".").split(".")
            words = _words_of(root)
            if self._transient.isdisjoint((*words, *parts, f"{words[0]}.{parts[0]}")):
                changed.add(self._named(root, parts[0]))
        return changed

    def _named(self, variable: str, first: str) -> str:
        """`first`: what is changed of it. Of an optimizer or a module no more is said than that."""
        assert self._reach is not None
        name, get = _words_of(variable)[0], self._reach.variables.get(variable)
        things = {name: get() if get is not None else None}
        if first and not first.isdigit() and not first.startswith("#"):
            things[f"{name}.{first}"] = getattr(things[name], first, None)
        for called, thing in things.items():
            for kind, home in _HOMES.items():
                if isinstance(thing, kind):
                    self._homes[called] = home
                    return called
        return called

    def _learn(self, changed: set[str]) -> None:
        new = sorted(changed - self._known)
        if not new:
            return
        self._known.update(new)
        events.emit("variables_changed", step=self._next - 1, names=new)
        by_home: dict[tuple[str, str], list[str]] = {}
        for name in new:
            by_home.setdefault(self._homes.get(name, _ANY), []).append(name)
        for (what, home), names in by_home.items() if self._warns else ():
            print(
                f"swift: train_step changes {_listed(names)}, {what}which the session does not know: {home}",
                file=sys.stderr,
            )
        self._say_stale(changed)

    def _say_stale(self, changed: set[str]) -> None:
        """What changes is of another step than the state."""
        if self._stale is not None and changed:
            (step, why), self._stale = self._stale, None
            self._to_say.append((step, self._words(changed, why)))

    def _words(self, names: set[str], why: str) -> str:
        self._amiss |= names
        homes = {self._homes.get(name, _ANY)[1] for name in names}
        return f"{_listed(sorted(names))} of the script {why}: {homes.pop() if len(homes) == 1 else _ANY[1]}"


def _without(roots: set[str], signs: Signs) -> Signs:
    return {path: sign for path, sign in signs.items() if path.partition("\0")[0] not in roots}


def _words_of(root: str) -> list[str]:
    """The names by which `transient` may mean a variable, the first its own without which of several it is."""
    name = root.partition(" (")[0]
    return [name, *name.split(".")]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
