"""What docstrings must say: who lacks one, and which errors they leave out."""

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping

from tests.unit.test_project import ROOT, sources

TRIVIAL_LINES = 8
"""A name and an annotated signature say what so short a body does."""
SAID_BY_HELP = {"main", "make_parser", "parser", "parser_of", "parse", "usage", "add_arguments"}
"""Command lines: `--help` and the module's docstring say what they take."""
DOCUMENTED_ELSEWHERE = {"ProcessGroup", "Module", "ServerInterceptor"}
"""Classes of torch and grpc, whose methods are overridden."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def classes_of(trees: Iterable[ast.Module]) -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def is_inherited(owner: ast.ClassDef, method: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    """Whether a base of `owner` says what the method does."""
    for base in owner.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        known = classes.get(name)
        if name in DOCUMENTED_ELSEWHERE:
            return True
        if known is None or known is owner:
            continue
        if any(isinstance(n, Definition) and n.name == method and ast.get_docstring(n) for n in known.body):
            return True
        if is_inherited(known, method, classes):
            return True
    return False


def undocumented(
    tree: ast.Module | ast.ClassDef, classes: Mapping[str, ast.ClassDef], prefix: str = ""
) -> Iterator[str]:
    """Public functions, methods and classes without a docstring, but for what the rule above calls trivial.

    An rpc (its name begins with a capital, as in proto/) is documented there.
    """
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.body[0].lineno + 1
        is_class = isinstance(node, ast.ClassDef)
        told = not is_class and (
            node.name in SAID_BY_HELP
            or node.name[0].isupper()
            or (isinstance(tree, ast.ClassDef) and is_inherited(tree, node.name, classes))
        )
        if lines > TRIVIAL_LINES and not told and ast.get_docstring(node) is None:
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from undocumented(node, classes, f"{prefix}{node.name}.")


def test_what_is_public_has_a_docstring() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sources("swift", "services")}
    classes = classes_of(trees.values())
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in trees.items()
        for name in undocumented(tree, classes)
    ] == []


def test_what_needs_a_docstring() -> None:
    long = "\n        ".join(["pass"] * (TRIVIAL_LINES + 1))
    text = f"""
class Base:
    def told(self):
        'Says.'
class Heir(Base):
    def told(self):
        {long}
    def untold(self):
        {long}
    def short(self):
        pass
    def Rpc(self):
        {long}
    def _own(self):
        {long}
def main():
        {long}
def function():
        {long}
"""
    tree = ast.parse(text)
    assert list(undocumented(tree, classes_of([tree]))) == ["Heir", "Heir.untold", "function"]


# --- errors ---

OF_ANYBODY = {"AssertionError", "AttributeError", "StopIteration"}
"""A bug of the caller's or ours, and what Python's own protocols raise."""


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
        if node.name in SAID_BY_HELP or not told or "As `" in told:
            continue
        if node.name == "__init__":
            told += ast.get_docstring(tree) or ""
        for error in sorted(set(raised(node)) - OF_ANYBODY):
            if not is_told(error, told):
                yield f"{prefix}{node.name} raises {error}"


def test_docstrings_name_the_errors() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sources("swift", "services")}
    assert [
        f"{path.relative_to(ROOT)}: {words}" for path, tree in trees.items() for words in untold_errors(tree)
    ] == []


def test_which_errors_a_docstring_must_name() -> None:
    text = """
class Kept:
    'Raises KeyError.'
    def __init__(self):
        'Of it.'
        raise KeyError(1)
    def untold(self):
        'Says nothing.'
        if self:
            raise errors.Lost()
    def other(self):
        'As `untold`.'
        raise ValueError
    def _own(self):
        'Says nothing.'
        raise ValueError
def kind():
    'Raises OSError.'
    raise FileNotFoundError(2)
def handled():
    'Says nothing.'
    try:
        raise ValueError
    except ValueError:
        raise TypeError from None
def inner():
    'Says nothing.'
    def raises():
        raise ValueError
    raise caught
"""
    found = list(untold_errors(ast.parse(text)))
    assert found == ["Kept.untold raises Lost", "handled raises TypeError"]
