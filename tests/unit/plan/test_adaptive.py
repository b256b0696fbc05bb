"""`swift-ft plan --adaptive`: the table, the document, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.lab.plan import rerouted
from swift_ft.lab.plan.command import main
from swift_ft.planner.schedule import Costs, plan_step
from tests.unit.recovery.adaptive.works import problems

SIZE = ["--adaptive", "--stages", "3", "--replicas", "3", "--microbatches", "4"]


def request(**changes: Any) -> rerouted.Request:
    return rerouted.Request(**({"stages": 3, "replicas": 3, "microbatches": 4} | changes))


def test_it_prints_a_table_and_writes_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main([*SIZE, "--json", str(out)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "3 stages, 3 replicas, 4 microbatches each; a step without losses takes 18"
    head = next(n for n, line in enumerate(shown) if line.startswith("losses"))
    assert [line.split()[0] for line in shown[head + 1 : head + 4]] == ["0", "1", "2"]
    assert shown[head + 1].split()[1:5] == ["none", "1.00", "of", "1.00"]
    assert "1 at stage 2" in shown[head + 2]
    for way in rerouted.WAYS:
        assert any(line.startswith(way.name) and way.words in line for line in shown)
    assert max(map(len, shown)) <= 120
    document = json.loads(out.read_text())
    assert [row["losses"] for row in document["rows"]] == [0, 1, 2]
    assert [row["dropped"] for row in document["rows"]] == [1, 2 / 3, 1 / 3]


def test_more_freedom_is_more_throughput_and_none_exceeds_its_bound() -> None:
    document = rerouted.build_rerouted(request())
    for row in document["rows"]:
        ways = row["ways"]
        assert all(way["throughput"] <= way["throughput_bound"] + 1e-9 for way in ways.values())
        order = [ways[way.name]["throughput"] for way in rerouted.WAYS]
        assert order == sorted(order)
        assert ways["staggered"]["throughput"] > row["dropped"] or not row["losses"]


def test_the_worst_place_is_where_the_step_is_longest() -> None:
    slow_first = Costs(forward=(3.0, 1.0, 1.0), backward_input=(3.0, 1.0, 1.0))
    assert rerouted.worst(request(costs=slow_first), 1) == (1, 0, 0)
    assert rerouted.worst(request(), 1) == (0, 0, 1)
    assert rerouted.worst(request(), 0) == (0, 0, 0)
    assert sorted(rerouted.worst(request(), 5)) == [1, 2, 2]


@settings(max_examples=20, deadline=None)
@given(st.data(), st.sampled_from([rerouted.WAYS[0], rerouted.WAYS[1]]))
def test_planned_steps_do_all_the_work(data: st.DataObject, way: rerouted.Way) -> None:
    counts = data.draw(st.tuples(*[st.integers(0, 2)] * 3))
    planned = rerouted.planned(request(), way, counts)
    assert problems(planned.work, planned.step) == []
    assert len(planned.step.slots) == 9 - len(planned.lost)
    assert all(sum(at == stage for at, _ in planned.lost) >= count for stage, count in enumerate(counts))


def test_whole_pipelines_are_left_out_where_that_is_shorter() -> None:
    """With 1F1B's memory and whole backwards, who adopts a microbatch of one stage holds its activations too long."""
    of = request(stages=4, replicas=4, microbatches=8)
    planned = rerouted.planned(of, rerouted.WAYS[0], (0, 1, 0, 0))
    assert planned.lost == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert planned.step.length == 42 < plan_step(of.work(rerouted.WAYS[0], [(1, 0)])).length
