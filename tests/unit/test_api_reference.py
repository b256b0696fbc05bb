"""docs/api.md is what the docstrings say, and everything that a trainer uses has one."""

import importlib.util
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import swift_ft

SCRIPT = Path(__file__).parents[1] / "api_reference.py"


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_reference", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(reference: ModuleType) -> None:
    assert reference.PAGE.read_text() == reference.page(), "run scripts/gen_api"


def test_every_public_name_of_the_session_is_described(reference: ModuleType) -> None:
    silent = []
    for name, value in reference.members(swift_ft.Session).items():
        thing = getattr(value, "fget", None) or getattr(value, "func", None) or inspect.unwrap(value)
        if not (getattr(thing, "__doc__", None) or "").strip():
            silent.append(name)
    assert silent == []


def test_every_name_of_a_session_that_the_pages_for_trainers_use_is_on_it(reference: ModuleType) -> None:
    """`session.rank` and `session.groups` were on none: they are set in `__init__`."""
    page = reference.page()
    root = SCRIPT.parents[1]
    used = {
        name
        for path in (root / "README.md", root / "docs" / "trainers.md", root / "examples" / "resilient.py")
        for name in re.findall(r"\bsession\.([a-z]\w*)", path.read_text())
    }
    known = set(re.findall(r"^(?:### session\.|\| `)(\w+)", page, re.MULTILINE))
    assert {"rank", "groups", "run"} <= used
    assert used - known == set()


def test_every_setting_is_described(reference: ModuleType) -> None:
    text = "\n".join(reference.of_config(swift_ft.SessionConfig))
    for field in fields(swift_ft.SessionConfig):
        assert f"| `{field.name}` |" in text
