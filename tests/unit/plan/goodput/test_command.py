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
        assert re.search(r"\d+\.\d\d%  +\d+\.\d\d% ± \d\.\d\d", row)
    assert "45 min" in rows[ways.GIVEN]
    for name in figures.FIGURES:
        assert any(line.startswith(f"  {name} ") for line in lines)
    flat = " ".join(shown.split())
    for figure in figures.FIGURES.values():
        assert figure.source in flat


def test_the_same_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    texts = []
    for number, seed in enumerate(("1", "1", "2")):
        out = tmp_path / f"{number}.json"
        assert main([*SMALL, "--seed", seed, "--json", str(out)]) == 0
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]


def test_both_ways_agree_with_the_published_exponential_faults(written: dict[str, Any]) -> None:
    document = written
    assert [row["name"] for row in document["strategies"] if not row["agrees"]] == []
    for row in document["strategies"]:
        nodes = document["nodes"]
        assert row["of_all_nodes"] == pytest.approx(row["simulated"] * nodes / (nodes + row["spares"]))
        assert (row["spares"] == 0) == (row["name"] in (ways.WAIT, ways.SHRINK, ways.ADAPTIVE))
        assert row["stop_s"] == pytest.approx(sum(row["stop_parts"].values()))


def test_where_they_differ_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes: a second fault in a recovery always takes the partner."""
    pair = ["--goodput", "--ranks", "16", "--replicas", "2", "--stages", "2", "--machine-mtbf", "6h"]
    pair += ["--set", "repair_s=2h"]
    assert main(pair) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"snapshot: -\d\.\d+%; \d+ of \d+ faults took the last node", shown)
    assert main([*pair, "--cv", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"restart: \+\d\.\d+%; times between faults are not exponential", shown)


def test_figures_come_from_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main([*SMALL, "--set", "detect_s=3", "--stop", "restart=2min", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["figures"]["detect_s"]["value"] == 3
    assert document["figures"]["detect_s"]["source"] == "given"
    stops = {row["name"]: row["stop_s"] for row in document["strategies"]}
    assert stops["restart"] == 120


def test_a_trace_gives_its_own_rate_and_repairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "faults.csv", tmp_path / "out.json"
    file.write_text(
        "node,start,end\n" + "".join(f"n{k % 5},{10 * k / 24},{(10 * k + 4) / 24}\n" for k in range(20))
    )
    assert main([*SMALL[:-2], "--trace", str(file), "--trace-nodes", "16", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    # One fault in 10 h of 16 nodes; the job has 8 of such nodes.
    assert document["faults"]["job_mtbf_s"] == pytest.approx(20 * 3600)
    assert document["faults"]["repair_s"] == pytest.approx(4 * 3600)
    assert document["faults"]["cv"] == pytest.approx(0, abs=1e-9)
    assert "the mean outage in" in document["figures"]["repair_s"]["source"]


def test_a_preset_is_a_published_cluster(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["--goodput", "--preset", "infinitehbd", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    preset = figures.PRESETS["infinitehbd"]
    assert document["ranks"] == preset.ranks
    assert document["faults"]["cv"] == pytest.approx(preset.cv)
    assert preset.source in document["faults"]["source"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--ranks", "100"], "--ranks 100: give a multiple of the 8 ranks of a node"),
        (["--ranks", "2000000"], "--ranks 2000000: give 2 to 1000000"),
        (["--replicas", "3"], "--replicas 3: give a number that divides 16384 ranks"),
        (["--replicas", "2048", "--stages", "16"], "--stages 16: a replica has 8 ranks"),
        (["--machine-mtbf", "soon"], "--machine-mtbf: soon: write a time, such as"),
        (["--machine-mtbf", "0"], "--machine-mtbf 0: give 1 s to"),
        (["--cv", "0"], "--cv 0: give 0.1 to 10"),
        (["--cv", "2", "--trace", "f.csv"], "give one of --cv and --trace"),
        (["--trace-nodes", "4"], "--trace-nodes is the number of nodes of --trace FILE"),
        (["--trace", "/no/such/file"], "--trace /no/such/file: No such file or directory; name a file"),
        (["--set", "load_s"], "--set load_s: write NAME=VALUE"),
        (["--set", "speed=4"], "--set speed=4: there is no figure speed"),
        (["--set", "step_s=0"], "--set step_s=0: step_s is 0; give more than 0"),
        (["--set", "helpers=3h"], "--set helpers=3h: write NAME=VALUE"),
        (["--stop", "restart"], "there is no strategy ''"),
        (["--stop", "nothing=4"], "--stop nothing=4: there is no strategy 'nothing'"),
        (["--checkpoint-every", "0s"], "--snapshot-every: give a time above 0"),
        (["--machine-mtbf", "5d"], "a node is in repair for 132.8 h and fails every 120 h: give a longer"),
        (["--seed", "-1"], "--seed -1: give 0 or more"),
        (["--times", "1,1,1"], "unrecognized arguments: --times"),
        (["--json", "/no/such/place.json"], "there is no directory /no/such"),
    ],
)
def test_what_is_wrong_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--goodput", *argv]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert words in shown.err


def test_flags_of_this_mode_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile.json", "--ranks", "8"]) == 2
    assert "unrecognized arguments: --ranks 8" in capsys.readouterr().err


def test_a_trace_needs_the_number_of_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.csv"
    file.write_text("node,start,end\n" + "".join(f"n{k % 5},{k},{k + 4}\n" for k in range(20)))
    assert main(["--goodput", "--trace", str(file)]) == 2
    assert "give --trace-nodes, of all nodes that were watched; 5 had faults" in capsys.readouterr().err
    assert main(["--goodput", "--trace", str(file), "--trace-nodes", "4"]) == 2
    assert "of all nodes that were watched; 5 had faults" in capsys.readouterr().err


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert main([*SMALL, "--json", str(out)]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"cannot write {out}: File too large; give another place" in capsys.readouterr().err
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]
