"""Failures of `swift-ft run --failures`, of every kind, to real processes: what was planned is what happened, who
noticed is in the report, and the bits are those of a run in which nothing failed."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from swift_ft.fault_grammar import RankFault
from swift_ft.lab.failures.schedule import parse_entry, schedule_of
from swift_ft.launch import command
from tests.integration.failing_world import LEASES, STEPS, Ended, run, trainer, undisturbed
from tests.integration.forked import Forks
from tests.integration.launch_world import Start
from tests.patience import eventually

REPLICAS = ("--stages", "1", "--replicas", "2")


@pytest.fixture(scope="module")
def bits(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Any]:
    return undisturbed(forks, tmp_path_factory.mktemp("twin"), ranks=2)


def places(ended: Ended) -> list[tuple[Any, ...]]:
    """Where ranks have failed: as they tell it themselves."""
    told = sorted(ended.said("fault"), key=lambda event: event["id"])
    return [(event["rank"], event["step"], event["phase"], event["microbatch"]) for event in told]


def assert_noticed(ended: Ended, *by: str) -> None:
    """Every failure, by one of these events."""
    for failure in ended.failures:
        assert failure["injected_s"] is not None, failure
        assert failure["detected"] is not None, failure
        assert failure["detected"]["by"] in by, failure
        assert failure["detected"]["after_s"] >= 0.0, failure


def test_ranks_die_exactly_where_they_are_told_to(tmp_path: Path, bits: dict[str, Any]) -> None:
    planned = [
        "rank=1,step=3,microbatch=2,phase=forward,layer=blocks.0",
        "rank=0,step=6,microbatch=1,phase=backward,layer=blocks.0",
        "rank=1,step=9,phase=optimizer,bucket=0",
        "rank=0,step=12,phase=idle",
        "rank=1,step=16,microbatch=3,phase=backward",
    ]
    ended = run(tmp_path, *planned)
    assert ended.digests == bits
    assert places(ended) == [
        (1, 3, "forward", 2),
        (0, 6, "backward", 1),
        (1, 9, "optimizer", 0),
        (0, 12, "idle", 0),
        (1, 16, "backward", 3),
    ]
    assert_noticed(ended, "child_exit")
    killed = {event["pid"] for event in ended.said("child_exit") if event["code"] == -signal.SIGKILL}
    assert [failure["where"]["pid"] for failure in ended.failures] == [e["pid"] for e in ended.said("fault")]
    assert killed == {event["pid"] for event in ended.said("fault")}
    generations = [failure["generation"] for failure in ended.failures]
    # A suspicion that comes long before the death it was about makes a generation of its own.
    assert generations[0] >= 2
    assert generations == sorted(set(generations))
    assert all(failure["running_after_s"] > failure["detected"]["after_s"] for failure in ended.failures)
    assert ended.report["schedule"] == list(map(str, map(parse_entry, planned)))
    assert "failures: 5 planned, 5 injected, 5 noticed" in ended.output
    assert f"the same failures again: --failures {ended.path}" in ended.output


def test_a_seed_kills_and_its_report_kills_again_at_the_same_places(
    tmp_path: Path, bits: dict[str, Any]
) -> None:
    spec = "every=weibull,shape=0.6,mtbf=14,until=18,seed=5,per_host=1,phase=any,microbatches=4"
    planned = schedule_of(spec, 2).faults
    assert len(planned) >= 3
    first = run(tmp_path / "first", spec)
    again = run(tmp_path / "again", str(first.path))
    for ended in (first, again):
        assert ended.digests == bits
        assert places(ended) == [
            (f.rank, f.step, f.phase, f.microbatch) for f in planned if isinstance(f, RankFault)
        ]
        assert_noticed(ended, "child_exit")
    assert again.report["schedule"] == first.report["schedule"]


@pytest.mark.matrix
def test_hosts_that_die_as_a_whole_die_at_once(tmp_path: Path, forks: Forks) -> None:
    shape = ("--stages", "2", "--replicas", "2")
    twin = undisturbed(forks, tmp_path / "twin", *shape, ranks=4)
    spec = "every=exponential,mtbf=12,count=2,seed=2,per_host=2,together=1"
    ended = run(tmp_path / "run", spec, ranks=4, spares=2, trainer_arguments=trainer(STEPS, *shape))
    assert ended.digests == twin
    ranks = [event["rank"] for event in sorted(ended.said("fault"), key=lambda e: e["t"])]
    assert [{*ranks[:2]}, {*ranks[2:]}] == [
        {f.rank for f in schedule_of(spec, 4).faults[n : n + 2] if isinstance(f, RankFault)} for n in (0, 2)
    ]
    assert len({failure["generation"] for failure in ended.failures}) == 2, "two of a host are one loss"


@pytest.mark.matrix
def test_a_rank_that_is_stopped_and_continued_goes_on(tmp_path: Path, bits: dict[str, Any]) -> None:
    ended = run(tmp_path, "kind=stop,rank=1,step=6,microbatch=1,phase=forward,for=0.5")
    assert ended.digests == bits
    (failure,) = ended.failures
    assert failure["over_s"] - failure["injected_s"] >= 0.5
    assert failure["generation"] is None, "it was back within its lease"
    assert len({event["pid"] for event in ended.said("step_end") if event["rank"] == 1}) == 1


@pytest.mark.matrix
def test_a_rank_that_is_stopped_for_good_is_fenced(tmp_path: Path, bits: dict[str, Any]) -> None:
    ended = run(tmp_path, "kind=stop,rank=1,step=6,phase=idle", coordinator_flags=LEASES)
    assert ended.digests == bits
    assert_noticed(ended, "view_seen", "fenced_kill", "suspicion_seen")
    (fault,) = ended.said("fault")
    assert {event["pid"] for event in ended.said("fenced_kill")} == {fault["pid"]}
    assert ended.failures[0]["over_s"] is None


@pytest.mark.matrix
def test_a_rank_that_hangs_is_suspected_and_goes_on(tmp_path: Path, bits: dict[str, Any]) -> None:
    hang = "kind=hang,rank=0,step=12,microbatch=2,phase=backward,for=8"
    ended = run(tmp_path, hang, coordinator_flags=LEASES)
    assert ended.digests == bits
    assert places(ended) == [(0, 12, "backward", 2)]
    assert_noticed(ended, "suspicion_seen")
    assert ended.failures[0]["generation"] is None, "a hang is shown, not acted on"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("service", "sign"), [("logserver", "log_silent_seen"), ("coordinator", "coordinator_unanswered")]
)
def test_a_service_that_is_killed_is_started_again(
    service: str, sign: str, tmp_path: Path, bits: dict[str, Any]
) -> None:
    ended = run(tmp_path, f"service={service},step=4,for=5", "rank=1,step=14", coordinator_flags=LEASES)
    assert ended.digests == bits
    assert_noticed(ended, sign, "child_exit")
    (killed,) = ended.said("service_killed")
    assert [killed["pid"]] == [e["service_pid"] for e in ended.said("started") if e["service"] == service]
    assert ended.failures[0]["over_s"] - ended.failures[0]["injected_s"] >= 5.0


@pytest.mark.matrix
@pytest.mark.parametrize("away_s", [40, 75])
def test_a_loss_waits_for_a_coordinator_that_is_away(
    away_s: int, tmp_path: Path, bits: dict[str, Any]
) -> None:
    """For longer than a suspicion may be unanswered by one that is there, and than one call is made again."""
    ended = run(tmp_path, f"service=coordinator,step=4,for={away_s}", "rank=1,step=14")
    assert ended.digests == bits
    coordinator, lost = ended.failures
    assert coordinator["injected_s"] < lost["injected_s"] < coordinator["over_s"]
    assert {event["rank"] for event in ended.said("child_exit") if event["code"] == 3} <= {1}, (
        "survivors wait"
    )


BESIDE: dict[str, tuple[list[str], tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "a log server that is lost is replaced by the other": (
        ["rank=1,step=8", "log=0,step=8"],
        (),
        {"log_servers": 2, "copies": 2, "log_lost_s": 6.0},
        ("log_silent_seen",),
    ),
    "a damaged log is refused and the checkpoint stands": (
        ["rank=1,step=8", "corrupt=log,step=8,stream=s0.F"],
        (),
        {},
        ("stream_corrupt",),
    ),
    "a damaged checkpoint leads to the one before": (
        ["rank=1,step=13,phase=idle", "corrupt=checkpoint,rank=0,step=13"],
        ("--strategy", "checkpoint"),
        {},
        (),
    ),
    "a copy that is damaged on its way is copied again": (
        ["rank=1,step=6,phase=optimizer", "corrupt=copy,rank=1"],
        REPLICAS,
        {},
        (),
    ),
}
"""What is planned, for which job, with which services, and by which events it is noticed."""


@pytest.mark.matrix
@pytest.mark.parametrize("case", BESIDE)
def test_what_fails_or_is_damaged_beside_a_rank(
    case: str, tmp_path: Path, forks: Forks, bits: dict[str, Any]
) -> None:
    planned, job, services, signs = BESIDE[case]
    twin = undisturbed(forks, tmp_path / "twin", *job, ranks=2) if job else bits
    ended = run(tmp_path / "run", *planned, trainer_arguments=trainer(STEPS, *job), **services)
    assert ended.digests == twin
    assert_noticed(ended, "child_exit", "view_seen", *signs)
    if "corrupt=log" in planned[1]:
        assert {event["id"] for event in ended.said("corrupted")} == {"fault1"}


# --- a script without a session, and a coordinator that says what the test wants ---


def test_any_script_is_killed_at_a_time(start: Start, tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "2", "--failures", "rank=1,at=3", "--log-dir", "out")
    launch = start(*flags)
    first = launch.rank(1)
    second = launch.rank(1, process=2)
    assert not first.alive
    assert second.pid != first.pid
    launch.go_all()
    code, said = launch.wait()
    assert code == 0, said
    (failure,) = json.loads(next((tmp_path / "out").glob("*/failures.json")).read_text())["failures"]
    assert failure["where"] == {"rank": 1, "pid": first.pid}
    assert failure["injected_s"] >= 3
    assert failure["detected"]["by"] == "child_exit"


def test_what_has_stopped_goes_on_before_the_run_is_over(start: Start, tmp_path: Path) -> None:
    """Nothing that was done to processes outlasts the run; what never came is named."""
    planned = "kind=stop,rank=0,at=0.1,for=0.2;rank=1,step=3"
    flags = ("--nproc-per-node", "2", "--failures", planned, "--log-dir", "out")
    launch = start(*flags)
    launch.rank(0)
    launch.rank(1)
    eventually(lambda: launch.events("fault_over"), "SIGCONT")
    launch.go_all()
    code, said = launch.wait()
    assert code == 0, said
    assert len(launch.ranks(0)) == 1
    assert "2 planned, 1 injected" in said
    assert "rank=1,step=3,microbatch=0,phase=backward: did not happen: rank 1 never came to its place" in said


# --- what cannot be ---


UNREACHABLE = ["--coordinator", "127.0.0.1:1", "--job", "test", "--nproc-per-node", "2", "--failures"]


@pytest.mark.parametrize(
    ("failures", "word"),
    [
        ("kind=burn,rank=0,step=1", "unknown kind 'burn': one of kill, stop, hang, device, slow"),
        ("rank=2,step=1", "rank must be 0 to 1"),
        ("trace.csv", "there is no such file"),
        ("bad.csv", "line 2: start must be a number of 0 or more, not 'soon'"),
        ("service=coordinator,step=3", "no service of swift listens at 127.0.0.1:1"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    failures: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "bad.csv").write_text("node,start\n0,soon\n")
    (tmp_path / "script.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert command.main([*UNREACHABLE, failures, "--log-dir", "out", "script.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("swift: run: --failures")
    assert word in line
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
