"""What ranks compare at join: whatever chooses the kernels that make the bits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft import device
from swift_ft.errors import UsageError
from swift_ft.train.config import (
    ENVIRONMENT,
    SessionConfig,
    cpu_model,
    determinism_fingerprint,
    device_problems,
)
from swift_ft.train.session import Session

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


CUDA = {
    "cuda": "13.0",
    "deterministic_algorithms": "True",
    "cublas_workspace_config": ":4096:8",
    "cudnn_benchmark": "False",
    "tunable_op": "False",
    "max_autotune": "False",
}


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("deterministic_algorithms", "False", "torch.use_deterministic_algorithms(True)"),
        ("cublas_workspace_config", "", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        ("cublas_workspace_config", ":4096:2:16:8", "CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        ("cudnn_benchmark", "True", "torch.backends.cudnn.benchmark = False"),
        ("tunable_op", "True", "PYTORCH_TUNABLEOP_TUNING=0"),
        ("max_autotune", "True", "TORCHINDUCTOR_MAX_AUTOTUNE=0"),
    ],
)
def test_what_gives_other_bits_on_cuda_is_named(name: str, value: str, named: str) -> None:
    (problem,) = device_problems({**CUDA, name: value})
    assert named in problem


def test_settings_that_give_the_same_bits_are_none_of_the_problems() -> None:
    assert device_problems(CUDA) == []
    assert device_problems({**CUDA, "cublas_workspace_config": ":16:8"}) == []
    assert device_problems(determinism_fingerprint("copy")) == []  # no device here


def test_what_ranks_compare_has_the_facts_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "facts", lambda: {"gpu": "a GPU"})
    assert determinism_fingerprint("copy")["gpu"] == "a GPU"


def test_the_driver_is_read_without_a_device(tmp_path: Path) -> None:
    told = tmp_path / "version"
    assert device._driver(told) == "unknown"
    told.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n")
    assert device._driver(told) == "580.159.03"


@pytest.mark.parametrize("where", ["cpu", "meta"])  # tensors of a device, and none here computes
@pytest.mark.parametrize("allow_inexact", [False, True])
def test_a_session_whose_stages_are_on_it_is_refused_in_one_line(
    where: str, allow_inexact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "facts", lambda: {**CUDA, "deterministic_algorithms": "False"})
    session: Any = SimpleNamespace(
        _state=SimpleNamespace(stages=[SimpleNamespace(submod=torch.nn.Linear(1, 1, device=where))]),
        _config=SessionConfig(allow_inexact=allow_inexact),
    )
    if where == "cpu" or allow_inexact:
        Session._check_devices(session)
        return
    with pytest.raises(UsageError) as refused:
        Session._check_devices(session)
    assert "use_deterministic_algorithms" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
