"""The benchmark of undo: what it reports, not how fast anything is."""

import json
from pathlib import Path

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import undo
from swift_ft.lab.bench.command import run

SMALL = ["--parameters", "3000", "--rounds", "2"]


def test_every_case_is_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "undo.json"
    assert run("undo", [*SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["machine"].keys() >= {"cpu", "cores", "threads", "torch", "copy_gigabytes_per_second"}
    seen = {(r["optimizer"], r["implementation"], r["dtype"]) for r in report["results"]}
    assert {name for name, _, _ in seen} == set(undo.OPTIMIZERS)
    assert {"for-loop", "foreach", "fused"} == {i for name, i, _ in seen if name == "adamw"}
    assert ("sgd", "fused", "bfloat16") not in seen
    for result in report["results"]:
        assert result["error_exact"]["exact_share"] == 1.0
        assert result["error_exact"]["ulps_max"] == 0.0
        assert 0.9 < result["bytes_exact"] < 8
        assert result["undo_exact"] > 0
        assert ("journal" in result["goals_met"]) == (result["implementation"] != "for-loop")
        for name, goal in undo.GOALS.items():
            if name in result["goals_met"]:
                assert result["goals_met"][name] == (result[name] <= goal)
    for name, goal in report["goals"].items():
        met = [r["goals_met"][name] for r in report["results"] if name in r["goals_met"]]
        assert (goal["cases"], goal["cases_met"], goal["met"]) == (len(met), sum(met), all(met))
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(tuple(undo.OPTIMIZERS))]) == len(seen)


def test_the_state_is_not_that_of_a_first_step() -> None:
    bench = undo.Bench(undo.Case(optimizer="adamw", implementation="foreach", dtype="float32"), 3000, 1 << 20)
    bench.round()
    result = bench.result()
    assert result["bytes_exact"] > 1.9  # two bytes: of a first step the parameter's alone would be kept
    assert result["error_arithmetic"]["ulps_mean"] > 0


def test_what_is_timed_are_ratios_of_the_same_round() -> None:
    bench = undo.Bench(undo.Case(optimizer="lion", implementation="for-loop", dtype="float32"), 3000, 1 << 20)
    bench.seconds = {"plain": [1.0, 10.0, 100.0], "undo_exact": [2.0, 10.0, 90.0]}
    bench.seconds |= {name: [1.0, 10.0, 100.0] for name in ("journal", "undo_arithmetic")}
    result = bench.result()
    assert (result["undo_exact"], result["journal"], result["step_ms"]) == (1.0, 1.0, 10_000.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizers", "adam,magic"], "there are sgd, adam"),
        (["--dtypes", "int8"], "there are float32, bfloat16"),
        (["--rounds", "0"], "must be positive"),
        (["--fast"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(arguments: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run("undo", arguments)


def test_help_begins_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("undo", ["--help"])
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("Measures")
    assert first.endswith(".")
