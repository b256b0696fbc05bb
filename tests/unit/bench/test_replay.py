"""The benchmark of replays: what it makes of a trace. (One small run of all of it: the matrix.)"""

import json
from pathlib import Path
from typing import Any

import pytest

from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import replay
from swift_ft.lab.bench.command import run

SPENT: dict[str, Any] = {
    "bottleneck": "line",
    "split": {"compute": 0.1, "log": 0.1, "neighbour": 0.0, "line": 0.2},
    "waits": {"1": {"compute": 0.1, "log": 0.1, "neighbour": 0.0, "line": 0.2}},
}
SHAPE = {"microbatches": 12, "stages": 4}


def trace(helpers: int, replayed: float = 0.1, shared: int = 4) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    t = 0.0
    for step in range(5):
        t += 0.3 if step else 5.0
        found.append({"t": t, "event": "step_end", "rank": 1, "step": step, "replay": False})
        found.append({"t": t, "event": "step_end", "rank": 0, "step": step, "replay": False})
    t += 0.01
    found.append({"t": t, "event": "fault", "rank": 1})
    if helpers:
        found.append({"t": t, "event": "help_begin", "rank": 1, "helpers": list(range(helpers))})
    for step in range(4):
        t += replayed if step else 2.0
        found.append({"t": t, "event": "step_end", "rank": 1, "step": step, "replay": True})
    end = {"steps": 4, "shared_steps": shared if helpers else 0, "log_wait_s": 0.03, **SPENT}
    return [*found, {"t": t, "event": "replay_end", "rank": 1, **end}]


def test_the_first_steps_do_not_count() -> None:
    found = replay.from_trace(trace(2), 2)
    assert found["workers"] == 3
    assert found["steps_s"] == pytest.approx([0.3] * 4)  # from the end of one to the end of the next
    assert found["replayed_s"] == pytest.approx([0.1] * 3)
    one = replay.case(SHAPE, found)
    assert (one["ratio"], one["bound"]) == (pytest.approx(1 / 3, abs=1e-3), pytest.approx(4 / 15, abs=1e-3))
    assert one["over_bound"] == pytest.approx(1.25, abs=1e-3)
    assert one["waited_for_log_share"] == pytest.approx(0.1)
    assert one["then_s"] is None
    assert {name: one[name] for name in SPENT} == SPENT


def test_what_comes_between_the_replay_and_the_run() -> None:
    events = trace(2)
    end = events[-1]["t"]
    events += [{"t": end + after, "event": "step_begin", "rank": 1, "replay": False} for after in (0.25, 0.5)]
    assert replay.case(SHAPE, replay.from_trace(events, 2))["then_s"] == pytest.approx(0.25)


@pytest.mark.parametrize(("replayed", "met"), [(0.09, True), (0.11, False)])
def test_goals(replayed: float, met: bool) -> None:
    one = replay.case(SHAPE, replay.from_trace(trace(2, replayed), 2))
    assert one["met"] is met
    shown = replay.text(
        {
            "cases": [one],
            "machine": "here",
            "steps": 4,
            "microbatch_s": 0.02,
            "gradient_bytes": 1e6,
            **SHAPE,
        }
    )
    assert ("NOT MET" in shown[-1]) is not met
    assert shown[-1].split()[-1 if met else -3] == "line"
    assert "50%" in shown[-1]


@pytest.mark.parametrize(
    ("workers", "least"), [(1, 12 / 15), (2, 6 / 15), (3, 4 / 15), (4, 3 / 15), (5, 3 / 15)]
)
def test_bounds(workers: int, least: float) -> None:
    assert replay.bound(12, 4, workers) == pytest.approx(least)


@pytest.mark.parametrize(
    ("size", "copies", "least"), [(2, 1, 13 / 15), (2, 2, 7 / 15), (2, 3, 5 / 15), (3, 5, 5 / 15)]
)
def test_the_pipeline_of_a_group_fills_in_every_copy(size: int, copies: int, least: float) -> None:
    assert replay.bound(12, 4, copies, size) == pytest.approx(least)
    one = replay.case(SHAPE, replay.from_trace(trace(copies - 1), copies - 1), size)
    assert (one["group_stages"], one["workers"]) == (size, copies)
    assert one["over_bound"] == pytest.approx(1 / 3 / least, abs=1e-3)


def test_sizes_of_groups() -> None:
    assert (replay._sizes(None, 4), replay._sizes(None, 3), replay._sizes("4,1", 8)) == ([1, 2], [1], [4, 1])
    assert (replay._groups(1, 4), replay._groups(2, 6), replay._groups(4, 8)) == (
        "",
        "0-1,2-3,4-5",
        "0-3,4-7",
    )


def test_a_replay_that_was_not_shared_is_no_measurement() -> None:
    with pytest.raises(ServiceError, match="3 of 4 steps were shared"):
        replay.from_trace(trace(2, shared=3), 2)
    with pytest.raises(ServiceError, match="nobody helped"):
        replay.from_trace([event for event in trace(2) if event["event"] != "help_begin"], 2)
    with pytest.raises(ServiceError, match="not replayed"):
        replay.from_trace([event for event in trace(0) if event["event"] != "replay_end"], 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--stages", "2"],
        ["--microbatches", "3"],
        ["--milliseconds", "0"],
        ["--json", "/"],
        ["--group-stages", "3"],
        ["--group-stages", "4"],
        ["--group-stages", "two"],
        ["--copies-max", "0"],
    ],
)
def test_usage(flags: list[str]) -> None:
    with pytest.raises(UsageError):
        run("replay", flags)


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_a_small_run(tmp_path: Path) -> None:
    assert (
        run(
            "replay",
            [
                "--microbatches",
                "4",
                "--steps",
                "3",
                "--copies-max",
                "2",
                "--json",
                str(tmp_path / "out.json"),
            ],
        )
        == 0
    )
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [(one["group_stages"], one["workers"]) for one in cases] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(one["then_s"] > 0 for one in cases)
