"""What a script imports before it does anything else: read, not run.

Ranks are forked from a process that has imported these already (`swift.launch.forkserver`), so a replacement does not
wait for them. Only what is installed is taken: the script's own modules may look at arguments and environment, which
are a rank's. And only what comes first: whatever a script does between its imports may be meant for the next of them
(`os.environ[...] = ...`, `sys.path.insert`, `matplotlib.use`).
"""

import ast
import importlib.machinery
import os
import site
import sys
import sysconfig
import tokenize
from collections.abc import Iterator, Sequence

MOST = 64
"""So many imports of one script are taken."""


def imports_of(script: str, path0: str) -> list[str]:
    """Its first imports, in order: ``module``, or ``module:name`` for ``from module import name``."""
    try:
        with tokenize.open(script) as file:
            body = ast.parse(file.read()).body
    except (OSError, SyntaxError, ValueError):
        return []  # that is for the script itself to say
    modules: list[str] = []
    places = _Places(path0)
    for statement in body:
        for imported in _imports(statement):
            names = _names(imported)
            if not names or not all(places.has(name.partition(":")[0]) for name in names):
                return modules[:MOST]
            modules += names
        if not _does_nothing_else(statement):
            break
    return modules[:MOST]


def script_of(script: str, module: bool, path0: str) -> str:
    """The file that is run: of a module only if nothing is imported before it. Empty: it is not known."""
    if not module:
        return script
    path = os.path.join(path0, f"{script}.py")
    return path if "." not in script and os.path.isfile(path) else ""


class _Places:
    """Where a module of that name would come from."""

    def __init__(self, path0: str) -> None:
        self._own = [path0, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        named = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        dynamic = [os.path.join(path, "lib-dynload") for path in named[:2]]
        self._installed = [*dict.fromkeys([*named, *dynamic, *site.getsitepackages()])]
        if site.ENABLE_USER_SITE:
            self._installed.append(site.getusersitepackages())

    def has(self, module: str) -> bool:
        """It is installed, and nothing of the script's own is in front of it."""
        top = module.partition(".")[0]
        if top in sys.builtin_module_names or top == "swift":
            return True
        return not _there(top, self._own) and _there(top, self._installed)


def _there(top: str, places: Sequence[str]) -> bool:
    return importlib.machinery.PathFinder.find_spec(top, places) is not None


def _imports(statement: ast.stmt) -> Iterator[ast.Import | ast.ImportFrom]:
    """Of this statement; with those in a ``try`` that has nothing else in it."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield statement
    elif isinstance(statement, ast.Try) and _does_nothing_else(statement):
        for inner in statement.body:
            yield from _imports(inner)


def _names(statement: ast.Import | ast.ImportFrom) -> list[str]:
    """Empty: it is relative, so it is the script's own."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if statement.level or statement.module is None:
        return []
    return [f"{statement.module}:{alias.name}" for alias in statement.names]


def _does_nothing_else(statement: ast.stmt) -> bool:
    """Importing, a text, or a constant that gets a name."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name()], value=ast.Constant()):
            return True
        case ast.Try(body=body, orelse=[], finalbody=[]):
            return all(isinstance(inner, ast.Import | ast.ImportFrom | ast.Try) for inner in body) and all(
                map(_does_nothing_else, body)
            )
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), orelse=[]):
            return True
    return False
