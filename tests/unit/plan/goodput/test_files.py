"""Files that say how faults came and what was measured: what is read, and each way to be refused in one line."""

import argparse
import json
import math
import re
from typing import Any

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.goodput import cluster, command, ways
from swift_ft.lab.plan.arguments import duration

FAULTS = [(float(k * k), k * k + 2.0, f"n{k % 3}") for k in range(10)]


def test_a_trace_gives_times_outages_and_nodes() -> None:
    read = cluster.Trace.of(FAULTS[::-1])
    assert read.gaps_s == tuple(2 * k + 1 for k in range(9))
    assert (read.outages_s, read.nodes, read.mean_gap_s, read.repair_s) == ((2.0,) * 9, 3, 9, 2)
    assert (read.together, read.cv) == (0, pytest.approx(math.sqrt(20 / 3) * 2 / 9))
    assert cluster.Trace.of([*FAULTS, FAULTS[3]]).together == pytest.approx(1 / 10)


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (FAULTS[:9], "has 9 faults that ended: give 10 or more"),
        ([(1.0, 2.0, "a")] * 12, "at the same moment"),
    ],
)
def test_a_trace_that_says_too_little_is_refused(faults: list[tuple[float, float, str]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        cluster.Trace.of(faults)


def case(system: str, **changes: Any) -> dict[str, Any]:
    of: dict[str, Any] = {
        "system": system,
        "lost_s": 3.0,
        "steps_again": 17,
        "step_s": 0.02,
        "undisturbed": {"step_s": 0.008, "peak_mib": 500},
    }
    return of | changes


def test_a_recovery_bench_gives_stops_and_what_a_session_adds() -> None:
    document = {
        "bench": "recovery",
        "cases": [
            case("torchrun", undisturbed={"step_s": 0.005}),
            case("swift", lost_s=0.5, steps_again=0),
            case("swift-shrink", lost_s=0.01, steps_again=0),
            case("torchft"),
            {"system": "torchft-all", "missing": "torchft is not installed"},
            case("swift-replay", failed="it never went on"),
        ],
    }
    given, stops = command.parse_figures(json.dumps(document), "recovery.json")
    assert stops == pytest.approx(
        {ways.RESTART: 3 - 17 * 0.02, ways.AUTO: 0.5, ways.REPLICA: 0.5, ways.SHRINK: 0.01}
    )
    assert given["session_s_per_step"][0] == pytest.approx(0.003)
    assert "recovery.json" in given["session_s_per_step"][1]


def test_what_the_recovery_bench_says_fits_what_the_bench_writes() -> None:
    """The names are those of `swift_ft.lab.bench.peers.report.summary`."""
    from swift_ft.lab.bench.peers import report, systems

    assert set(command.SYSTEMS) <= set(systems.SYSTEMS)
    marks = [{"what": "killed", "at": 10.0, "step": 5, "replica": 1, "pid": 2}]
    for replica in (0, 1):
        marks += [
            {"what": "stepped", "at": 5.0 + k, "step": k, "replica": replica, "pid": 1} for k in range(5)
        ]
        marks += [
            {"what": "stepped", "at": 12.0 + k, "step": 4 + k, "replica": replica, "pid": 1} for k in range(3)
        ]
        marks.append({"what": "ended", "at": 20.0, "replica": replica, "pid": 1, "digest": "d"})
    row = report.summary("torchrun", [report.judge(marks, "d")], {"step_s": 0.5, "peak_mib": 3.0})
    _, stops = command.parse_figures(json.dumps({"bench": "recovery", "cases": [row]}), "f")
    # Step 6 is done 4 s after the kill. Three of them are steps, of 1 s each: one is done again, and two are new.
    assert stops == pytest.approx({ways.RESTART: 1.0})


def test_a_coordinator_gives_its_seconds_for_each_member() -> None:
    cases = [{"members": 64, "recovery_s": 0.2}, {"members": 1024, "recovery_s": 2.3}]
    given, stops = command.parse_figures(json.dumps({"members": [64, 1024], "cases": cases}), "c.json")
    assert given["coordinate_s_per_rank"][0] == pytest.approx(2.3 / 1024)
    assert stops == {}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("[]", "is no object"),
        ("nope", "not JSON: line 1, column 1"),
        ('{"bench": "recovery"}', "has no cases"),
        ('{"bench": "recovery", "cases": [3]}', "has no cases"),
        ('{"bench": "recovery", "cases": [{"system": "torchft"}]}', "has no case that went on"),
        (
            json.dumps({"bench": "recovery", "cases": [case("swift", step_s="x")]}),
            "case 1: step_s must be a number",
        ),
        (
            json.dumps({"bench": "recovery", "cases": [case("swift", step_s=-1)]}),
            "case 1: step_s must be a number",
        ),
        (
            json.dumps({"bench": "recovery", "cases": [case("swift", undisturbed=None)]}),
            "case 1, undisturbed: step_s",
        ),
        ('{"cases": [{"members": 4}]}', "case 1: recovery_s must be a number"),
        ('{"cases": [{"members": 0, "recovery_s": 1}]}', "has no members"),
        ('{"cases": [{"stages": 4}]}', "case 1: members must be a number"),
        ('{"load_s": 40}', "has no cases: give the whole JSON of the bench"),
    ],
)
def test_measures_that_are_none_are_refused_in_one_line(document: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        command.parse_figures(document, "f.json")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5h", 5400.0),
        ("30min", 1800.0),
        ("264d", 264 * 86400.0),
        ("250ms", 0.25),
        ("1e3s", 1000.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1s", "3 weeks", "nan", "inf", "1e999", "0x10", "5m"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write a time"):
        duration(text)
