"""What the documents name exists: links, anchors, files, commands and their flags."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from swift_ft import cli
from swift_ft.comm import LOOPBACK, NCCL_ENVIRONMENT
from swift_ft.text import LAUNCHER_SETTINGS
from tests import messages

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINE_COLUMNS_MAX = 120
FOLDERS = ("swift", "services", "tests", "scripts", "docs", "examples", "proto")
# Files that a run or an installation makes, by the names that documents give them.
MADE = re.compile(r"_kernels_|_ring\.so|docs/compatibility")


every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def prose(text: str) -> list[str]:
    """Its lines outside of code blocks."""
    lines, code = [], False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        elif not code:
            lines.append(line)
    return lines


def code_blocks(text: str) -> list[str]:
    """The lines inside of them; a line that ends with a backslash goes on in the next one."""
    blocks = re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = [line.lstrip("#").strip() for line in prose(document.read_text()) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            missing.append(target)
    assert missing == []


@every_document
def test_files_that_are_named_exist(document: Path) -> None:
    """In the changelog they may be gone: it tells of what was."""
    if document.name == "CHANGELOG.md":
        pytest.skip("it tells of what was")
    pattern = rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]+)`"
    missing = []
    for name in re.findall(pattern, document.read_text()):
        there = any(ROOT.glob(name)) if "*" in name else (ROOT / name).exists()
        if not there and not MADE.search(name):
            missing.append(name)
    assert missing == []


@functools.cache
def help_of(command: str) -> str:
    words = [sys.executable, "-m", "swift_ft.cli", *command.split(), "--help"]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


@every_document
def test_commands_and_their_flags_exist(document: Path) -> None:
    """Of each line in a code block that calls swift-ft."""
    known = {*cli.PROGRAMS, *cli.OTHERS}
    for line in code_blocks(document.read_text()):
        called = re.search(r"(?:^|[$>] +|bin/)swift-ft ([a-z-]+)(.*)", line.strip())
        if called is None:
            continue
        command, rest = called[1], called[2].split("#")[0]
        assert command in known, line
        used = {word.partition("=")[0] for word in rest.split() if re.match(r"--[a-z]", word)}
        if not used:
            continue
        if command in ("bench", "failures"):
            command = " ".join([command, *[word for word in rest.split()[:1] if not word.startswith("-")]])
        if command == "plan":
            command = " ".join([command, *(used & {"--adaptive", "--goodput"})])
        flags = set(re.findall(r"--[a-z][\w-]*", help_of(command)))
        assert used <= flags, (line, used - flags)


@every_document
def test_commands_in_the_text_exist(document: Path) -> None:
    known = {*cli.PROGRAMS, *cli.OTHERS}
    called = re.findall(r"`swift-ft ([a-z-]+)", "\n".join(prose(document.read_text())))
    assert set(called) <= known


@every_document
def test_scripts_that_are_called_exist(document: Path) -> None:
    called = re.findall(r"(?:^|[\s`])scripts/(\w+(?:\.\w+)?)", document.read_text(), flags=re.MULTILINE)
    assert [name for name in called if not (ROOT / "scripts" / name).exists()] == []


@every_document
def test_text_fits_its_lines(document: Path) -> None:
    """Rows of a table are one line however long; code is as it is."""
    lines = [line for line in prose(document.read_text()) if not line.startswith(("|", "<!--"))]
    assert [line for line in lines if len(line) > LINE_COLUMNS_MAX] == []


@every_document
def test_lists_in_lists_are_indented_by_four(document: Path) -> None:
    """With fewer columns GitHub shows them so, but the site does not."""
    assert [line for line in prose(document.read_text()) if re.match(r" {1,3}([-*]|\d+\.) ", line)] == []


def test_the_readme_names_every_document() -> None:
    readme = (ROOT / "README.md").read_text()
    names = [str(path.relative_to(ROOT)) for path in DOCUMENTS if path.name != "README.md"]
    assert [name for name in names if f"]({name}" not in readme] == []


class Settings(yaml.SafeLoader):
    """mkdocs.yml names a function, which is not looked at."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_each_document_is_in_the_navigation_once() -> None:
    """Those of the repository's root as well; README.md is the first page. `messages.md` is made from the code."""
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Settings)
    pages = [
        page for tab in settings["nav"] for part in tab.values() for entry in part for page in entry.values()
    ]
    documents = ["index.md" if path.name == "README.md" else path.name for path in DOCUMENTS]
    assert sorted(pages) == sorted([*documents, "messages.md"])


def test_messages_that_are_explained_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^> `(.+)`$", text, flags=re.MULTILINE)
    assert len(quoted) == text.count("\n> ")
    texts = messages.all_texts()
    unknown = [message for message in quoted if not any(says(known, message) for known in texts)]
    assert unknown == []


def says(text: str, quoted: str) -> bool:
    """Returns whether the text of the code holds the quoted one. A value in the text may be quoted as a word."""
    parts = [re.escape(part.strip()) for part in quoted.split("…")]
    return re.search(r"[\s…]*".join(part for part in parts if part), text) is not None


def test_the_page_of_environment_variables_lists_them_all() -> None:
    listed = set()
    for line in (ROOT / "docs" / "environment.md").read_text().splitlines():
        if line.startswith("| `"):
            listed |= set(re.findall(r"`([A-Z][A-Z0-9_]+)`", line.split("|")[1]))
    used = {*LAUNCHER_SETTINGS.values(), *NCCL_ENVIRONMENT, *LOOPBACK}
    peers = ROOT / "swift" / "swift_ft" / "lab" / "bench" / "peers"  # other systems' trainers
    for path in (ROOT / "scripts").iterdir():
        used |= set(re.findall(r"\$\{?(SWIFT_[A-Z_]+)", path.read_text()))
    for path in [
        ROOT / "hatch_build.py",
        *(ROOT / "swift").rglob("*.py"),
        *(ROOT / "services").rglob("*.py"),
    ]:
        if "_pb" not in path.parts and peers not in path.parents:
            used |= variables_of(path)
    assert used - listed == set(), "not on the page"
    assert listed - used == set(), "on the page alone"


def variables_of(path: Path) -> set[str]:
    """Returns swift's own variables, by their names, and others where the environment is read or a rank's is made."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[ast.expr] = []
        match node:
            case ast.Constant(value=str(text)) if re.fullmatch(r"SWIFT_[A-Z0-9_]+", text):
                found.add(text)
            case ast.Subscript(value=ast.Attribute(attr="environ"), slice=name):
                names = [name]
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="environ")), args=[name, *_]):
                names = [name]
            case ast.Dict(keys=keys) if path.name == "ranks.py" and path.parent.name == "launch":
                names = [key for key in keys if key is not None]
        found |= {
            name.value for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)
        }
    return found
