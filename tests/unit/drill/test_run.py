"""Twins in a directory: used only if they are finished and of the same run."""

import os
from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.drill import run
from swift_ft.lab.drill.facts import Twin
from swift_ft.lab.drill.run import store_twin, stored_twin
from tests.unit.drill.evidence import config

DIGESTS = {"rank0-v3": {"parameters": "ab", "optimizer": "cd"}}


def test_a_stored_twin_comes_back(tmp_path: Path) -> None:
    assert stored_twin(config(), tmp_path) is None
    assert stored_twin(config(), tmp_path / "not there") is None
    losses = {0: {0: 5.5, 1: 5.25}, 1: {0: 4.0}}
    store_twin(config(), Twin(digests=DIGESTS, exit_code=0, losses=losses), tmp_path)
    stored = stored_twin(config(), tmp_path)
    assert stored is not None
    assert stored.digests == DIGESTS
    assert stored.losses == losses
    assert stored.exit_code == 0


def test_other_faults_have_the_same_twin(tmp_path: Path) -> None:
    store_twin(config(), Twin(digests=DIGESTS, exit_code=0), tmp_path)
    other = config("rank=0,step=1", "service=logserver,step=3", strategy="checkpoint", spares=0)
    assert stored_twin(other, tmp_path) is not None


@pytest.mark.parametrize("changes", [{"seed": 1}, {"model": "tiny"}])
def test_another_run_has_not(changes: dict[str, object], tmp_path: Path) -> None:
    store_twin(config(), Twin(digests=DIGESTS, exit_code=0), tmp_path)
    with pytest.raises(UsageError, match="other settings"):
        stored_twin(config(**changes), tmp_path)


@pytest.mark.parametrize(("exit_code", "recoveries"), [(1, 0), (None, 0), (0, 1)])
def test_a_run_that_failed_is_no_twin(exit_code: int | None, recoveries: int, tmp_path: Path) -> None:
    store_twin(config(), Twin(digests=DIGESTS, exit_code=exit_code, recoveries=recoveries), tmp_path)
    assert stored_twin(config(), tmp_path) is None


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="neither a finished twin nor empty"):
        stored_twin(config(), tmp_path)


@pytest.mark.parametrize("content", ['{"identity"', "[]", "1", "[" * 100_000, '{"identity": [1]}', "\ud800"])
def test_a_damaged_twin_is_refused(content: str, tmp_path: Path) -> None:
    store_twin(config(), Twin(digests=DIGESTS, exit_code=0, losses={1: {0: 0.5}}), tmp_path)
    (tmp_path / "twin.json").write_text(content, errors="surrogatepass")
    with pytest.raises(UsageError, match=r"it is damaged|other settings") as raised:
        stored_twin(config(), tmp_path)
    assert str(raised.value).isprintable()


@pytest.mark.timeout(30)
def test_a_pipe_in_place_of_a_twin_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "twin.json")
    with pytest.raises(UsageError, match=r"twin\.json: Not a regular file"):
        stored_twin(config(), tmp_path)


def test_a_calculation_that_takes_too_long_leaves_no_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the drill in a traceback, with the outcome of both runs."""
    monkeypatch.setattr(run, "CALCULATION_S", 0.001)
    faulted = run.FaultedRun(config(), tmp_path)
    assert faulted._calculated([]) == {}
    assert "did not end within 0.001 s" in faulted.output
