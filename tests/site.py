"""What mkdocs does not do by itself: documents outside of docs/ are pages too, README.md the first one, and a file or
folder of the repository that a document links to gets a page that shows it. A link to what does not exist stays as it
is, so `mkdocs build --strict` fails with it. The page of all refusals is made from the code."""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests import messages  # noqa: E402

LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)")


MESSAGES = "messages.md"
FIRST_FOUND = ("troubleshooting.md", MESSAGES)
"""Pages that a search for a message's words is to lead to."""


def page_of(path: str) -> str:
    """Returns the page (a path in the site) of a path in the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if "/" not in path and path.endswith(".md") else f"source/{path}.md"


def path_of(page: str) -> str:
    if page == "index.md":
        return "README.md"
    return page if (ROOT / page).exists() else f"docs/{page}"


def targets(path: str) -> set[str]:
    """Returns the paths in the repository that a document links to, where something is."""
    found = [link[1] for link in LINK.finditer((ROOT / path).read_text())]
    resolved = {posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) for target in found}
    return {target for target in resolved if (ROOT / target).exists()}


def shown(path: str) -> str:
    """Returns a page with a file, or with all files of a folder."""
    place = ROOT / path
    files = sorted(file for file in place.rglob("*") if file.is_file()) if place.is_dir() else [place]
    parts = ["---\nsearch:\n  exclude: true\n---", f"# {path}"]
    for file in files:
        if "__pycache__" in file.parts:
            continue
        if place.is_dir():
            parts.append(f"## {file.relative_to(place)}")
        language = {".py": "python", ".yaml": "yaml", ".cpp": "cpp"}.get(file.suffix, "text")
        parts.append(f"``````{language}\n{file.read_text().rstrip()}\n``````")
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    paths = {str(document.relative_to(ROOT)) for document in documents}
    for path in sorted(paths.union(*map(targets, paths))):
        page = page_of(path)
        if page.startswith("source/"):
            files.append(File.generated(config, page, content=shown(path)))
        elif not path.startswith("docs/"):
            files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, MESSAGES, content=messages.page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    if page.file.src_uri in FIRST_FOUND:
        page.meta["search"] = {"boost": 10}
    if page.file.src_uri == MESSAGES or page.file.src_uri.startswith("source/"):
        return markdown
    folder = posixpath.dirname(path_of(page.file.src_uri))

    def moved(link: re.Match[str]) -> str:
        target = page_of(posixpath.normpath(posixpath.join(folder, link[1])))
        return f"]({target}{link[2] or ''})" if files.get_file_from_path(target) else link[0]

    return LINK.sub(moved, markdown)
