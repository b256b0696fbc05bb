"""Recovery groups of several stages that are replayed in copies, each a small pipeline of helpers. docs/replay.md.

Real processes, real kills, every bit compared. (``scripts/test -m matrix`` has the wider ones.)
"""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drill_world import Twins, drill, kills, passed
from tests.integration.test_shared_replay import said
from tests.integration.trainer_world import Run, run_trainer

pytestmark = pytest.mark.timeout(300)

# Seven microbatches, which neither two nor three copies divide; two spares.
SIX = ["--stages", "6", "--groups", "0-1,2-3,4-5", "--microbatches", "7", "--spares", "2"]


def shared(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for recovery in report["recoveries"] for one in recovery["shared_replays"]]


def in_copies(report: dict[str, Any], owners: list[int], shares: list[int]) -> None:
    """Each owner has a helper in every copy, and nobody helps twice."""
    assert report["exact"] is True
    found = sorted(shared(report), key=lambda one: one["rank"])
    assert [one["rank"] for one in found] == owners
    busy = [rank for one in found for rank in one["helpers"]]
    assert len(set(busy)) == len(busy) == len(owners) * (len(shares) - 1)
    for one in found:
        assert one["shares"] == shares
        assert one["alone_because"] == ""
        assert one["steps"] > 0
        assert list(one["microbatches"].values()) == [share * one["steps"] for share in shares[:-1]]


def as_predicted(report: dict[str, Any]) -> None:
    """What the helpers computed is what the log has, and nothing that passes inside a group is there."""
    assert report["prediction"]["bytes"]["equal"] is True


