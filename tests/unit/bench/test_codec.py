"""The benchmark of the codecs: what it makes of its measurements, and one small run."""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench import codec
from swift_ft.lab.bench.command import main


def measured(stored: int, seconds: list[float]) -> dict[str, Any]:
    tensor = {"tensor": "t F", "dtype": "float32", "body": memoryview(bytes(1_000_000))}
    return {
        "tensors": [tensor],
        "seconds": {(0, "lz4", "compress"): seconds},
        "stored": {(0, "lz4"): stored},
        "copies": [1e9],
    }


def test_the_first_round_is_for_warming_up() -> None:
    (case,) = codec.evaluate(measured(500_000, [9.0, 0.001, 0.002, 0.004]))["cases"]
    assert (case["ratio"], case["compress_mb_s"]) == (2.0, pytest.approx(500))
    assert case["pays_below_mb_s"] == pytest.approx(500 / 1.15)
    assert case["decompress_mb_s"] is None


def test_a_ratio_below_the_bound_never_pays() -> None:
    assert codec.evaluate(measured(900_000, [0.1, 0.001]))["cases"][0]["pays_below_mb_s"] == 0.0


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "codec.json"
    assert main(["codec", "--steps", "2", "--rounds", "1", "--kibibytes", "256", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    cases = {(case["tensor"], case["dtype"], case["codec"]): case for case in result["cases"]}
    assert len(cases) == 3 * 2 * 2 * 2
    for (tensor, _, name), case in cases.items():
        assert 100_000 < case["bytes"] <= 600_000
        assert case["ratio"] >= 1
        if name == "lz4" and "ReLU F" not in tensor:
            assert case["ratio"] < 1.05  # plain lz4 finds nothing in floats
    assert cases["MLP, ReLU F", "float32", "lz4"]["ratio"] > 1.2
    assert cases["MLP, GELU B", "bfloat16", "bitshuffle"]["ratio"] > 1.2
    assert "bitshuffle" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["--rounds", "0"], ["--kibibytes", "0"], ["--steps", "-1"], ["--json", "/nowhere/here.json"]]
)
def test_bad_arguments_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        codec.main(words)
