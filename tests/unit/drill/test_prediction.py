"""What the planner predicts for a drill's groups, beside what its trace says: each piece of it broken once."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swift_ft.fault_grammar import parse
from swift_ft.lab.drill import report
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence, Facts
from swift_ft.lab.drill.replay_report import predicted_streams, section
from swift_ft.lab.drill.topology import Topology
from swift_ft.lab.plan.model import CostModel
from swift_ft.lab.plan.profile import Profile
from swift_ft.planner.groups import RecoveryGroups
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, RANKS, STEPS, Trace, config, good, kept

PAIRS = RecoveryGroups.parse("0-1,2-3")
MICROBATCHES, FORWARD_S, BACKWARD_S, SAVE_S = 4, 0.01, 0.02, 0.05
UPDATE_S = 0.007
# Of the tiny model: 2 sequences of 16 positions, 32 floats wide; 8 bytes a token.
BOUNDARY, BATCH, NORM = MICROBATCHES * 2 * 16 * 32 * 4, MICROBATCHES * 2 * 16 * 8, 4
LOGGED = {"s1.F": BOUNDARY, "s2.B": BOUNDARY, "s0.X": BATCH, "s3.T": BATCH} | {
    f"r{rank}.C": NORM for rank in range(RANKS)
}
OF_RANK = [("s0.X", "r0.C"), ("s1.F", "r1.C"), ("s2.B", "r2.C"), ("s3.T", "r3.C")]


def paced(groups: RecoveryGroups = PAIRS, **changes: Any) -> DrillConfig:
    return config(groups=groups, model="paced", **changes)


def profiled(trace: Trace, rank: int, step: int, replay: bool = False) -> None:
    trace.rank(
        rank,
        "profiled",
        0.0,
        step=step,
        replay=replay,
        logged={stream: LOGGED[stream] for stream in OF_RANK[rank]},
    )


def whole_trace(replay_step_s: float = 0.15) -> Trace:
    """Stages 2 and 3 replay, of which rank 2 was killed; a step of two stages takes (4 + 1) * 30 ms."""
    trace = Trace()
    trace.state("FORMING", 1)
    trace.state("RUNNING", 1)
    for step in range(KILL_STEP):
        trace.step(step)
        for rank in range(RANKS):
            profiled(trace, rank, step)
        if step + 1 == CHECKPOINT:
            trace.add("coordinator", "checkpoint_complete", version=CHECKPOINT, generation=1)
    trace.kill(2, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    trace.state("PLANNING", 2, 0.03)
    trace.plan(2, KILL_STEP, {**kept(), 3: ("REPLAY", CHECKPOINT)})
    trace.state("RECOVERING", 2, 0.04)
    for rank in (2, 3):
        trace.rank(rank, "restore_begin", 0.001, generation=2)
    for rank in (2, 3):
        trace.rank(rank, "restore_end", SAVE_S / 2, generation=2, version=CHECKPOINT)
    trace.t += 0.2  # until the fresh process has its log open
    for rank in (2, 3):
        trace.rank(rank, "replay_begin", 0.001, generation=2, version=CHECKPOINT)
    for step in range(CHECKPOINT, KILL_STEP):
        trace.t += replay_step_s - 0.01
        for rank in (2, 3):
            trace.rank(rank, "step_begin", 0.0, step=step, replay=True)
            trace.rank(rank, "step_end", 0.005, step=step, replay=True)
            profiled(trace, rank, step, replay=True)
    for rank in (2, 3):
        steps = KILL_STEP - CHECKPOINT
        trace.rank(
            rank, "replay_end", generation=2, steps=steps, records=9, microbatches=12, verified=9, filled=0
        )
    trace.state("RUNNING", 2, 0.02)
    for step in range(KILL_STEP, STEPS):
        trace.step(step)
        for rank in range(RANKS):
            profiled(trace, rank, step)
    trace.add("coordinator", "checkpoint_complete", version=10, generation=2)
    trace.finish()
    return trace


def profile(**changes: Any) -> Profile:
    """What the job's ranks have measured."""
    ranks = range(RANKS)
    made = Profile(
        name="drill",
        microbatches=MICROBATCHES,
        forward_s=tuple(FORWARD_S for _ in ranks),
        backward_s=tuple(BACKWARD_S for _ in ranks),
        update_s=tuple(UPDATE_S for _ in ranks),
        forward_bytes=(BOUNDARY,) * (RANKS - 1),
        backward_bytes=(BOUNDARY,) * (RANKS - 1),
        other_bytes=2 * BATCH + RANKS * NORM,
        machine_of_stage=tuple(ranks),
        log_write_bytes_per_s=1e9,
        log_read_bytes_per_s=1e9,
        checkpoint_interval_steps=CHECKPOINT,
        checkpoint_bytes=tuple(1 << 20 for _ in ranks),
        checkpoint_bytes_per_s=(1 << 20) / SAVE_S,
        machine_mtbf_s=tuple(1e5 for _ in ranks),
    )
    return replace(made, **changes)


