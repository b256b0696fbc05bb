"""The messages of the code: `python -m tests.messages` prints those that refuse something, by folder. A value is "…".

The site's page of messages is made of them (tests/site.py), and what docs/troubleshooting.md quotes is looked
up in them (tests/unit/test_documents.py).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFUSING = re.compile(r"(UsageError|Mismatch|not_shared|\.error)$")
"""What makes an error that ends in one line for the user."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yields the path in the repository of each module of the product, and its tree."""
    for path in sorted([*(ROOT / "swift").rglob("*.py"), *(ROOT / "services").rglob("*.py")]):
        if "_pb" not in path.parts:
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def text_of(node: ast.AST) -> str | None:
    """Returns what a string says, with "…" for each value."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "…" for part in parts)
    return None


def refusals() -> dict[str, list[str]]:
    """Returns the messages of errors that are raised with a text, by the folder of their module."""
    found: dict[str, list[str]] = {}
    for path, tree in modules():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(func=raised, args=[message, *_])) if REFUSING.search(
                    ast.unparse(raised)
                ):
                    text = text_of(message)
                    if text is not None and re.search(r"\w{3}", text):
                        found.setdefault(path.rpartition("/")[0], []).append(" ".join(text.split()))
    return found


def all_texts() -> list[str]:
    """Returns every string of the code but docstrings."""
    found = []
    for _, tree in modules():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        found += [text_of(node) or "" for node in ast.walk(tree) if id(node) not in docstrings]
    return [" ".join(text.split()) for text in found if text]


def page() -> str:
    """Returns the refusals as Markdown."""
    lines = [
        "# All refusals",
        "",
        "Every error that ends in one line for its user, as the code has it. `…` stands for a value. "
        "[What a message means](troubleshooting.md) says more about those that come first.",
    ]
    for folder, messages in refusals().items():
        lines += ["", f"## {folder}", ""]
        lines += [f"- `` {message} ``" for message in sorted(set(messages))]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
