"""Which variables a function reaches by name: those of its script, of its closures, of objects that it uses.

Code of the trainer's own is read (its bytecode: which names it loads), and what it calls by name is followed. Installed
packages are not read. A variable that is only ever assigned is not found: nothing in a step depends on it.
"""

import abc
import builtins
import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any, Generic, Protocol

import numpy as np
import torch

import swift
from swift.runtime.signs import everything, parts_of

_LIBRARIES = tuple(str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("purelib", "platlib"))
_NOT_READ = (
    *(str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("stdlib", "platstdlib")),
    *(str(Path(package.__file__).parent) for package in (torch, swift) if package.__file__),
)
_LOADS_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_LOADS_CELL = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_LOADS_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_IMPORTS = {"IMPORT_NAME", "IMPORT_FROM"}
_ALL_ATTRIBUTES = {"getattr", "vars", "__dict__", "asdict", "replace", "deepcopy", "copy"}
"""Whoever uses these may look at any attribute."""

_WITHOUT_READERS = (object, abc.ABC, Generic, Protocol, torch.nn.Module, torch.utils.data.Dataset)
"""Bases whose own code looks at no attribute of a class that derives from them."""
_ENVIRONMENT = {"environ", "getenv", "putenv"}
_LEAVES = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, np.ndarray, np.generic)
_VISITED_MAX = 50_000

Get = Callable[[], Any]
_MISSING = object()
_CODE = (types.FunctionType, types.MethodType, functools.partial, type)