def evidence(trace: Trace | None = None, **changes: Any) -> Evidence:
    """Of a run that went well."""
    events = sorted((trace or whole_trace()).events, key=lambda event: float(event["t"]))
    in_log = {stream: dict.fromkeys(range(8, STEPS), size) for stream, size in LOGGED.items()}
    return good(**{"events": events, "cores": 2, "in_log": in_log, "fetched": profile(), **changes})


def found(
    trace: Trace | None = None, given: DrillConfig | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, bool | None]]:
    shown, checks = section(Facts.of(given or paced(), evidence(trace, **changes)))
    assert shown is not None
    return shown, {check.name: check.answer for check in checks}


BYTES, TIME = "the log takes the predicted bytes", "recovery takes what was predicted"
OF_JOB = "the job's own profile has the predicted bytes"


def test_all_of_it_is_as_predicted() -> None:
    shown, checks = found()
    assert checks == {BYTES: True, OF_JOB: True, TIME: True}
    total = 2 * BOUNDARY + 2 * BATCH + RANKS * NORM
    assert shown["bytes"]["per_step"] == {"predicted": total, "measured": total}
    assert shown["bytes"]["streams"]["s1.F"] == {"predicted": BOUNDARY, "measured": [BOUNDARY]}
    assert set(shown["bytes"]["streams"]) == set(LOGGED)
    assert shown["bytes"]["in_log"] == [10, 11]
    (recovery,) = shown["recoveries"]
    assert recovery["replayed"] == [
        {
            "stages": [2, 3],
            "copies": 1,
            "steps": 3,
            "shared_steps": 0,
            "load_seconds": pytest.approx(SAVE_S),
            "step_seconds": pytest.approx((MICROBATCHES + 1) * (FORWARD_S + BACKWARD_S) + UPDATE_S),
            "alone_step_seconds": pytest.approx((MICROBATCHES + 1) * (FORWARD_S + BACKWARD_S) + UPDATE_S),
        }
    ]
    assert recovery["predicted_seconds"] == pytest.approx(SAVE_S + 3 * (0.15 + UPDATE_S))
    assert recovery["measured_seconds"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("text", ["0-1,2-3", "0,1,2,3", "0-2,3", "0-3"])
def test_the_bytes_are_those_of_the_planners_model(text: str) -> None:
    groups = RecoveryGroups.parse(text)
    bytes_of_model = CostModel(profile()).bytes_per_step(groups.starts[1:])
    assert bytes_of_model == sum(predicted_streams(paced(groups)).values())


def drop(name: str, **where: Any) -> Callable[[Trace], None]:
    def change(trace: Trace) -> None:
        trace.events = [
            event
            for event in trace.events
            if event["event"] != name or any(event.get(key) != value for key, value in where.items())
        ]

    return change


def logs(rank: int, step: int, **streams: int) -> Callable[[Trace], None]:
    def change(trace: Trace) -> None:
        for event in trace.events:
            if event["event"] == "profiled" and (event["rank"], event["step"]) == (rank, step):
                event["logged"].update({name.replace("_", "."): size for name, size in streams.items()})
                event["logged"] = {name: size for name, size in event["logged"].items() if size >= 0}

    return change


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (logs(1, 4, s1_F=BOUNDARY - 4), False),
        (logs(1, 4, s1_F=-1), False),  # nothing of it in one step
        (logs(0, 4, s0_F=BOUNDARY), False),  # what passes inside a group
        (logs(2, 6, s2_B=BOUNDARY + 4), False),  # in the replay as well
        (drop("profiled", rank=3), None),
        (drop("profiled"), None),
    ],
)
def test_a_byte_too_many_or_too_few_is_seen(change: Callable[[Trace], None], answer: bool | None) -> None:
    trace = whole_trace()
    change(trace)
    _, checks = found(trace)
    assert checks[BYTES] is answer


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({}, True),
        ({"forward_bytes": (BOUNDARY, BOUNDARY, BOUNDARY - 4)}, False),
        ({"backward_bytes": (0, BOUNDARY, BOUNDARY)}, False),  # inside a group, where nothing is logged
        ({"other_bytes": 2 * BATCH}, False),
    ],
)
@pytest.mark.parametrize("groups", ["0-1,2-3", "0-3"])
def test_the_profile_that_the_job_gives_has_the_same_bytes(
    change: dict[str, Any], answer: bool, groups: str
) -> None:
    given = profile(**change)
    shown, checks = found(given=paced(RecoveryGroups.parse(groups)), fetched=given)
    assert checks[OF_JOB] is answer
    assert shown["of_job"]["profile"] == given.document()


