"""With the compiled inverses, and as without a compiler."""

import pytest

from swift_ft.state import kernels

COMPILED, COPIES = "compiled", "copies"


@pytest.fixture(params=[COMPILED, COPIES])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """`kernels.cpp`, where it could be compiled, and copies."""
    if request.param == COPIES:
        monkeypatch.setattr(kernels, "library", lambda: None)
    return str(request.param)
