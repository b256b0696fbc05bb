"""`swift-ft plan --goodput`: the tables, the document, and what is refused."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from swift_ft.lab.goodput import figures, ways
from swift_ft.lab.plan.command import main

SMALL = ["--goodput", "--ranks", "64", "--replicas", "4", "--stages", "2", "--machine-mtbf", "20d"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The document of the defaults."""
    out = tmp_path_factory.mktemp("goodput") / "goodput.json"
    assert main(["--goodput", "--json", str(out)]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def test_it_prints_tables_that_fit_and_name_every_strategy_and_source(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--checkpoint-every", "45min"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("64 ranks on 8 nodes, 4 replicas; a fault every 2.5 d")
    rows = {
        name: next(line for line in lines if re.match(rf"{re.escape(name)}  +\d", line))
        for name in ways.NAMES
        if name not in (ways.DROP, ways.LOSSY)
    }
    for row in rows.values():
        assert re.search(r"\d+\.\d\d%  +\d+\.\d\d%", row)
    assert "45 min" in rows[ways.GIVEN]
    for name in figures.FIGURES:
        assert any(line.startswith(f"  {name} ") for line in lines)
    flat = " ".join(shown.split())
    for figure in figures.FIGURES.values():
        assert figure.source in flat


def test_a_row_has_the_share_of_all_nodes_and_what_is_in_its_stop(written: dict[str, Any]) -> None:
    document = written
    for row in document["strategies"]:
        nodes = document["nodes"]
        assert row["of_all_nodes"] == pytest.approx(row["share"] * nodes / (nodes + row["spares"]))
        assert (row["spares"] == 0) == (row["name"] in (ways.SHRINK, ways.ADAPTIVE))
        assert row["stop_s"] == pytest.approx(sum(row["stop_parts"].values()))


def test_figures_come_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SMALL, "--set", "detect_s=3", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["figures"]["detect_s"]["value"] == 3
    assert document["figures"]["detect_s"]["source"] == "given"


def test_a_preset_is_a_published_cluster(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--goodput", "--preset", "infinitehbd", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    preset = figures.PRESETS["infinitehbd"]
    assert document["ranks"] == preset.ranks
    assert preset.source in document["faults"]["source"]


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert main([*SMALL, "--json", str(out)]) == 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot write {out}: File too large; give another place" in capsys.readouterr().err
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
