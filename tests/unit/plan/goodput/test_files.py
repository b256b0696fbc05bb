"""Files that say how faults came and what was measured: what is read, and each way to be refused in one line."""

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.errors import UsageError
from swift_ft.lab.goodput import cluster, command, ways

HEAD = "node,start_h,end_h\n"


def table(faults: list[tuple[str, float, float]], head: str = HEAD) -> str:
    return head + "".join(f"{node},{start!r},{end!r}\n" for node, start, end in faults)


TEN = [(f"n{k % 3}", float(k * k), k * k + 2.0) for k in range(10)]


def test_a_table_gives_times_outages_and_nodes() -> None:
    read = cluster.parse(table(TEN))
    assert read.gaps_s == tuple(3600.0 * (2 * k + 1) for k in range(9))
    assert read.outages_s == (7200.0,) * 9
    assert read.nodes == 3
    assert read.mean_gap_s == 3600 * 9
    assert read.repair_s == 7200
    assert read.together == 0


def test_columns_have_any_order_and_their_own_units() -> None:
    text = "end_days,what,node,start_s\n" + "".join(f"{k + 2},disk,n{k},{86400 * k}\n\n" for k in range(12))
    read = cluster.parse(text)
    assert read.gaps_s == (86400.0,) * 11
    assert read.outages_s == (172800.0,) * 11


def events(faults: list[tuple[str, float, float]]) -> list[dict[str, Any]]:
    """As InfiniteHBD-Trace has them."""
    found = []
    for node, start, end in faults:
        for kind, at in (("fault_start", start), ("fault_end", end)):
            what = {"Level": "Hardware Failure", "Class": "GPU", "Desc": "lost"}
            found.append({"node_id": node, "event_time": at / 24, "event_type": kind, "fault_type": what})
    return sorted(found, key=lambda event: (event["event_time"], event["event_type"]), reverse=False)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.integers(0, 5000).map(lambda k: 24.0 * k),
            st.integers(1, 300).map(lambda k: 24.0 * k),
        ),
        min_size=10,
        max_size=40,
        unique_by=lambda fault: (fault[0], fault[1]),
    )
)
def test_both_formats_say_the_same(drawn: list[tuple[str, float, float]]) -> None:
    faults = [(node, start, start + length) for node, start, length in drawn]
    if len({start for _, start, _ in faults}) < 2:
        return
    one, other = cluster.parse(table(faults)), cluster.parse(json.dumps(events(faults)))
    assert one.gaps_s == pytest.approx(other.gaps_s)
    assert one.nodes == other.nodes
    assert sum(one.gaps_s) == pytest.approx(3600 * (max(f[1] for f in faults) - min(f[1] for f in faults)))
    starts = [start for _, start, _ in faults]
    assert one.together == pytest.approx((len(starts) - len(set(starts))) / (len(starts) - 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: name the columns node, start_h and end_h"),
        ("node,start,end\na,1,2\n", "line 1: name the columns node, start_h and end_h"),
        ("node,start_weeks,end_h\n", "line 1: name the columns"),
        ("start_h,end_h\n1,2\n", "line 1: name the columns"),
        (HEAD + "a,1\n", "line 2: write a node, a start and an end"),
        (HEAD + "a,1,2\n\nb,soon,3\n", "line 4: write a node, a start and an end"),
        (HEAD + "a,5,4\n", "line 2: a fault ends when it begins or later"),
        (HEAD + "a,nan,4\n", "line 2: a fault ends when it begins or later"),
        (HEAD + "a,1,inf\n", "line 2: a fault ends when it begins or later"),
        (HEAD + '"a,1,2\n', "write CSV"),
        (table(TEN[:9]), "has 9 faults: give 10 or more"),
        (table([("a", 1.0, 2.0)] * 12), "has all its faults at the same moment"),
        ("[", "not JSON: line 1, column 2"),
        ("{}", "is no list of events"),
        ("[" * 100_000, "nested too deeply"),
        ('[{"node_id": "a"}]', "event 1: write node_id, event_type and event_time"),
        ("[7]", "event 1: write node_id"),
        (
            '[{"node_id": "a", "event_time": 1, "event_type": "fault_end"}]',
            "event 1: event_type is fault_start, or",
        ),
        (
            '[{"node_id": "a", "event_time": 1, "event_type": "ended"}]',
            "event 1: event_type is fault_start, or",
        ),
        ('[{"node_id": "a", "event_time": "x", "event_type": "fault_start"}]', "event 1: write node_id"),
    ],
)
def test_a_trace_that_is_none_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)) as refused:
        cluster.parse(text)
    assert len(str(refused.value).splitlines()) == 1


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.text(max_size=200), st.text(max_size=80).map(lambda text: HEAD + text)))
def test_no_text_does_worse_than_that(text: str) -> None:
    for parse in (cluster.parse, lambda text: command.parse_figures(text, "file")):
        with contextlib.suppress(UsageError):
            parse(text)


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
    read = command.parse_figures(json.dumps(document), "recovery.json")
    assert read.stops == pytest.approx(
        {ways.RESTART: 3 - 17 * 0.02, ways.AUTO: 0.5, ways.REPLICA: 0.5, ways.SHRINK: 0.01}
    )
    assert read.figures["session_s_per_step"][0] == pytest.approx(0.003)
    assert "recovery.json" in read.figures["session_s_per_step"][1]


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
    read = command.parse_figures(json.dumps({"bench": "recovery", "cases": [row]}), "f")
    # Step 6 is done 4 s after the kill. Three of them are steps, of 1 s each: one is done again, and two are new.
    assert read.stops == pytest.approx({ways.RESTART: 1.0})


def test_a_coordinator_gives_its_seconds_for_each_member() -> None:
    cases = [{"members": 64, "recovery_s": 0.2}, {"members": 1024, "recovery_s": 2.3}]
    read = command.parse_figures(json.dumps({"members": [64, 1024], "cases": cases}), "c.json")
    assert read.figures["coordinate_s_per_rank"][0] == pytest.approx(2.3 / 1024)
    assert read.stops == {}


def test_names_and_values_are_taken_as_they_are() -> None:
    read = command.parse_figures(
        '{"load_s": 40, "stop_s": {"restart": 300, "replay, shared": 2.5}}', "mine.json"
    )
    assert read.figures == {"load_s": (40.0, "mine.json")}
    assert read.stops == {"restart": 300.0, "replay, shared": 2.5}


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
        ('{"cases": [{"stages": 4}]}', "it: there is no figure cases"),
        ('{"speed": 4}', "it: there is no figure speed; there are step_s"),
        ('{"load_s": true}', "it: load_s must be a number"),
        ('{"load_s": NaN}', "NaN is no number"),
        ('{"step_s": 0}', "it: step_s is 0; give more than 0"),
        ('{"stop_s": 4}', "stop_s: give strategies and seconds"),
        ('{"stop_s": {"teleport": 4}}', "stop_s: there is no strategy 'teleport'"),
        ('{"stop_s": {"restart": -4}}', "stop_s: restart must be a number"),
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
        *((bad, None) for bad in ("", "h", "-1s", "3 weeks", "nan", "inf", "1e999", "0x10", "5m")),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert command.duration(text) == seconds
