"""`swift-ft bench adaptive`: what it takes and refuses, what it plans without running anything, and what it counts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import adaptive


def test_shapes_are_planned_and_nothing_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "adaptive.json"
    assert adaptive.main(["--simulated", "4x4x8,2x2x4", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    shown = capsys.readouterr().out
    assert [(s["replicas"], s["stages"], s["microbatches"]) for s in told["shapes"]] == [(4, 4, 8), (2, 2, 4)]
    for shape in told["shapes"]:
        assert [row["losses"] for row in shape["rows"]] == [0, 1, 2]
        for row in shape["rows"]:
            for way in row["ways"].values():
                assert way["length"] >= way["bound"] - 1e-9
    one_loss = told["shapes"][0]["rows"][1]["ways"]
    whole = told["shapes"][0]["whole"]
    for way in ("fused", "split, 2x", "staggered"):
        assert one_loss[way]["length"] <= 1.05 * one_loss[way]["bound"]
    assert one_loss["staggered"]["length"] < one_loss["split, 2x"]["length"] < one_loss["fused"]["length"]
    assert one_loss["fused"]["length"] < 1.64 * whole, "the prototype's"
    assert "4 replicas, 4 stages, 8 microbatches" in shown
    assert "Oobleck" in shown
    assert "Bamboo" in shown
    assert max(map(len, shown.splitlines())) <= 160


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--simulated", "4x4"], "give REPLICASxSTAGESxMICROBATCHES"),
        (["--simulated", "1x4x8"], "--replicas 1: give 2 to"),
        (["--modes", "quick"], "--modes quick: give some of fused"),
        (["--lost", "one"], "--lost one: give STAGE:REPLICA"),
        (["--lost", "9:0"], "there is no such rank"),
        (["--lost", "1:0,1:1", "--replicas", "2"], "leave one replica of each stage"),
        (["--microbatches", "2"], "at least as many microbatches as stages"),
    ],
)
def test_one_line_for_what_cannot_be(words: Sequence[str], problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        adaptive.main(words)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


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
    result = adaptive.measure(4, 4, 8, [(1, 0)], 0.05, list(seconds))
    assert result["verdict"] == verdict, result
    assert result["dropped"] == 0.75
    assert result["exact_over_inexact"] == pytest.approx(seconds["memory"] / seconds["inexact"])
