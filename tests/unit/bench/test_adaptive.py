"""`swift-ft bench adaptive`: what it counts."""

from typing import Any

import pytest

from swift_ft.lab.bench import adaptive, command


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ({"fused": 1.4, "memory": 1.03, "inexact": 1.03}, "PASS"),
        ({"fused": 1.6, "memory": 1.03, "inexact": 1.03}, "FAIL"),  # over 1.05 of the plan
        ({"fused": 1.4, "memory": 1.08, "inexact": 1.03}, "FAIL"),  # exact steps take 1.05 of inexact ones
    ],
)
def test_the_goals_decide(seconds: dict[str, float], verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: Any) -> adaptive.Measured:
        settings = given[-1]
        mode = next(name for name in seconds if adaptive.MODES[name] == settings)
        return adaptive.Measured(full_s=1.0, less_s=seconds[mode], held=2.0)

    monkeypatch.setattr(adaptive, "_run", run)
    result = adaptive.measure(adaptive.Shape(4, 4, 8, [(1, 0)], 0.05), list(seconds))
    assert result["verdict"] == verdict, result
    assert result["dropped"] == 0.75
    assert result["exact_over_inexact"] == pytest.approx(seconds["memory"] / seconds["inexact"])


def test_a_rank_that_is_named_twice_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[adaptive.Shape] = []

    def measure(shape: adaptive.Shape, modes: Any) -> dict[str, Any]:
        shapes.append(shape)
        return {}

    monkeypatch.setattr(adaptive, "measure", measure)
    monkeypatch.setattr(adaptive, "text", lambda result: [])
    command.run("adaptive", ["--lost", "1:0,1:0", "--replicas", "2"])
    assert [shape.lost for shape in shapes] == [[(1, 0)]]
