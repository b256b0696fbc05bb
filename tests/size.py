"""`scripts/size`: how large the product is, and how far a reader has to look. Figures without limits."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = ("swift", "services")
LABORATORY = "swift/swift_ft/lab"
"""Neither a trainer nor a server needs it."""
_SOURCES = (".py", ".cpp", ".c", ".h", ".proto")


def sources(*folders: str) -> list[Path]:
    """Whatever people write there, without what is generated."""
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*"))]
    return [path for path in found if path.suffix in _SOURCES and "_pb" not in path.parts]


def lines(paths: Iterable[Path]) -> int:
    """As `wc -l` counts them."""
    return sum(path.read_bytes().count(b"\n") for path in paths)


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:])
    return name.removesuffix(".__init__")


def imported(path: Path, modules: Iterable[str]) -> Iterator[str]:
    """Which of `modules` a file imports, anywhere in it."""
    known = set(modules)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


def importers(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Module -> the other modules that import it."""
    by_name = {module_name(path): path for path in paths if path.suffix == ".py"}
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name, path in by_name.items():
        for other in imported(path, by_name):
            if other in by_name and other != name:
                found[other].add(name)
    return dict(found)


def figures() -> dict[str, str]:
    """What is counted -> the count, in words."""
    product = sources(*PRODUCT)
    modules = [path for path in product if path.suffix == ".py"]
    laboratory = sources(LABORATORY)
    folders = Counter(path.parent for path in modules)
    largest, most = folders.most_common(1)[0]
    names = Counter(path.name for path in modules if not path.name.startswith("__"))
    twice = sorted(name for name, count in names.items() if count > 1)
    in_one = sorted(name for name, by in importers(modules).items() if len(by) == 1)
    outside = {path.parent for path in modules} - {path.parent for path in laboratory}
    return {
        "product, lines": f"{lines(product):,}",
        "  of it the laboratory": f"{lines(laboratory):,}",
        "modules": f"{len(modules)}",
        "modules that exactly one other imports": f"{len(in_one)}",
        "folders beside the laboratory": f"{len(outside)}",
        "files in the largest folder": f"{most} ({largest.relative_to(ROOT)})",
        "file names that occur twice": f"{len(twice)} ({', '.join(twice)})",
        "tests, lines": f"{lines(sources('tests')):,}",
        "documents, lines": f"{lines([*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')]):,}",
    }


if __name__ == "__main__":
    for what, count in figures().items():
        print(f"{what:40} {count}")
