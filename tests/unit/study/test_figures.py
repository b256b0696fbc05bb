"""Figures, words and pages of a study, from cells that are made up."""

import statistics
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from swift_ft.lab.study import figures, page
from swift_ft.lab.study.settings import PLAIN, STRATEGIES, TASKS, Cell, Settings

SETTINGS = Settings(
    tasks=("bytes", "digits"),
    strategies=("auto", "checkpoint", "shrink-drop"),
    rates=(1.0, 4.0),
    seeds=3,
    steps=100,
    checkpoint_every=25,
    repair_s=2.0,
)
CHECK = {"failures": 4, "batches_dropped": 0, "same_bits": True, "measured": 3.0, "calculated": 3.0}
SLOWER = {PLAIN: 10.0, "auto": 11.0, "checkpoint": 11.0, "shrink-drop": 11.0}


def result(cell: Cell) -> dict[str, Any]:
    """A failure costs auto 1 s, checkpoint 4 s and 12 steps, and shrink-drop 0.5 s, 8 batches and some of the rest."""
    failures = round(cell.rate)
    costs = {PLAIN: 0.0, "auto": 1.0, "checkpoint": 4.0, "shrink-drop": 0.5}
    dropped = failures if cell.strategy == "shrink-drop" else 0
    worse = 0.1 * dropped * (-1 if TASKS[cell.task].higher_is_better else 1)
    return {
        "planned": failures,
        "injected": failures,
        "again_s": [0.5] * failures,
        "measured": 3.0 + cell.seed + worse,
        "digests": [f"{cell.task}-{cell.seed}" + ("-dropped" if dropped else "")],
        "train_s": SLOWER[cell.strategy] + cell.seed / 10 + costs[cell.strategy] * failures,
        "step_s": SLOWER[cell.strategy] / 100,
        "peak_mib": 300.0 + (0 if cell.strategy == PLAIN else 50 + cell.seed),
        "steps_lost": 12 * failures if cell.strategy == "checkpoint" else 0,
        "batches_dropped": 8 * dropped,
        "fewer": [[step, [0]] for step in range(8 * dropped)],
    }


def made(**changed: dict[str, Any]) -> dict[str, Any]:
    results = {cell: result(cell) for cell in SETTINGS.cells()}
    for cell in results:
        results[cell] |= changed.get(cell.name.replace("-", "_"), {})
    checks = [{**CHECK, "cell": "bytes-auto-4-0"}]
    return figures.build(SETTINGS, results, "a machine", checks)


def row(found: dict[str, Any], task: str, strategy: str, rate: float) -> dict[str, Any]:
    (only,) = [r for r in found["tasks"][task]["rows"] if (r["strategy"], r["rate"]) == (strategy, rate)]
    return dict(only)


def mean(found: dict[str, Any], name: str) -> float:
    return float(found[name]["mean"])


@pytest.mark.parametrize("task", TASKS)
def test_what_a_failure_costs(task: str) -> None:
    found = made()
    auto, checkpoint, drop = (row(found, task, name, 4.0) for name in SETTINGS.strategies)
    assert [mean(each, "lost_s") for each in (auto, checkpoint, drop)] == pytest.approx([1.0, 4.0, 0.5])
    assert [mean(each, "steps_lost") for each in (auto, checkpoint, drop)] == [0.0, 12.0, 0.0]
    assert [mean(each, "batches_dropped") for each in (auto, checkpoint, drop)] == [0.0, 0.0, 8.0]
    assert [mean(each, "worse") for each in (auto, checkpoint, drop)] == pytest.approx([0.0, 0.0, 0.4])
    assert [each["same_bits"] for each in (auto, checkpoint, drop)] == [3, 3, 0]
    assert [each["failures"] for each in (auto, checkpoint, drop)] == [12, 12, 12]
    assert mean(auto, "again_s") == 0.5
    overheads = [15.0 / 10.0 - 1, 15.1 / 10.1 - 1, 15.2 / 10.2 - 1]
    assert mean(auto, "overhead") == pytest.approx(statistics.fmean(overheads))
    calm = row(found, task, "auto", 0.0)
    assert mean(calm, "step_overhead") == pytest.approx(0.1)
    assert (mean(calm, "memory_mib"), calm["lost_s"]) == (51.0, None)


def test_exact_ones_with_other_bits_are_named() -> None:
    assert made()["differ"] == []
    found = made(bytes_auto_4_1={"digests": ["other"]}, digits_auto_0_0={"digests": ["digits-0", "other"]})
    assert found["differ"] == ["digits-auto-0-0", "bytes-auto-4-1"]
    assert "other bits than without failures: bytes-auto-4-1" in figures.lines(found)
    assert row(found, "bytes", "auto", 4.0)["same_bits"] == 2
    assert "FAIL" in page.build(found)


def test_a_check_that_finds_other_bits_is_named() -> None:
    checks = [{**CHECK, "cell": "x", "same_bits": False}]
    found = figures.build(SETTINGS, {cell: result(cell) for cell in SETTINGS.cells()}, "a machine", checks)
    assert found["differ"] == ["x, by one process"]


def test_failed_runs_are_left_out_and_named() -> None:
    found = made(bytes_checkpoint_4_2={"failed": "no space"})
    assert found["failed"] == {"bytes-checkpoint-4-2": "no space"}
    assert row(found, "bytes", "checkpoint", 4.0)["runs"] == 2
    assert "failed: bytes-checkpoint-4-2: no space" in figures.lines(found)


def test_nothing_came_to_its_end() -> None:
    results = {cell: {"failed": "no"} for cell in SETTINGS.cells()}
    found = figures.build(SETTINGS, results, "a machine", [])
    assert "No run came to its end." in page.build(found)
    assert figures.lines(found)


def test_one_seed_has_no_interval() -> None:
    one = replace(SETTINGS, seeds=1)
    found = figures.build(one, {cell: result(cell) for cell in one.cells()}, "a machine", [])
    text = "\n".join(figures.lines(found))
    assert "±" not in text
    assert "0.400" in text


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole() -> None:
    text = page.build(made())
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert "src=" not in text
    assert text.count("<svg") == 4, "of each task one for each rate"
    for strategy in SETTINGS.strategies:
        assert strategy in text


def test_drawings_name_each_strategy() -> None:
    rows = [r for r in made()["tasks"]["bytes"]["rows"] if r["rate"] == 4.0]
    drawn = ElementTree.fromstring(page.tradeoff(rows, "bits & bytes"))
    assert set(SETTINGS.strategies) <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert set(page.COLOURS) == set(STRATEGIES)
    assert len(set(page.COLOURS.values())) == len(page.COLOURS)
