"""Both ways to compute a step backwards."""

import pytest

from swift_ft.state import kernels

ONE_PASS, MANY_PASSES = "one pass", "many passes"


@pytest.fixture(params=[ONE_PASS, MANY_PASSES])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`kernels.cpp`, where it could be compiled, and torch's operations."""
    if request.param == MANY_PASSES:
        monkeypatch.setattr(kernels, "library", lambda: None)
    return str(request.param)
