"""`scripts/size`: how large the product is, and how far a reader has to look. Figures without limits."""

import argparse
import ast
import json
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


def figures() -> dict[str, int]:
    product = sources(*PRODUCT)
    laboratory = sources(LABORATORY)
    modules = _modules()
    outside = {path.parent for path in modules} - {path.parent for path in laboratory}
    return {
        "product_lines": lines(product),
        "lab_lines": lines(laboratory),
        "modules": len(modules),
        "single_importer_modules": sum(len(by) == 1 for by in importers(modules).values()),
        "folders": len(outside),
        "test_lines": lines(sources("tests")),
        "document_lines": lines([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]),
    }


MEANINGS = {
    "product_lines": "product, lines",
    "lab_lines": "  of it the laboratory",
    "modules": "modules",
    "single_importer_modules": "modules that exactly one other imports",
    "folders": "folders beside the laboratory",
    "test_lines": "tests, lines",
    "document_lines": "documents, lines",
}


def _modules() -> list[Path]:
    return [path for path in sources(*PRODUCT) if path.suffix == ".py"]


def names() -> dict[str, str]:
    """Where a reader has to look twice, in words."""
    folder, most = Counter(path.parent for path in _modules()).most_common(1)[0]
    counts = Counter(path.name for path in _modules() if not path.name.startswith("__"))
    twice = sorted(name for name, count in counts.items() if count > 1)
    return {
        "files in the largest folder": f"{most} ({folder.relative_to(ROOT)})",
        "file names that occur twice": f"{len(twice)} ({', '.join(twice)})",
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/size", description="Prints how large the product is.")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures as JSON")
    given = parser.parse_args()
    counted = figures()
    shown = {MEANINGS[name]: f"{count:,}" for name, count in counted.items()}
    for what, count in (shown | names()).items():
        print(f"{what:40} {count}")
    if given.json:
        given.json.write_text(json.dumps(counted, indent=1) + "\n")
