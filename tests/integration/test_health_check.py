"""The gate before a place is used, with real processes: who fails it gets no rank, and nothing of a check is left."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.decisions import CHECKS_MAX
from tests.integration.launch_world import Launch, ScriptedCoordinator, Start, assert_all_gone
from tests.patience import eventually

# Notes for whom it runs; what follows is in a file, which a test writes.
CHECK = "--health-check=sh -c 'echo $LOCAL_RANK $SWIFT_HEALTH_CHECK >> checks; . ./on.$SWIFT_HEALTH_CHECK'"
HURRIED = (
    "-c",
    "import sys; from swift_ft.launch import decisions; decisions.CHECK_DELAY_FIRST_S = 0.01; "
    "from swift_ft.launch.command import main; sys.exit(main(sys.argv[1:]))",
)


@pytest.fixture
def coordinator(coordinator: ScriptedCoordinator) -> ScriptedCoordinator:
    coordinator.publish(state=pb.RUNNING, generation=1)
    return coordinator


@pytest.fixture
def start(start: Start, tmp_path: Path) -> Start:
    def checked(*flags: str, at_start: str = "exit 0", later: str = "exit 0", **options: object) -> Launch:
        (tmp_path / "on.start").write_text(at_start)
        (tmp_path / "on.replacement").write_text(later)
        return start(CHECK, *flags, **options)

    return checked


def checks(launch: Launch) -> list[str]:
    path = launch.directory / "checks"
    return path.read_text().splitlines() if path.exists() else []


def marked(launch: Launch, *names: str) -> list[psutil.Process]:
    """Whatever carries the environment of this launcher, wherever it hangs in the tree of processes. `names`: of the
    programs; all, if there are none."""
    mark = f"SWIFT_EVENTS={launch.trace}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                process = psutil.Process(int(path.parent.name))
                if not names or process.name() in names:
                    found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def kill(launch: Launch, number: int) -> None:
    """The first process of that rank, once the launcher knows that the job runs."""
    eventually(lambda: launch.events("view_seen"), "the launcher to know that the job runs")
    os.kill(launch.rank(number).pid, signal.SIGKILL)


def finish(launch: Launch, coordinator: ScriptedCoordinator, ranks: int = 2) -> str:
    """Ends the job as one that is finished; standard error. Nothing of it is left."""
    coordinator.publish(state=pb.FINISHED, generation=3)
    launch.go_all(ranks)
    code, stderr = launch.wait()
    assert code == 0, stderr
    assert_all_gone(marked(launch))
    return stderr


def test_every_place_is_checked_before_its_first_process_and_before_another_one(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    launch = start("--nproc-per-node=2")
    launch.rank(0)
    launch.rank(1)
    assert sorted(checks(launch)) == ["0 start", "1 start"]
    launch.warm_spares()
    kill(launch, 1)
    second = launch.rank(1, process=2)
    assert checks(launch)[2:] == ["1 replacement"]
    checked = launch.events("place_checked")[-1]
    (given,) = [event for event in launch.events("spare_assigned") if event["pid"] == second.pid]
    assert (checked["local_rank"], checked["fit"]) == (1, True)
    assert checked["t"] < given["t"]
    assert given["warm"]
    stderr = finish(launch, coordinator)
    assert "rank 1: killed by SIGKILL: replaced by process" in stderr
    assert not [told.unfit for told in coordinator.exits if told.unfit]


def test_a_machine_that_is_not_fit_at_the_start_takes_no_part(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    launch = start("--nproc-per-node=2", at_start='[ $LOCAL_RANK = 0 ] || { echo "no GPU 1" >&2; exit 7; }')
    code, stderr = launch.wait()
    assert (code, stderr) == (
        3,
        "swift: run: the health check has failed: local rank 1: exit code 7: no GPU 1\n",
    )
    assert not launch.events("worker_spawned")
    assert_all_gone(marked(launch))
    assert not coordinator.failures, "another machine may take its place"


def test_a_place_that_fails_once_is_checked_again(start: Start, coordinator: ScriptedCoordinator) -> None:
    launch = start("--nproc-per-node=2", later="[ -e cured ] || { touch cured; echo ECC error; exit 1; }")
    survivor = launch.rank(0)
    kill(launch, 1)
    launch.rank(1, process=2)
    assert survivor.alive
    assert checks(launch)[2:] == ["1 replacement"] * 2
    told = [(told.rank, told.unfit) for told in coordinator.exits]
    assert told == [(1, ""), (1, "exit code 1: ECC error")]
    said, replaced = finish(launch, coordinator).splitlines()
    assert said == (
        "swift: rank 1: its place has failed the health check (exit code 1: ECC error): tried again in 1 s"
    )
    assert replaced.startswith("swift: rank 1: killed by SIGKILL: replaced by process")


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_place_that_is_never_fit_is_given_up(
    start: Start, coordinator: ScriptedCoordinator, shrinks: bool
) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1, shrinks=shrinks)
    launch = start("--nproc-per-node=2", later="exit 1", launcher=HURRIED)
    launch.rank(0)
    launch.rank(1)
    kill(launch, 1)
    if shrinks:  # as soon as the coordinator knows that it is lost
        coordinator.publish(state=pb.RUNNING, generation=2, shrinks=True, vacant=[1])
    eventually(lambda: len(checks(launch)) == 2 + CHECKS_MAX or None, "all of its checks")
    given_up = f"rank 1: its place has failed the health check (exit code 1), {CHECKS_MAX} times in a row"
    if shrinks:
        launch.until_said(f"swift: {given_up}: it stays vacant")
        coordinator.publish(state=pb.FINISHED, generation=3)
        launch.go(0)
        assert launch.rest()[0] == 0
    else:
        code, stderr = launch.wait()
        assert code == 3
        assert stderr.splitlines()[-1] == f"swift: {given_up}: the job is stopped"
        assert coordinator.failures == [given_up]
    assert len(launch.ranks(1)) == 1
    assert_all_gone(marked(launch))


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("sleep 60", "it took longer than 3 s"),
        ("sleep 60 & echo it forked; exit 1", "exit code 1: it forked"),  # which holds the pipe
        (
            "head -c 5000000 /dev/zero | tr '\\0' x; echo; echo '  the end '; echo; exit 1",
            "exit code 1: the end",
        ),
        ("echo going; kill -SEGV $$", "killed by SIGSEGV: going"),
        ("printf '\\033[2J\\200bad'; exit 1", "exit code 1:  [2J\N{REPLACEMENT CHARACTER}bad"),
    ],
)
def test_whatever_a_check_does_it_ends_alone(
    start: Start, coordinator: ScriptedCoordinator, behaviour: str, reason: str
) -> None:
    """The launcher goes on, and nothing that the check has started is there when the place gets its process."""
    limit_s = 3 if behaviour == "sleep 60" else 30
    once = f"[ -e cured ] && exit 0; touch cured; {behaviour}"
    launch = start("--nproc-per-node=1", f"--health-check-s={limit_s}", later=once, launcher=HURRIED)
    launch.rank(0)
    kill(launch, 0)
    launch.rank(0, process=2)
    assert [e["reason"] for e in launch.events("place_checked") if not e["fit"]] == [reason]
    assert not marked(launch, "sleep", "sh", "head", "tr")
    assert reason in finish(launch, coordinator, ranks=1)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("because", ["start", "replacement"])
def test_a_check_ends_with_its_launcher(start: Start, signum: signal.Signals, because: str) -> None:
    hangs = "exec sleep 61"
    launch = start(
        "--nproc-per-node=1",
        "--sigterm-checkpoint-s=0",
        **({"at_start": hangs} if because == "start" else {"later": hangs}),
    )
    if because == "replacement":
        launch.rank(0)
        kill(launch, 0)

    def asleep() -> bool:
        return len(marked(launch, "sleep")) == 1

    eventually(asleep, "the check to hang")
    left = marked(launch)
    launch.process.send_signal(signum)
    code, _ = launch.wait()
    assert code == (143 if signum == signal.SIGTERM else -9)
    assert_all_gone(left)


def test_a_check_that_is_not_there_is_refused_at_once(start: Start) -> None:
    before = time.monotonic()
    launch = start("--health-check=/no/such/check --now")
    code, stderr = launch.wait()
    assert code == 2
    assert stderr == "swift: run: --health-check /no/such/check --now: there is no such command\n"
    assert not launch.events("launcher_start")
    assert time.monotonic() - before < 20.0
