"""What a script imports before it does anything else."""

from pathlib import Path

import pytest

from swift_ft.launch.forkserver import MOST, imports_of, script_of


def found(directory: Path, text: str) -> list[str]:
    script = directory / "train.py"
    script.write_text(text)
    return imports_of(str(script), str(directory))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (
            '"""Trains."""\n\nfrom __future__ import annotations\n\nimport json, torch.nn as nn\n',
            ["__future__:annotations", "json", "torch.nn"],
        ),
        ("from torch.nn import Linear, functional\n", ["torch.nn:Linear", "torch.nn:functional"]),
        ("import swift_ft\nimport numpy as np\n", ["swift_ft", "numpy"]),
        ("try:\n    import yaml\nexcept ImportError:\n    yaml = None\nimport json\n", ["yaml", "json"]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import json\nimport yaml\n",
            ["typing:TYPE_CHECKING", "yaml"],
        ),
        ("LR = 0.1\nimport json\n", ["json"]),
        ("import json\n", ["json"]),
        # What is done in between may be meant for what comes next.
        ("import os\nos.environ['A'] = '1'\nimport yaml\n", ["os"]),
        ("import json\nif json:\n    pass\nimport yaml\n", ["json"]),
        ("import json\nLR = float('1')\nimport yaml\n", ["json"]),
        ("try:\n    import json\n    json.loads('1')\nexcept ImportError:\n    pass\nimport yaml\n", []),
        # What is not installed, or the script's own.
        ("import json\nimport nothing_of_that_name\nimport yaml\n", ["json"]),
        ("import json\nfrom . import own\nimport yaml\n", ["json"]),
        ("import json\nimport own\nimport yaml\n", ["json"]),
        ("import json\nimport yaml\n", ["json", "yaml"]),
        ("def f():\n    import json\n", []),
        ("import json\nthis is no python\n", []),
        ("", []),
    ],
)
def test_what_comes_first_and_is_installed(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "own.py").write_text("")
    assert found(tmp_path, text) == names


def test_a_module_of_the_scripts_own_hides_one_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "yaml.py").write_text("")
    assert found(tmp_path, "import json, yaml\nimport numpy\n") == []
    (tmp_path / "yaml.py").unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "yaml.py").write_text("")
    assert found(tmp_path, "import json\nimport yaml\n") == ["json", "yaml"]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    assert found(tmp_path, "import json\nimport yaml\n") == ["json"]


def test_nothing_of_it_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(mark)!r}, 'w')")
    assert found(tmp_path, f"import own\nopen({str(mark)!r}, 'w')\n") == []
    assert not mark.exists()


def test_so_many_at_most(tmp_path: Path) -> None:
    assert len(found(tmp_path, "import json\n" * (MOST + 1))) == MOST


def test_of_a_module_only_if_nothing_is_imported_before_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("")
    assert script_of("somewhere/x.py", module=False, path0=str(tmp_path)) == "somewhere/x.py"
    assert script_of("train", module=True, path0=str(tmp_path)) == str(tmp_path / "train.py")
    assert script_of("package.train", module=True, path0=str(tmp_path)) == ""
    assert script_of("json", module=True, path0=str(tmp_path)) == ""
    assert imports_of("", str(tmp_path)) == []