def test_faults_that_fit_these_groups_alone_do_not_matter() -> None:
    """A drill's configuration is checked as a whole: with other groups it may be none."""
    specs = (f"rank=3,step={KILL_STEP}", f"corrupt=log,step={KILL_STEP},stream=s1.F")
    damaged = replace(paced(), faults=tuple(parse(spec) for spec in specs))
    _, checks = found(given=damaged)
    assert checks[OF_JOB] is True


def test_a_profile_that_was_not_fetched_is_no_verdict() -> None:
    shown, checks = found(fetched=None, not_fetched="no step yet")
    assert shown["of_job"] == {"profile": None, "why": "no step yet"}
    assert checks.keys() == {BYTES}
    (recovery,) = shown["recoveries"]
    assert (recovery["within"], recovery["why"]) == (None, "INCONCLUSIVE: no step yet")


@pytest.mark.parametrize(
    ("stream", "step", "size", "answer"),
    [
        ("s1.F", 11, BOUNDARY - 4, False),
        ("s0.F", 10, BOUNDARY, False),
        ("s1.F", 9, 5, True),  # below the newest checkpoint: trimmed, or about to be
    ],
)
def test_what_is_in_the_log_counts_as_well(stream: str, step: int, size: int, answer: bool) -> None:
    in_log = {name: dict(sizes) for name, sizes in (evidence().in_log or {}).items()}
    in_log.setdefault(stream, {})[step] = size
    _, checks = found(in_log=in_log)
    assert checks[BYTES] is answer


@pytest.mark.parametrize(("step_s", "within"), [(0.15, True), (0.17, True), (0.22, False), (0.09, False)])
def test_a_recovery_that_takes_another_time_is_seen(step_s: float, within: bool) -> None:
    _, checks = found(whole_trace(step_s))
    assert checks[TIME] is within


