"""Each kind of damage: said in one line with its reason; the version before is what it was; saving goes on."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from swift_ft.errors import ServiceError
from tests.unit.checkpoint.damage import DAMAGES, unreadable
from tests.unit.checkpoint.holding import load, saved

NOBODY = 65534


def state(version: int) -> dict[str, object]:
    return {"w": torch.arange(300.0) + version, "version": version}


def check(directory: Path, version: int) -> None:
    loaded = load(directory, version)
    assert torch.equal(loaded["w"], state(version)["w"])
    assert loaded["version"] == version


@pytest.mark.parametrize("kind", DAMAGES)
def test_it_is_said_and_the_one_before_stands(kind: str, tmp_path: Path) -> None:
    damage, said = DAMAGES[kind]
    for version in (5, 10):
        saved(tmp_path, version, state(version))
    damage(tmp_path / "v00000010" / "rank0")
    with pytest.raises(ServiceError, match=said) as raised:
        load(tmp_path, 10)
    assert "\n" not in str(raised.value)
    assert "v00000010/rank0" in str(raised.value)
    check(tmp_path, 5)


@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "folder is a link"])
def test_it_is_saved_again_in_the_same_place(kind: str, tmp_path: Path) -> None:
    """By a newer generation. (Nothing is ever written through a link.)"""
    damage, _ = DAMAGES[kind]
    saved(tmp_path, 10, state(10))
    damage(tmp_path / "v00000010" / "rank0")
    saved(tmp_path, 10, state(10), generation=2)
    check(tmp_path, 10)
    assert [path.name.split("-")[0] for path in (tmp_path / "v00000010" / "rank0").iterdir()] == ["g2"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_files_that_may_not_be_read() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for version in (5, 10):
            saved(directory, version, state(version))
        unreadable(directory / "v00000010" / "rank0")
        for path in (directory, *directory.rglob("*")):
            os.chown(path, NOBODY, -1)
        reading, writing = os.pipe()
        if not (child := os.fork()):
            try:
                os.setuid(NOBODY)
                check(directory, 5)
                load(directory, 10)
            except ServiceError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert pipe.read().endswith("is not whole: Permission denied")
        os.waitpid(child, 0)
