"""Variables of the trainer's script that a step changes, and of which the session was not told.

They are not captured: a new process begins with what its script makes there, a step that is cut short leaves its traces
in them, and they do not go back with a checkpoint. So the first change is said (once, on standard error), and after
a failure in which it counted the job is not exact, which is said with the variable's name.

Which variables there are is read from the step's code (`swift.runtime.reach`), whether they change from what tells
cheaply (`swift.runtime.signs`). All are looked at in the first steps of a process and at every checkpoint, those that
are known to change in every step.

    (engine) ``begin`` → the step → ``end``, or ``drop``; ``look`` behind the last step
"""

import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from swift import events
from swift.runtime.before import memory_of
from swift.runtime.reach import Reach
from swift.runtime.signs import Look, Signs, parts_of

_STEPS_LOOKED_AT = 3
_NAMED = 3


class Script:
    """One rank's. Trainer's thread only."""

    def __init__(
        self,
        told: Callable[[], Iterable[Any]],
        transient: set[str],
        differs: Callable[[int, str], None],
        *,
        warns: bool,
    ) -> None:
        """`told`: what the session knows. `transient`: names that need not outlive a failure. `differs(step, words)`:
        the job is not exact from there on. `warns`: this rank speaks for all."""
        self._told = told
        self._transient = transient
        self._differs = differs
        self._warns = warns
        self._reach: Reach | None = None
        self._code: Callable[[], Iterable[Any]] = tuple
        self._known: set[str] = set()  # names of what changes
        self._ids: set[int] = set()
        self._memory: set[int] = set()
        """Where tensors lie that the session was told of."""
        self._roots: set[str] = set()  # the variables that they are in
        self._all: Signs = {}  # when all was looked at last
        self._begun: Signs = {}
        self._steps = 0
        self._next = 0  # the step that the variables are at
        self._stale: tuple[int, str] | None = None
        """From where on they are of another step than the state, and why."""
        self._amiss: set[str] = set()
        self._to_say: list[tuple[int, str]] = []

    def begin(
        self, step: int, train_step: Callable[[int], object], besides: Callable[[], Iterable[Any]] = tuple
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
        self._begun = self._all if self._steps < _STEPS_LOOKED_AT else self._look(self._roots)

    def end(self, step: int, *, checkpoint: bool) -> None:
        """The step is done. `checkpoint`: at the version that it has made."""
        self._begun = {}  # what is dropped between two steps has changed nothing
        self._next = step + 1
        self._steps += 1
        if self._steps <= _STEPS_LOOKED_AT or checkpoint:
            self.look()
        if self._steps <= _STEPS_LOOKED_AT:
            self._read()  # what a first step makes, imports, hangs upon a module

    def look(self) -> None:
        """At all of them, whether they have changed since the last time."""
        if self._reach is None:
            return
        before, self._all = self._all, self._look()
        self._learn(self._changed(before, self._all))
        self._say()

    def drop(self, step: int) -> None:
        """The step was cut short."""
        if self._reach is None or not self._begun:
            return
        now = self._look({path.partition("\0")[0] for path in self._begun})
        changed = self._changed(self._begun, now)
        self._begun = {}
        if changed:
            self._learn(changed)
            self._to_say.append((step, self._words(changed, "was changed by a step that was cut short")))

    @property
    def amiss(self) -> str:
        """The names of what is of another step than the state."""
        return _listed(sorted(self._amiss))

    # --- inside ---

    def _read(self) -> None:
        """Which variables there are by now; they are what they are."""
        before, self._reach = self._reach, Reach(self._code(), self._told_ids())
        self._reach.variables["parameter"] = self._attributes_of_parameters
        if before is None or not self._reach.same_as(before):
            self._all = self._look()

    def _attributes_of_parameters(self) -> types.SimpleNamespace:
        """``p.mean``, ``p.seen``: the session keeps the values of parameters, and not what hangs on them."""
        assert self._reach is not None
        found: dict[str, list[Any]] = {}
        for module in self._told():
            for parameter in module.parameters() if isinstance(module, torch.nn.Module) else ():
                for name, value in parts_of(parameter):
                    if self._reach.loads(name):
                        found.setdefault(name, []).append(value)
        return types.SimpleNamespace(**found)

    def _look(self, roots: set[str] | None = None) -> Signs:
        assert self._reach is not None
        if roots is not None and not roots:
            return {}
        if roots is None:
            self._ids = self._told_ids()
        look = Look(self._ids, self._reach.reads, self._memory)
        for name, get in self._reach.variables.items():
            if roots is None or name in roots:
                look.variable(name, get())
        return look.signs

    def _told_ids(self) -> set[int]:
        found: set[int] = set()
        self._memory = set()
        for thing in self._told():
            found.add(id(thing))
            if isinstance(thing, torch.nn.Module):
                for part in thing.modules():
                    tensors = [
                        t for t in (*part._parameters.values(), *part._buffers.values()) if t is not None
                    ]
                    found.update(map(id, (part, *tensors, *vars(part).values())))
                    self._memory |= memory_of(tensors)
            elif isinstance(thing, torch.optim.Optimizer):
                found.update(map(id, vars(thing).values()))
                for group in thing.param_groups:
                    found.update((id(group), id(group["params"])))
            elif isinstance(thing, dict | list | tuple | deque):
                found.update(map(id, thing.values() if isinstance(thing, dict) else thing))
            else:
                found.update(map(id, getattr(thing, "__dict__", {}).values()))
        return found

    def _say(self) -> None:
        """Not from within `drop`: a failure is being handled there."""
        to_say, self._to_say = self._to_say, []
        for version, words in to_say:
            self._differs(version, words)

    def _changed(self, before: Signs, now: Signs) -> set[str]:
        """Names, as a reader would write them: to the first attribute, without what is inside of containers."""
        found = set()
        for path in before.keys() | now.keys():
            if before.get(path, Signs) == now.get(path, Signs):
                continue
            root, _, rest = path.partition("\0")
            self._roots.add(root)
            parts = rest.removeprefix(".").split(".")
            root = root.partition(" (")[0]  # which of several of that name
            if self._transient.isdisjoint((root, *root.split("."), *parts, f"{root}.{parts[0]}")):
                inside = not parts[0] or parts[0].isdigit() or parts[0].startswith("#")
                found.add(root if inside else f"{root}.{parts[0]}")
        return found

    def _learn(self, changed: set[str]) -> None:
        new = sorted(changed - self._known)
        if not new:
            return
        self._known.update(new)
        events.emit("variables_changed", step=self._next - 1, names=new)
        if self._warns:
            print(
                f"swift: train_step changes {_listed(new)}, of which the session was not told: give it to "
                "session.register(...), or, if it need not outlive a failure, its name to session.transient('NAME')",
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
        return (
            f"{_listed(sorted(names))} of the script {why}: give it to session.register(...), or its name to "
            "session.transient('NAME')"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
