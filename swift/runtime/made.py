"""What modules are, besides what they keep: of which classes, with which hooks; and functions, by their names.

A step may hang a hook, take another activation or another loss function. No process can make these for another one
(nothing is imported or unpickled for a state), so they are told by names, and compared with what the other process has
made itself. What is hung by torch or by the session is not told: it hangs that itself.

    (run) ``Begun`` → (states) ``changes`` … (load) ``put_back``, ``apart``
"""

import functools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from swift.runtime import _torch_hooks

HOOKS = "hooks"
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_NOT_TOLD = ("torch", "swift")
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHOWN = 80

Hung = dict[str, tuple[dict[int, Any], dict[int, Any]]]
"""By kind: the dictionary that hooks are in, and a copy."""


def name_of(value: Any) -> str:
    """Of a function, a method, a class or a `functools.partial`: what tells it from others in any process.

    Of a lambda or a closure also its line, and the numbers and strings that it has taken along. Empty: it is no such
    thing.
    """
    if isinstance(value, torch.nn.Module):
        return ""
    if type(value) is functools.partial:
        given = [*value.args, *(pair for pair in sorted(value.keywords.items()))]
        return f"partial of {name_of(value.func) or kind_of(value.func)} ({', '.join(map(_shown, given))})"
    name = _qualified(value)
    if isinstance(value, types.FunctionType) and "<" in name:
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        taken = [f"{variable}={_shown(_content(cell))}" for variable, cell in cells.items()]
        return " ".join((name, *taken, *map(_shown, value.__defaults__ or ())))
    return name


def _qualified(value: Any) -> str:
    if isinstance(value, types.MethodType):
        owner = value.__self__
        return f"{_qualified(value.__func__)} of {_qualified(owner) if isinstance(owner, type) else kind_of(owner)}"
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not callable(value) or not isinstance(name, str):
        return ""
    code = getattr(value, "__code__", None)
    line = f" (line {code.co_firstlineno})" if "<" in name and code is not None else ""
    return f"{getattr(value, '__module__', None)}.{name}{line}"


def kind_of(value: Any) -> str:
    """Its class, by module and name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _shown(value: Any) -> str:
    if type(value) is tuple:
        return "=".join(map(_shown, value))
    return repr(value)[:_SHOWN] if isinstance(value, _PLAIN) else kind_of(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return cell


def class_of(module: torch.nn.Module) -> str:
    """A lazy module is what its first forward makes of it."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        kind = module.cls_to_become
    return f"{kind.__module__}.{kind.__qualname__}"


def told_hooks(
    hooks: Iterable[tuple[str, dict[int, Any]]], begun: Mapping[int, Any] | None = None
) -> list[str]:
    """By their names. `begun`: those with which the process began, by id; another one of the same code may do other
    things. None: all."""
    return [
        f"{kind} {_qualified(hook) or kind_of(hook)}{'' if begun is None or id(hook) in begun else ', anew'}"
        for kind, hung in hooks
        for hook in hung.values()
        if _is_own(hook)
    ]


