"""Tests of this folder run in processes of their own: to load the device changes torch, and a process that has used it
must not fork."""

import json
from pathlib import Path

import pytest

from tests.device import simulated
from tests.integration.forked import Forks

TIMEOUT_S = 100.0


@pytest.fixture(scope="session")
def device() -> Path:
    """The device's library. Skips where it cannot be made."""
    if simulated.compiler() is None:
        pytest.skip("no C++ compiler: g++ makes the simulated device")
    return simulated.library()


@pytest.fixture(autouse=True)
def _process(device: Path, forks: Forks, tmp_path: Path) -> None:
    """What `pytest_pyfunc_call` needs."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    forks, directory = pyfuncitem.funcargs["forks"], pyfuncitem.funcargs["tmp_path"]
    assert isinstance(forks, Forks)
    assert isinstance(directory, Path)
    output = directory / "output"
    callspec = getattr(pyfuncitem, "callspec", None)
    arguments = json.dumps(callspec.params if callspec is not None else {})
    words = [pyfuncitem.module.__name__, pyfuncitem.originalname, arguments]
    process = forks.run("tests.device.process", words, {}, output, output)
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
    if code:
        pytest.fail(f"exit code {code}\n{output.read_text(errors='replace')}", pytrace=False)
    return True
