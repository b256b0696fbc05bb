"""docs/api.md from docstrings: what a trainer may use of `swift`. Run by scripts/gen_api."""

import ast
import inspect
import itertools
import re
import sys
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import swift_ft
from swift_ft import errors

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = """# API reference

<!-- Made from docstrings by scripts/gen_api: change those. -->

These are the names that a trainer uses. `import swift_ft` is light: torch is imported when one of them is first used.
[trainers.md](trainers.md) describes how to write a trainer.
"""


def docstring(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").strip()


def signature(thing: Any) -> str:
    """As it is called: without `self`, without the module names of its types."""
    found = inspect.signature(thing)
    parameters = [p for name, p in found.parameters.items() if name not in ("self", "cls")]
    text = str(found.replace(parameters=parameters))
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    text = re.sub(r"(-> |: )'(\w+)'", r"\1\2", text)
    return text.replace("'", '"').replace("~", "")


def members(of: type) -> dict[str, Any]:
    """Public methods and properties with a docstring or none, in the order in which they stand in the source."""
    found: dict[str, Any] = {}
    for base in reversed(of.__mro__[:-1]):
        if base.__module__.startswith("swift_ft."):
            found.update({name: value for name, value in vars(base).items() if not name.startswith("_")})
    return found


def said_below(body: list[ast.stmt]) -> dict[str, str]:
    """Names that are assigned, or declared, with a docstring under them."""
    said: dict[str, str] = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Attribute(attr=name)]),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                said[name] = " ".join(words.split())
    return said


def of_class(of: type) -> list[str]:
    """Its attributes, properties and methods."""
    name = of.__name__
    lines = [f"## {name}", "", docstring(of), ""]
    (made,) = ast.parse(textwrap.dedent(inspect.getsource(of.__init__))).body  # type: ignore[misc]
    assert isinstance(made, ast.FunctionDef)
    attributes = {name: words for name, words in said_below(made.body).items() if not name.startswith("_")}
    properties = [f"| `{name}` | {words.replace('|', '/')} |" for name, words in attributes.items()]
    methods: list[str] = []
    for member, value in members(of).items():
        if isinstance(value, property) or type(value).__name__ == "cached_property":
            getter = value.fget if isinstance(value, property) else value.func
            said = " ".join(docstring(getter).split())
            properties.append(f"| `{member}` | {said.replace('|', '/')} |")
            continue
        function = value.__func__ if isinstance(value, classmethod) else value
        if not inspect.isfunction(inspect.unwrap(function)):
            continue
        front = f"{name}." if isinstance(value, classmethod) else f"{name.lower()}."
        methods += [
            f"### {front}{member}",
            "",
            "```python",
            f"{front}{member}{signature(function)}",
            "```",
            "",
        ]
        methods += [docstring(function), ""] if docstring(function) else []
    table = ["| attribute | |", "|---|---|", *properties, ""]
    return [*lines, *table, *methods]


def of_config(config: type) -> list[str]:
    """Every field with its default and the docstring under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0]
    assert isinstance(body, ast.ClassDef)
    said = said_below(body.body)
    lines = ["## SessionConfig", "", docstring(config), ""]
    lines += ["`Session.from_env(name=value, ...)` takes each of these.", ""]
    lines += ["| field | default | |", "|---|---|---|"]
    for field in fields(config):
        assert field.default is not MISSING, field.name
        assert field.name in said, f"SessionConfig.{field.name} has no docstring"
        lines.append(f"| `{field.name}` | `{field.default!r}` | {said[field.name].replace('|', '/')} |")
    return [*lines, ""]


def of_errors() -> list[str]:
    lines = [
        "## Errors",
        "",
        "All are subclasses of `swift_ft.errors.SwiftError`. Each message is one line.",
        "",
    ]
    lines += ["| error | exit code | |", "|---|---|---|"]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.SwiftError):
            about = " ".join(docstring(value).split("\n\n")[0].split()) if value.__doc__ else ""
            lines.append(f"| `{name}` | {value.exit_code} | {about} |")
    return [*lines, ""]


def page() -> str:
    parts = [
        *of_class(swift_ft.Session),
        *of_config(swift_ft.SessionConfig),
        *of_class(swift_ft.Communicator),
        *of_errors(),
    ]
    return HEAD + "\n" + "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}", file=sys.stderr)
