"""What ranks compare at join: whatever chooses the kernels that make the bits."""

from pathlib import Path

import pytest

from swift_ft.train.config import ENVIRONMENT, cpu_model, determinism_fingerprint

ONE = (
    "processor\t: {n}\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: {model}\n"
    "model name\t: A CPU\nstepping\t: 7\ncpu MHz\t\t: {n}00.1\n"
)


def cpus(directory: Path, *models: int) -> str:
    path = directory / "cpuinfo"
    path.write_text("\n".join(ONE.format(n=n, model=model) for n, model in enumerate(models)))
    return cpu_model(path)


def test_another_model_is_told_and_what_changes_by_itself_is_not(tmp_path: Path) -> None:
    assert cpus(tmp_path, 85, 85) == cpus(tmp_path, 85) == "GenuineIntel 6 85 A CPU 7"
    assert cpus(tmp_path, 85) != cpus(tmp_path, 106)
    assert cpus(tmp_path, 85, 106) == "GenuineIntel 6 106 A CPU 7; GenuineIntel 6 85 A CPU 7"


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    assert cpu_model(tmp_path / "none")
    (tmp_path / "cpuinfo").write_text("")
    assert cpu_model(tmp_path / "cpuinfo") == "unknown"


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_what_libraries_read_from_the_environment_is_compared(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = determinism_fingerprint("copy")
    monkeypatch.setenv(name, "7")
    after = determinism_fingerprint("copy")
    assert {key for key in after if after[key] != before[key]} == {name.lower()}
    assert before["cpu_model"]
