"""The report for people: in a terminal and as a page."""

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
from rich.console import Console

from swift_ft.lab.drill import report
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.console import page, phase_bar, show, timeline_rows
from swift_ft.lab.drill.facts import Evidence
from tests.unit.drill.evidence import KILL_STEP, Trace, config, good, good_trace
from tests.unit.drill.replica_evidence import by_undo, trace_of
from tests.unit.drill.replica_evidence import config as replica_config
from tests.unit.drill.replica_evidence import evidence as replica_evidence
from tests.unit.drill.test_report import CORRUPT, fallen_back_evidence, flipped

CASES: dict[str, tuple[DrillConfig, Evidence, str]] = {
    "exact": (config(), good(), "PASS (exact)"),
    "checkpoint": (
        config(*CORRUPT),
        fallen_back_evidence(flipped(Trace.begun(KILL_STEP))),
        "not by exact replay",
    ),
    "fail": (config(), fallen_back_evidence(), "FAIL"),
    "nothing": (config(), good(events=[], digests={}, exit_code=None), "INCONCLUSIVE"),
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


def test_a_report_that_nobody_reads_is_no_failed_drill() -> None:
    """rich exits with 1, which is the verdict FAIL."""

    class Unread(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    result = report.build(config(), good())
    with redirect_stdout(Unread()), pytest.raises(BrokenPipeError):
        show(result)


def test_the_page_needs_nothing_else(case: tuple[dict[str, Any], str]) -> None:
    result, words = case
    shown = page(result)
    assert words in shown
    assert re.findall(r"https?://|src=|@import|url\(|<script|<link", shown) == []
    for tag in ("span", "pre", "style"):
        assert len(re.findall(rf"<{tag}[ >]", shown)) == shown.count(f"</{tag}>"), tag
    for check in result["checks"]:
        assert check["name"].split()[-1] in shown


def test_what_a_reason_says_cannot_become_markup() -> None:
    result = report.build(config(), good())
    result["reason"] = "<b>[red]x & y"
    assert "&lt;b&gt;[red]x &amp; y" in page(result)
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


def event(t: float, name: str, who: str = "coordinator", **fields: Any) -> dict[str, Any]:
    rank = {"rank": int(who.removeprefix("rank"))} if who.startswith("rank") else {}
    return {"t": 100 + t, "event": name, "who": who, **rank, **fields}


def test_the_timeline_is_in_order() -> None:
    """Rank 1 was shown as ready with the others, before it had its state; ranks had two spellings."""
    fault = event(0.0, "fault", "rank1", step=7, microbatch=0, phase="backward")
    timeline = [
        *(event(-1.0, "state", state="RUNNING", generation=1), fault),
        event(0.3, "state", state="FENCING", generation=2, reason="rank 1 was killed by signal 9"),
        *(event(0.31, "notice", "rank0", generation=2), event(0.32, "notice", "rank2", generation=2)),
        event(0.33, "state", state="RECOVERING", generation=2),
        *(event(0.34, "ready", f"rank{rank}", generation=2) for rank in (0, 2)),
        *(
            event(0.35, "restore_begin", "rank1", generation=2),
            event(0.36, "restore_end", "rank1", generation=2),
        ),
        event(0.37, "replay_begin", "rank1", version=0),
        event(0.9, "replay_end", "rank1", steps=7, seconds=0.53, records=1, verified=1, filled=0),
        event(0.91, "ready", "rank1", generation=2),
        event(0.92, "state", state="RUNNING", generation=2),
        event(2.0, "state", state="FINISHED", generation=2),
    ]
    rows = timeline_rows({"timeline": timeline})
    assert [round(t, 2) for t, _, _ in rows] == sorted(round(t, 2) for t, _, _ in rows)
    assert [(who, what) for _, who, what in rows] == [
        ("rank 1", "rank 1 killed in backward, step 7, microbatch 0"),
        ("coordinator", "FENCING, generation 2: rank 1 was killed by signal 9"),
        ("ranks 0, 2", "told to stop (the last at +0.320)"),
        ("coordinator", "RECOVERING, generation 2"),
        ("ranks 0, 2", "ready (the last at +0.340)"),
        ("rank 1", "gets its state (a checkpoint or a replica)"),
        ("rank 1", "has its state"),
        ("rank 1", "rank 1 replays from version 0"),
        ("rank 1", "rank 1 replayed 7 steps in 530 ms: 1 records read, 1 sends verified, 0 filled"),
        ("rank 1", "ready"),
        ("coordinator", "RUNNING, generation 2"),
        ("coordinator", "FINISHED, generation 2"),
    ]


def test_the_bar_is_as_long_as_the_phases() -> None:
    bar = phase_bar({"detect": 0.25, "replay": 0.75, "total": 1.0})
    assert [span.end - span.start for span in bar.spans] == [15, 45]


ARITHMETIC = "PASS (by the loss curve: an arithmetic undo is not exact)"


@pytest.mark.parametrize("words", ["PASS (exact)", ARITHMETIC])
def test_replicas_are_shown(words: str) -> None:
    planned, evidence = replica_config(), replica_evidence()
    if words == ARITHMETIC:
        planned = replica_config(updates="wait_free", undo="arithmetic")
        evidence = replica_evidence(trace_of(by_undo("arithmetic", False)))
    result = report.build(planned, evidence)
    console = Console(file=io.StringIO(), width=2000)
    show(result, console)
    assert isinstance(console.file, io.StringIO)
    for shown in (console.file.getvalue(), page(result)):
        assert words in shown
        assert "rank 3 from 2 (0.0 MB)" in shown
        assert "rank 3 has 0.0 MB of state from rank 2" in shown
        assert ("3 buckets of rank 2, arithmetic" in shown) == (words == ARITHMETIC)
