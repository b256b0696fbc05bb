"""Strategies in the terms of the model: what they share, what they differ in, and who has none."""

import pytest

from swift_ft.lab.goodput import figures, ways
from swift_ft.lab.plan import rerouted
from swift_ft.lab.plan.interval import best_work_s
from tests.unit.plan.goodput.cases import HOUR, MTBF_S, cluster, made


@pytest.mark.parametrize(("stages", "microbatches", "replicas"), [(2, 4, 4), (4, 8, 4), (3, 5, 3)])
def test_adaptive_has_the_throughput_that_the_planner_finds_with_whole_backwards(
    stages: int, microbatches: int, replicas: int
) -> None:
    document = rerouted.build_rerouted(
        rerouted.Request(stages=stages, replicas=replicas, microbatches=microbatches, losses=replicas - 1)
    )
    size = cluster(
        ranks=stages * replicas, ranks_per_node=1, replicas=replicas, stages=stages, microbatches=microbatches
    )
    speeds = made(size, MTBF_S)[ways.ADAPTIVE].speeds
    assert len(speeds) == replicas + 1
    for row in document["rows"]:
        assert speeds[row["losses"]] == pytest.approx(row["ways"]["fused"]["throughput_bound"], rel=1e-9)
    assert speeds[0] == 1
    assert speeds[-1] == 0
    assert list(speeds) == sorted(speeds, reverse=True)


def test_a_node_with_several_replicas_takes_them_all() -> None:
    """64 replicas of 1 rank on 8 nodes: one node is an eighth of them."""
    size = cluster(ranks=64, ranks_per_node=8, replicas=64, stages=1)
    found = made(size, MTBF_S)
    assert size.parts == 1
    assert found[ways.DROP].speeds[1] == 7 / 8
    assert found[ways.ADAPTIVE].speeds[1] == 16 / 19  # 16 * 8 / 7, in whole microbatches
    assert found[ways.SHRINK].speeds[1] == 1 / 2


def test_shrink_adds_a_whole_step_for_each_pipeline_that_a_whole_one_adopts() -> None:
    speeds = made(cluster(replicas=4), MTBF_S)[ways.SHRINK].speeds
    assert speeds == (1.0, 1 / 2, 1 / 2, 1 / 4, 0.0)


def test_replay_takes_the_bound_of_its_recovery_group() -> None:
    """docs/planning.md (4): (ceil(M / d) + w - 1) / (M + P - 1)."""
    found = made(cluster(stages=4, microbatches=12), MTBF_S)
    assert found[ways.REPLAY].ratio == 12 / 15
    assert found[ways.SHARED].ratio == 3 / 15
    two = made(cluster(ranks=128, replicas=8, stages=16, microbatches=16), MTBF_S)  # 2 nodes, 8 stages each
    assert two[ways.REPLAY].ratio == (16 + 7) / 31
    assert ways.SHARED not in two  # what passes inside a node's group of stages is in no log
    alone = made(cluster(ranks=8, replicas=1, stages=1), MTBF_S)
    assert alone[ways.REPLAY].ratio == 1
    assert ways.SHARED not in alone


def test_intervals_are_the_best_or_the_users() -> None:
    size, of = cluster(), MTBF_S
    save_s = figures.resolve({})["save_s"].value
    best = best_work_s(save_s, 1.0, of / size.nodes)
    found = made(size, of)
    assert ways.GIVEN not in found
    for name in (ways.RESTART, ways.CHECKPOINT, ways.REINIT):
        assert found[name].work_s == best
    assert found[ways.REPLICA].every_s == max(best, figures.resolve({})["behind_s"].value)
    assert made(size, 1e10)[ways.REPLICA].every_s > figures.resolve({})["behind_s"].value
    replay = found[ways.REPLAY]
    assert replay.work_s == best_work_s(save_s, replay.ratio, of / size.nodes) > best
    mine = made(size, of, every_s=5000.0, snapshot_every_s=77.0)
    assert mine[ways.GIVEN].work_s == 5000
    assert mine[ways.RESTART].work_s == best
    assert mine[ways.REPLICA].every_s == mine[ways.SNAPSHOT].every_s == mine[ways.ADAPTIVE].every_s == 5000
    assert mine[ways.SNAPSHOT].work_s == 77