def _is_own(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or ""
    return module.partition(".")[0] not in _NOT_TOLD


def hung_on(module: torch.nn.Module) -> Hung:
    """Its hooks, to be put back."""
    kinds = (*_torch_hooks.hooks_by_kind(module), *_torch_hooks.hook_flags(module))
    return {kind: (hooks, hooks.copy()) for kind, hooks in kinds if hooks}


def rehung(module: torch.nn.Module, was: Hung) -> bool:
    """A hook was hung since, or taken off."""
    return any(list(hooks) != list(wanted) for hooks, wanted in _wanted(module, was))


def hang_again(module: torch.nn.Module, was: Hung) -> bool:
    """Takes off what was hung since, and hangs what was taken off. Returns whether there was any."""
    if not was and not _torch_hooks.has_hooks(module):
        return False
    changed = [(hooks, wanted) for hooks, wanted in _wanted(module, was) if fill_hooks(hooks, wanted)]
    for kind, flags in _torch_hooks.hook_flags(module) if changed else ():
        kept = was[kind][1] if kind in was else {}
        flags.update({key: flag for key, flag in kept.items() if any(key in wanted for _, wanted in changed)})
    return bool(changed)


def fill_hooks(hooks: dict[int, Any], wanted: Mapping[int, Any]) -> bool:
    """Makes the one as the other is. Returns whether it was not.

    Not if some were taken off and others hung: whoever hangs his own anew in each step has the handles of these, and
    takes them off the next time. Those of before he could not take off any more.
    """
    if list(hooks) == list(wanted) or (hooks.keys() - wanted.keys() and wanted.keys() - hooks.keys()):
        return False
    hooks.clear()
    hooks.update(wanted)
    return True


def _wanted(module: torch.nn.Module, was: Hung) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """The dictionaries, and what is to be in them. What is torch's stays as it is."""
    now = dict(_torch_hooks.hooks_by_kind(module))
    for kind in {**was, **now}.keys() - {kind for kind, _ in _torch_hooks.hook_flags(module)}:
        hooks, before = was.get(kind, (now.get(kind, {}), {}))
        hooks = now.get(kind, hooks)
        wanted = {key: hook for key, hook in before.items() if key in hooks or _is_own(hook)}
        wanted |= {key: hook for key, hook in hooks.items() if key not in before and not _is_own(hook)}
        yield hooks, wanted


def same_parameters(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Submodules (or None) that have the same ones: each can stand for the other."""
    mine, theirs = (
        {id(p) for module in modules if module is not None for p in module.parameters()}
        for modules in (one, other)
    )
    return mine == theirs


class Begun:
    """What the modules of a process were when it began, by their paths; hooks at ``path.hooks``."""

    def __init__(
        self,
        told: dict[str, Any],
        modules: Mapping[str, torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        self._told = told
        self._modules = dict(modules)
        self._slots = {path: dict(module._modules) for path, module in modules.items()}
        self._hung = {path: hung_on(module) for path, module in modules.items()}
        kinds = [hooks for hung in self._hung.values() for hooks, _ in hung.values()]
        kinds += [hooks for optimizer in optimizers for _, hooks in _torch_hooks.optimizer_hooks(optimizer)]
        self.hooks = {id(hook): hook for hooks in kinds for hook in hooks.values()}

    def changes(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """What is another one by now; None: it is not there any more."""
        told = self._told
        changed = {path: words for path, words in now.items() if told.get(path) != words}
        return changed | {path: None for path in told if path not in now}

    def apart(self, now: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
        """Paths at which this process has another one than that of which `changes` are told."""
        wanted = {path: words for path, words in {**self._told, **changes}.items() if words is not None}
        return sorted(path for path in {**wanted, **now} if wanted.get(path) != now.get(path))

    def put_back(
        self, modules: Mapping[str, torch.nn.Module], now: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> bool:
        """Makes what is to be as it was when this process began so again. Returns whether anything has changed."""
        done = False
        for path in self.apart(now, changes):
            holder_path, _, name = path.rpartition(".")
            module = modules.get(holder_path)
            if path in changes or module is None or module is not self._modules.get(holder_path):
                continue
            if name == HOOKS and name not in module._modules and name not in self._slots[holder_path]:
                done |= hang_again(module, self._hung[holder_path])
            else:
                done |= fill_slots(module, self._slots[holder_path], {name})
        return done


def fill_slots(
    module: torch.nn.Module, was: Mapping[str, torch.nn.Module | None], names: Iterable[str]
) -> bool:
    """Gives it its submodules of these names again. Returns whether one was another, and both have no parameters."""
    slots: Any = module._modules
    names = [name for name in names if slots.get(name, slots) is not was.get(name, slots)]
    if not names or not same_parameters(map(slots.get, names), map(was.get, names)):
        return False
    wanted = {
        name: was[name] if name in names else slots[name] for name in was if name in names or name in slots
    }
    wanted |= {name: part for name, part in slots.items() if name not in was and name not in names}
    slots.clear()
    slots.update(wanted)
    return True
