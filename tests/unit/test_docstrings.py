"""What docstrings of the public API must say: which errors they raise."""

import ast
import builtins
import inspect
from collections.abc import Iterator

import pytest

import swift_ft

OF_ANYBODY = {"AssertionError", "AttributeError", "StopIteration"}
"""A bug of the caller's or ours, and what Python's own protocols raise."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_names(thing: object) -> Iterator[str]:
    """A function or class without a docstring, and the methods of it that have none and inherit none."""
    if not inspect.getdoc(thing):
        yield getattr(thing, "__name__", "")
    for name, member in inspect.getmembers(thing) if inspect.isclass(thing) else ():
        is_public = not name.startswith("_") and (callable(member) or isinstance(member, property))
        if is_public and not inspect.getdoc(member):
            yield f"{getattr(thing, '__name__', '')}.{name}"


@pytest.mark.parametrize("name", swift_ft.__all__)
def test_what_is_public_has_a_docstring(name: str) -> None:
    assert list(public_names(getattr(swift_ft, name))) == []


# --- errors ---


def raised(node: ast.AST, *, caught: bool = False) -> Iterator[str]:
    """The classes of errors that a function raises by itself, but for those where a handler of its own stands around:
    it may be the one that takes them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition | ast.Lambda):
            continue
        within = caught or (isinstance(node, ast.Try) and bool(node.handlers) and child in node.body)
        if isinstance(child, ast.Raise) and not within:
            made = child.exc.func if isinstance(child.exc, ast.Call) else child.exc
            name = made.attr if isinstance(made, ast.Attribute) else getattr(made, "id", "")
            if name[:1].isupper():
                yield name
        yield from raised(child, caught=within)


def is_told(error: str, docstring: str) -> bool:
    """By its own name or by that of the kind of error of Python's that it is."""
    kinds = getattr(getattr(builtins, error, None), "__mro__", ())
    names = {error, *(kind.__name__ for kind in kinds)} - {"Exception", "BaseException", "object"}
    return any(name in docstring for name in names)


def untold_errors(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[str]:
    """Public functions whose docstring leaves out an error. ``As `OTHER`.`` says what another one says, and an error of
    a constructor may be told by its class."""
    for node in tree.body:
        if not isinstance(node, Definition) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from untold_errors(node, f"{prefix}{node.name}.")
            continue
        told = ast.get_docstring(node) or ""
        if not told or "As `" in told:
            continue
        if node.name == "__init__":
            told += ast.get_docstring(tree) or ""
        for error in sorted(set(raised(node)) - OF_ANYBODY):
            if not is_told(error, told):
                yield f"{prefix}{node.name} raises {error}"


@pytest.mark.parametrize("name", swift_ft.__all__)
def test_docstrings_name_the_errors(name: str) -> None:
    tree = ast.parse(inspect.getsource(getattr(swift_ft, name)))
    assert list(untold_errors(tree)) == []