@pytest.mark.parametrize(("shared", "step_s", "within"), [(3, 0.1, True), (3, 0.15, False), (2, 0.12, True)])
def test_copies_of_the_group_make_it_quicker(shared: int, step_s: float, within: bool) -> None:
    """Two of them: (2 + 1) * 30 ms a step, up to where the group goes on alone."""
    trace = whole_trace(step_s)
    for event in [event for event in trace.events if event["event"] == "replay_end"]:
        event["shared_steps"] = shared
        t, rank = event["t"] - 1e-3, event["rank"]
        begun = {"helpers": [rank - 2], "shares": [2, 2], "until": 8, "declined": {}, "together": [2, 3]}
        trace.events.append({"t": t, "event": "help_begin", "rank": rank, "generation": 2, **begun})
    shown, checks = found(trace)
    (recovery,) = shown["recoveries"]
    (run,) = recovery["replayed"]
    assert (run["copies"], run["shared_steps"]) == (2, shared)
    step = (MICROBATCHES // 2 + 1) * (FORWARD_S + BACKWARD_S) + UPDATE_S
    assert run["step_seconds"] == pytest.approx(step)
    assert recovery["predicted_seconds"] == pytest.approx(
        SAVE_S + shared * step + (3 - shared) * run["alone_step_seconds"]
    )
    assert (recovery["within"], checks[TIME]) == (within, within)


def test_times_are_not_judged_where_ranks_share_cores() -> None:
    shown, checks = found(given=config(groups=PAIRS, model="tiny"))
    assert TIME not in checks
    (recovery,) = shown["recoveries"]
    assert recovery["within"] is None
    assert recovery["why"].startswith("INCONCLUSIVE: 4 ranks compute on 2 cores")
    _, checks = found(given=config(groups=PAIRS, model="tiny"), cores=4)
    assert checks[TIME] is True


def test_neighbours_that_begin_together_are_one_pipeline() -> None:
    trace = whole_trace()
    plan = next(event for event in trace.events if event["event"] == "plan")
    for entry, (strategy, start) in zip(
        plan["ranks"], [("CATCH_UP", 7), ("CATCH_UP", 7), ("REPLAY", 5), ("REPLAY", 5)], strict=True
    ):
        entry |= {"strategy": strategy, "from_version": start}
    shown, _ = found(trace)
    runs = shown["recoveries"][0]["replayed"]
    assert [(run["stages"], run["steps"], run["load_seconds"] > 0) for run in runs] == [
        ([0, 1], 1, False),
        ([2, 3], 3, True),
    ]
    for entry in plan["ranks"]:
        entry |= {"strategy": "REPLAY", "from_version": 5}
    shown, _ = found(trace)
    (run,) = shown["recoveries"][0]["replayed"]
    assert run["stages"] == [0, 3]
    assert run["step_seconds"] == pytest.approx((MICROBATCHES + 3) * 0.03 + UPDATE_S)


def test_one_group_of_all_logs_nothing() -> None:
    one = RecoveryGroups.parse("0-3")
    trace = whole_trace()
    for event in trace.events:
        if event["event"] == "profiled":
            event["logged"] = {}
    shown, checks = found(trace, paced(one), in_log={})
    assert checks[BYTES] is True
    assert shown["bytes"]["per_step"] == {"predicted": 0, "measured": 0}
    _, checks = found(given=paced(one))
    assert checks[BYTES] is False


def test_dp_ranks_have_streams_of_their_own() -> None:
    shape = Topology(
        pipeline_ranks=2, replicas=2, steps=9, microbatches=4, schedule="1f1b", checkpoint_every=5
    )
    given = config("rank=1,step=3")
    given = DrillConfig(topology=shape, faults=given.faults, groups=RecoveryGroups.parse("0,1"), model="tiny")
    assert predicted_streams(given) == {
        **{f"s0c{c}.F": BOUNDARY for c in (0, 1)},
        **{f"s1c{c}.B": BOUNDARY for c in (0, 1)},
        **{f"s0c{c}.X": BATCH for c in (0, 1)},
        **{f"s1c{c}.T": BATCH for c in (0, 1)},
        **{f"r{rank}.C": NORM for rank in range(4)},
    }


def test_the_verdict_rests_on_it() -> None:
    given = paced()
    assert report.build(Facts.of(given, evidence()))["verdict"] == report.PASS
    trace = whole_trace()
    logs(0, 4, s0_F=BOUNDARY)(trace)
    result = report.build(Facts.of(given, evidence(trace)))
    assert result["verdict"] == report.FAIL
    assert f"the log takes the predicted bytes: s0.F [0, {BOUNDARY}], not 0" in result["reason"]
    assert report.build(Facts.of(config(), good()))["prediction"] is None