@pytest.mark.parametrize(
    ("rank", "helpers", "owners", "shares"),
    [(3, 1, [2, 3], [4, 3]), pytest.param(0, 2, [0, 1], [3, 2, 2], marks=pytest.mark.matrix)],
)
def test_two_stages(
    rank: int, helpers: int, owners: list[int], shares: list[int], twins: Twins, tmp_path: Path
) -> None:
    """In the middle and at an end of the pipeline; whoever of the group has died."""
    words = [*SIX, "--helpers", str(helpers), *kills(f"rank={rank},step=8,microbatch=2")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    in_copies(report, owners, shares)
    as_predicted(report)
    assert report["recoveries"][0]["verified_sends"] > 0


@pytest.mark.matrix
def test_a_helper_is_killed(twins: Twins, tmp_path: Path) -> None:
    """Whoever waits for it, in its copy and in its line, comes free; its own group is replayed as well."""
    specs = ["rank=2,step=8,microbatch=1", "rank=4,phase=replay,microbatch=1"]
    report = passed(drill(*SIX, "--helpers", "2", *kills(*specs), twins=twins, at=tmp_path))
    assert report["exact"] is True
    assert len(report["recoveries"][0]["generations"]) == 2
    replayed = {stage for stage, name in report["strategy"].items() if name in ("replay", "catch_up")}
    assert replayed >= {"2", "3", "4", "5"}


TRAINED, SAVED = 8, 4
"""Steps; the version of the checkpoint that is replayed from, complete before the loss."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    place = tmp_path_factory.mktemp("groups-twin")
    return run_trainer(place, "helping.py", "exact", TRAINED, "0-1,2-3", ranks=4, faults=[])


def pairs(directory: Path, mode: str, rank: int) -> Run:
    fault = {"rank": rank, "step": 7, "microbatch": 1, "phase": "backward", "hold": True}
    words = ["helping.py", mode, TRAINED, "0-1,2-3"]
    return run_trainer(directory, *words, ranks=4, faults=[fault], saved=SAVED)


def same(run: Run, twin: Run, *, but: str = "") -> None:
    """Bit for bit, at the end and at the recovery. `but`: a part that the twin does not have."""
    found = {
        name: {part: digest for part, digest in digests.items() if part != but}
        for name, digests in run["digests"].items()
    }
    for name, digests in twin["digests"].items():
        assert found[name] == digests, name
    for name in [name for name in found if "-g" in name]:
        assert found[name] == twin["digests"][name.split("-g")[0] + ".json"]


@pytest.mark.parametrize(
    ("mode", "rank"),
    [
        ("exact", 2),
        pytest.param("exact", 1, marks=pytest.mark.matrix),
        pytest.param("walked", 1, marks=pytest.mark.matrix),
        pytest.param("walked", 3, marks=pytest.mark.matrix),
    ],
)
def test_what_trainers_do(mode: str, rank: int, trained: Run, tmp_path: Path) -> None:
    """An external input for every stage, another type at the boundaries than inside, parameters left unused; a schedule
    that asks for receives ahead of time."""
    run = pairs(tmp_path, mode, rank)
    owners = [0, 1] if rank < 2 else [2, 3]
    for begun in said(run, "help_begin"):
        assert (begun["shares"], begun["declined"], begun["together"]) == ([3, 2], {}, owners)
    assert sorted(event["rank"] for event in said(run, "help_begin")) == owners
    assert [event["shared_steps"] for event in said(run, "replay_end")] == [3, 3]
    assert [event["microbatches"] for event in said(run, "helped")] == [9, 9]
    assert not said(run, "refused")
    same(run, trained)


def test_if_one_owner_cannot_share_a_step_none_does(trained: Run, tmp_path: Path) -> None:
    """In the second of three steps: the rest is replayed by the group alone, from that step's first microbatch on."""
    run = pairs(tmp_path, "hooked", 2)
    ends = said(run, "help_end")
    assert [(event["steps"], event["reason"]) for event in ends] == [
        (1, "rank 2: hooks on parameters' gradients")
    ] * 2
    assert [event["shared_steps"] for event in said(run, "replay_end")] == [1, 1]
    assert not said(run, "refused")
    same(run, trained, but="modules")  # it has a hook more


@pytest.mark.matrix
def test_a_copy_is_whole_or_nobody_helps(trained: Run, tmp_path: Path) -> None:
    """Of the only copy one cannot make the module; the other is sent away."""
    run = pairs(tmp_path, "half", 2)
    for begun in said(run, "help_begin"):
        assert begun["helpers"] == []
        assert "no room" in begun["declined"].pop("1")
        assert begun["declined"] == {}
    assert [event["shared_steps"] for event in said(run, "replay_end")] == [0, 0]
    same(run, trained)


@pytest.mark.matrix
def test_a_helper_that_computes_something_else_is_found_out(trained: Run, tmp_path: Path) -> None:
    """At whichever end of the group: nothing inside is compared. The group is replayed again, without help."""
    run = pairs(tmp_path, "wrong", 2)
    (refused, *_) = said(run, "refused")
    assert "the tensor that a helper computed" in refused["reason"]
    first, last = said(run, "plan")
    assert first["help"]
    assert "help" not in last
    assert [entry["strategy"] for entry in last["ranks"]].count("REPLAY") == 2
    same(run, trained)


@pytest.mark.matrix
@pytest.mark.parametrize("victim", [2, 3])
def test_an_owner_is_killed(victim: int, twins: Twins, tmp_path: Path) -> None:
    """The one that took the lost rank's place, or the survivor that gave its state up."""
    specs = ["rank=2,step=8,microbatch=1", f"rank={victim},phase=replay,microbatch=6"]
    report = passed(drill(*SIX, "--helpers", "2", *kills(*specs), twins=twins, at=tmp_path))
    assert len(report["recoveries"][0]["generations"]) == 2
    in_copies(report, [2, 3], [3, 2, 2])


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("phase", ["forward", "optimizer"])
@pytest.mark.parametrize("rank", [0, 1, 4, 5])
def test_every_end(rank: int, phase: str, schedule: str, twins: Twins, tmp_path: Path) -> None:
    where = ",microbatch=2" if phase == "forward" else ""
    words = [
        *SIX,
        "--helpers",
        "3",
        "--schedule",
        schedule,
        *kills(f"rank={rank},step=9,phase={phase}{where}"),
    ]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    as_predicted(report)
    owners = [rank // 2 * 2, rank // 2 * 2 + 1]
    # Who lags by a step takes its whole group back to the checkpoint, and two groups side by side replay alone.
    if {int(stage) for stage, name in report["strategy"].items() if name != "keep"} == set(owners):
        in_copies(report, owners, [3, 2, 2])


@pytest.mark.matrix
@pytest.mark.parametrize("microbatches", [8, 9, 11])
@pytest.mark.parametrize("helpers", [0, 1, 2, 3])
def test_eight_ranks(helpers: int, microbatches: int, twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "8", "--groups", "0-1,2-3,4-5,6-7", "--microbatches", str(microbatches)]
    words += ["--helpers", str(helpers), *kills("rank=4,step=8,microbatch=2")]
    report = passed(drill(*words, twins=twins, at=tmp_path))
    as_predicted(report)
    largest = -(-microbatches // (1 + helpers))
    copies = -(
        -microbatches // largest
    )  # of nine microbatches three copies compute three each, and so would a fourth
    each, left = divmod(microbatches, copies)
    if helpers:
        in_copies(report, [4, 5], [each + (copy < left) for copy in range(copies)])
    else:
        assert not shared(report)


@pytest.mark.matrix
@pytest.mark.parametrize("rank", [1, 4, 7])
def test_four_stages(rank: int, twins: Twins, tmp_path: Path) -> None:
    words = ["--stages", "8", "--groups", "0-3,4-7", "--microbatches", "9", "--helpers", "3"]
    report = passed(drill(*words, *kills(f"rank={rank},step=8,microbatch=2"), twins=twins, at=tmp_path))
    in_copies(report, [0, 1, 2, 3] if rank < 4 else [4, 5, 6, 7], [5, 4])
    as_predicted(report)


@pytest.mark.matrix
def test_three_stages_and_a_single_one(twins: Twins, tmp_path: Path) -> None:
    """Two groups at once that are no neighbours: one copy for three stages, and a helper for the single one."""
    words = [
        "--stages",
        "8",
        "--groups",
        "0,1,2-4,5,6,7",
        "--microbatches",
        "9",
        "--helpers",
        "1",
        "--spares",
        "2",
    ]
    specs = ["rank=3,step=8,microbatch=2,phase=forward", "rank=0,step=8,microbatch=2,phase=forward"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    as_predicted(report)
    assert sorted(one["rank"] for one in shared(report)) == [0, 2, 3, 4]


@pytest.mark.matrix
def test_a_damaged_record_at_the_end_of_a_group(twins: Twins, tmp_path: Path) -> None:
    """Whoever reads it refuses; everybody who waits for it in the copies comes free."""
    words = [*SIX, "--helpers", "2", "--steps", "17"]
    specs = ["rank=2,step=8,microbatch=1", "corrupt=log,step=8,stream=s1.F"]
    report = passed(drill(*words, *kills(*specs), twins=twins, at=tmp_path))
    assert set(report["strategy"].values()) == {"checkpoint"}


@pytest.mark.matrix
@pytest.mark.parametrize("helpers", [1, 2])
def test_copies_take_the_time_that_the_planner_predicts(helpers: int, twins: Twins, tmp_path: Path) -> None:
    """(ceil(M / d) + w - 1) t, of stages that sleep. On a machine with nothing else to do.

    Seventeen steps: the formula is one of steps. A fresh process needs 0.1 to 0.2 s more in all, whatever it replays:
    in its first step torch computes one more microbatch to infer shapes, and much happens for the first time.
    """
    shape = ["--model", "paced", "--steps", "37", "--checkpoint-every", "18", "--stages", "6"]
    words = [*shape, "--groups", "0-1,2-3,4-5", "--microbatches", "8", "--helpers", str(helpers)]
    report = passed(drill(*words, *kills("rank=2,step=35,microbatch=1"), twins=twins, at=tmp_path))
    (recovery,) = report["prediction"]["recoveries"]
    (run,) = recovery["replayed"]
    assert (run["stages"], run["copies"], run["shared_steps"]) == ([2, 3], 1 + helpers, 17)
    assert recovery["within"] is True
