"""The report for people: in a terminal and as a page."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from swift.drill import html, report
from swift.drill.config import DrillConfig
from swift.drill.console import LiveProgress, phase_bar, show, timeline_rows
from swift.drill.report import Evidence
from tests.unit.drill.evidence import config, good, good_trace
from tests.unit.drill.test_report import CORRUPT, FLIPPED, fallen_back_evidence

CASES: dict[str, tuple[DrillConfig, Evidence, str]] = {
    "exact": (config(), good(), "PASS (exact)"),
    "checkpoint": (config(*CORRUPT), fallen_back_evidence(**FLIPPED), "not by exact replay"),
    "fail": (config(), fallen_back_evidence(), "FAIL"),
    "nothing": (config(), Evidence(events=[], digests={}, twin_digests={}, exit_code=None), "INCONCLUSIVE"),
    "cut short": (config(), good(events=good_trace().events[:90]), "INCONCLUSIVE"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], str]:
    planned, evidence, words = CASES[request.param]
    return report.build(planned, evidence), words


def test_a_terminal_gets_the_verdict_the_reason_and_the_command(case: tuple[dict[str, Any], str]) -> None:
    result, words = case
    console = Console(file=io.StringIO(), width=2000)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert words in shown
    assert result["reason"] in shown
    assert f"again: {result['rerun']}\n" in shown


def test_the_page_needs_nothing_else(case: tuple[dict[str, Any], str]) -> None:
    result, words = case
    page = html.page(result)
    assert words in page
    assert re.findall(r"https?://|src=|@import|url\(|<script|<link", page) == []
    assert page.count("<svg") == len([r for r in result["recoveries"] if r["recovery_seconds"]]) + 1
    for tag in ("table", "svg", "tr", "td", "p", "div", "code"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag


def test_what_a_reason_says_cannot_become_markup() -> None:
    result = report.build(config(), good())
    result["reason"] = "<b>[red]x & y"
    assert "&lt;b&gt;[red]x &amp; y" in html.page(result)
    console = Console(file=io.StringIO(), width=100)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    assert "<b>[red]x & y" in console.file.getvalue()


def test_ranks_that_do_the_same_share_a_row() -> None:
    rows = timeline_rows(report.build(config(), good()))
    groups = [who for _, who, what in rows if "new group" in what]
    assert groups == ["ranks 0, 1, 2, 3"]
    assert rows[0][0] == 0
    assert "rank 2 killed in backward, step 8, microbatch 3" in rows[0][2]


def test_the_bar_is_as_long_as_the_phases() -> None:
    bar = phase_bar({"detect": 0.25, "replay": 0.75, "total": 1.0})
    assert [span.end - span.start for span in bar.spans] == [15, 45]


def test_progress_is_quiet_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveProgress() as progress:
        progress.begin("with faults", 3)
        progress.see({"event": "step_end", "step": 0})
        progress.see({"event": "fault", "rank": 1, "phase": "idle"})
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