def test_every_stop_is_made_of_the_figures() -> None:
    of = figures.resolve({})
    found = made(cluster(ranks=16384, replicas=128), MTBF_S)
    own = of["coordinate_s_per_rank"].value * 16384
    ours = of["detect_s"].value + own + of["rebuild_s"].value
    copy = of["state_bytes"].value / of["copy_bytes_per_s"].value
    restart = sum(of[name].value for name in ("detect_s", "start_s", "rebuild_s", "load_s"))
    restart += of["restart_s_per_rank"].value * (16384 - figures.RESTART_RANKS)
    stops = {
        ways.RESTART: restart,
        ways.CHECKPOINT: ours + of["load_s"].value,
        ways.REINIT: ours + of["load_s"].value + of["reinit_s"].value,
        ways.SNAPSHOT: ours + copy,
        ways.REPLICA: ours + copy,
        ways.AUTO: ours + copy,
        ways.REPLAY: ours + of["load_s"].value + of["step_s"].value / 2,
        ways.SHRINK: ours,
        ways.ADAPTIVE: ours,
    }
    for name, stop in stops.items():
        assert found[name].stop_s == pytest.approx(stop), name
    assert found[ways.ADAPTIVE].back_s == pytest.approx(
        own + of["rebuild_s"].value + copy + of["save_s"].value
    )


def test_only_what_logs_pays_for_the_log() -> None:
    of = figures.resolve({"log_share": (0.25, "given"), "session_s_per_step": (0.0, "given")})
    found = made(cluster(), MTBF_S, {name: (f.value, f.source) for name, f in of.items()})
    logs = {name for name, way in found.items() if way.overhead == 0.25}
    assert logs == {ways.REPLAY, ways.SHARED, ways.AUTO}
    assert all(way.overhead == 0 for name, way in found.items() if name not in logs)


def test_who_cannot_is_left_out() -> None:
    for size in (cluster(), cluster(replicas=1), cluster(ranks=8, replicas=8, stages=1)):
        names = list(made(size, MTBF_S))
        assert names == [name for name in ways.NAMES if name in names]
    assert {ways.DROP, ways.LOSSY}.isdisjoint(made(cluster(), MTBF_S))
    assert {ways.REPLICA, ways.SHRINK, ways.ADAPTIVE}.isdisjoint(made(cluster(replicas=1), MTBF_S))
    assert ways.SNAPSHOT not in made(cluster(ranks=8, replicas=8, stages=1), MTBF_S)
    assert {ways.DROP, ways.LOSSY} <= made(cluster(ranks=64, replicas=64, stages=1), MTBF_S).keys()


def test_spares_hold_for_all_that_replace_and_no_row_stands_twice() -> None:
    found = made(cluster(spares=3), MTBF_S)
    for name, one in found.items():
        assert one.spares == (None if one.speeds else 3), name


def test_a_checkpoint_and_a_snapshot_follow_what_they_are_made_of() -> None:
    of = figures.resolve(
        {"step_s": (10.0, "given"), "state_bytes": (3e9, "given"), "copy_bytes_per_s": (1e9, "")}
    )
    assert of["save_s"].value == pytest.approx(13.0)
    assert of["snapshot_s"].value == pytest.approx(6.0)
    assert figures.resolve({"save_s": (2.0, "given"), "step_s": (10.0, "")})["save_s"].value == 2
    assert all(figure.source and figure.words for figure in figures.FIGURES.values())
    assert all(preset.source for preset in figures.PRESETS.values())


def test_the_presets_say_what_was_published() -> None:
    assert figures.PRESETS["llama3"].per_1000_node_days == pytest.approx(3.79, abs=0.005)
    assert figures.PRESETS["infinitehbd"].per_1000_node_days == pytest.approx(4.18, abs=0.005)
    assert figures.PRESETS["llama3"].mtbf_s / (16384 / 8) == pytest.approx(54 * 24 * HOUR / 419)


def test_parts_and_holders_of_what_does_not_divide() -> None:
    """8 replicas on 12 nodes: each has one and a half, so two parts are on other nodes."""
    size = cluster(ranks=96, replicas=8, stages=1)
    assert (size.nodes, size.parts, size.holders) == (12, 2, 8)