class Reach:
    """``variables``: by name, how to get the value that they have now. ``reads``: of an object's attributes."""

    def __init__(self, roots: Iterable[Any], told: Container[int] = ()) -> None:
        """`told`: ids of what the session was told of, which is no variable, though its code is read."""
        roots = list(roots)
        self.variables: dict[str, Get] = {}
        self._attributes: set[str] = set()
        self._classes: set[type] = set()
        self._kinds: set[type] = set()  # those that were gone through
        self._packages = tuple(filter(None, map(_package_of, roots)))
        self._modules: dict[str, types.ModuleType] = {}
        self._words: set[str] = set()
        self._places: set[tuple[int, str]] = set()
        self._names: dict[str, int] = {}
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # so that no id is used twice
        for root in roots:
            if id(root) in told:
                self._follow(root, type(root).__name__)
            else:
                self._called(root)
        for name, module in self._modules.items():
            self._module(name, module)
        if not _ENVIRONMENT.isdisjoint(self._attributes):
            words = sorted(self._words)
            self.variables["os.environ"] = lambda: {
                word: os.environ.get(word) for word in words if word in os.environ
            }
        self._kept.clear()  # from here on nothing lives longer for having been looked at

    def reads(self, kind: type, attribute: str) -> bool:
        """Code that is read looks at the attribute, or code that is not may do so."""
        return kind not in self._classes or self.loads(attribute)

    def same_as(self, other: "Reach") -> bool:
        """They see the same."""
        mine, theirs = ((r.variables.keys(), r._attributes, r._classes) for r in (self, other))
        return mine == theirs

    def loads(self, attribute: str) -> bool:
        """Code that is read loads it, or perhaps any attribute, from something."""
        return attribute in self._attributes or not _ALL_ATTRIBUTES.isdisjoint(self._attributes)

    def _own(self, path: str | None) -> bool:
        """Code in that file is the trainer's: it is no installed package's, or the script is of the same package."""
        if not path or path.startswith("<frozen"):
            return False
        return not path.startswith((*_LIBRARIES, *_NOT_READ)) or path.startswith(self._packages)

    def _is_own(self, kind: type) -> bool:
        module = sys.modules.get(kind.__module__)
        return module is not None and self._own(getattr(module, "__file__", None))

    def _follow(self, value: Any, name: str) -> None:
        """Reads the code that `value` is, or that its class is."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, types.FunctionType):
            self._function(value, name)
        elif isinstance(value, types.MethodType):
            self._variable("self" if name == value.__name__ else name.partition(".")[0], value.__self__)
            self._follow(value.__func__, name)
        elif isinstance(value, functools.partial):
            self._follow(value.func, name)
            for argument, part in (*zip(_arguments(value.func), value.args), *value.keywords.items()):
                self._variable(argument, part)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            if self._own(getattr(value, "__file__", None)):
                self._modules[name] = value
        elif (inner := _wrapped(value)) is not None:
            self._called(inner)
        else:
            self._class(type(value))

    def _called(self, value: Any) -> None:
        """By no name: a step, a hook, what a decorator calls."""
        name = getattr(value, "__name__", type(value).__name__)
        if isinstance(value, _CODE):
            self._follow(value, name)
        else:
            self._variable(name, value)

    def _variable(self, name: str, value: Any, get: Get | None = None, of: Any = None) -> None:
        """`of`: the cell, or the names, that it is in; a variable of the same name in another place is another one."""
        place = (id(value if of is None else of), name)
        other = isinstance(value, types.FunctionType | types.ModuleType | types.BuiltinFunctionType | type)
        if not other and place not in self._places:
            self._places.add(place)
            number = self._names[name] = self._names.get(name, 0) + 1
            self.variables[name if number == 1 else f"{name} ({number})"] = get or (lambda: value)
        self._follow(value, name)
        self._objects_in(value, name)

    def _objects_in(self, value: Any, name: str) -> None:
        """The classes of objects that hang below it: a step may call their methods."""
        left = [value]
        while left and len(self._kept) < _VISITED_MAX:
            for _, part in parts_of(left.pop(), everything):
                if id(part) not in self._seen and not isinstance(part, _LEAVES):
                    self._follow(part, name)
                    left.append(part)

    def _function(self, function: types.FunctionType, name: str) -> None:
        if (inner := _wrapped(function)) is not None:
            self._called(inner)
        if not self._own(function.__code__.co_filename):
            for cell in function.__closure__ or ():  # a package's decorator that does not say what it wraps
                if callable(inner := _content(cell)) and not isinstance(inner, type):
                    self._called(inner)
            return
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self._code(function.__code__, cells, function.__globals__)
        defaults = function.__defaults__ or ()
        last = _arguments(function)[: function.__code__.co_argcount][-len(defaults) :]
        for argument, value in (*zip(last, defaults), *(function.__kwdefaults__ or {}).items()):
            self._variable(argument, value)
        self._namespace(function.__name__, function, lambda key, _: not key.startswith("__"))

    def _code(self, code: types.CodeType, cells: dict[str, types.CellType], names: dict[str, Any]) -> None:
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _LOADS_ATTRIBUTE:
                self._attributes.add(name)
            elif instruction.opname in _LOADS_CELL and name in cells:
                cell = cells[name]
                self._variable(name, _content(cell), functools.partial(_content, cell), cell)
            elif instruction.opname in _LOADS_GLOBAL:
                self._attributes.add(name)  # of a module of the trainer's own, or `getattr`
                if name == "globals":
                    for each in [each for each in names if not each.startswith("__")]:
                        self._variable(each, names[each], functools.partial(names.get, each), names)
                if name in names or not hasattr(builtins, name):  # perhaps a step makes it
                    self._variable(name, names.get(name), functools.partial(names.get, name), names)
            elif instruction.opname in _IMPORTS:
                self._attributes.add(name)
                if (module := sys.modules.get(name)) is not None:
                    self._follow(module, name)
        self._words.update(word for word in code.co_consts if isinstance(word, str))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._code(inner, cells, names)

    def _class(self, kind: type) -> None:
        """All of its methods: which one a step calls is not asked."""
        if kind in self._kinds:
            return
        self._kinds.add(kind)
        for each in kind.__mro__:
            if id(each) in self._seen and each is not kind:
                continue
            self._seen.add(id(each))
            if not self._is_own(each):
                continue
            if all(base in _WITHOUT_READERS or self._is_own(base) for base in each.__mro__):
                self._classes.add(each)
            for name, value in list(vars(each).items()):
                for function in _functions_of(value):
                    self._follow(function, name)
            self._namespace(each.__name__, each, _is_attribute)

    def _namespace(self, name: str, owner: Any, shows: Callable[[str, Any], bool]) -> None:
        """The attributes that a function or a class has by then."""

        def now() -> types.SimpleNamespace:
            return types.SimpleNamespace(**{k: v for k, v in vars(owner).items() if shows(k, v)})

        if vars(now()):
            self._variable(name, now(), now, owner)

    def _module(self, name: str, module: types.ModuleType) -> None:
        for attribute in list(vars(module)):
            if attribute in self._attributes and not attribute.startswith("__"):
                get = functools.partial(vars(module).get, attribute)
                self._variable(f"{name}.{attribute}", get(), get, module)


def _is_attribute(name: str, value: Any) -> bool:
    """Of a class: no method, and nothing that is another thing where it is looked up."""
    return not name.startswith("__") and not _functions_of(value) and not hasattr(value, "__get__")


def _functions_of(value: Any) -> list[types.FunctionType]:
    if isinstance(value, property):
        parts: Iterable[Any] = (value.fget, value.fset)
    elif isinstance(value, staticmethod | classmethod):
        parts = (value.__func__,)
    elif isinstance(value, functools.cached_property):
        parts = (value.func,)
    else:
        parts = (value,)
    return [part for part in parts if isinstance(part, types.FunctionType)]


def _wrapped(value: Any) -> Any:
    """What a decorator has wrapped."""
    return getattr(value, "__dict__", {}).get("__wrapped__")


def _arguments(function: Any) -> tuple[str, ...]:
    """The names of a function's arguments."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code.co_varnames[isinstance(function, types.MethodType) :] if code is not None else ()


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _package_of(root: Any) -> str:
    """The directory of the installed package that a function is of; "": of none."""
    root = getattr(root, "__func__", root)
    path = getattr(getattr(root, "__code__", None), "co_filename", "")
    for library in _LIBRARIES:
        if path.startswith(library) and not path.startswith(_NOT_READ):
            return str(Path(library, Path(path).relative_to(library).parts[0]))
    return ""
