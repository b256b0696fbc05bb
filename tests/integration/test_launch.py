"""The launcher with real processes: replaces one rank, keeps the others, leaves nothing behind."""

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch.agent import LEFT_S
from swift_ft.launch.command import PRELOAD_DEFAULT
from swift_ft.launch.standalone import free_port
from tests.integration.launch_world import (
    Launch,
    Rank,
    ScriptedCoordinator,
    Start,
    assert_all_gone,
)
from tests.patience import eventually


def title_of(pid: int) -> tuple[str, str]:
    """What `top` and `ps` call it."""
    proc = Path("/proc", str(pid))
    return (proc / "comm").read_text().strip(), (proc / "cmdline").read_text().rstrip("\0")


def test_a_dead_rank_is_replaced_by_the_warm_spare_and_the_others_stay(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2", "--job=test", "--checkpoint-dir=ckpt")
    survivor, victim = launch.rank(0), launch.rank(1)
    (spare,) = launch.warm_spares()
    (server,) = [event["server_pid"] for event in launch.events("fork_server_ready")]
    assert title_of(survivor.pid) == ("swift-rank0", "swift-ft: rank 0 of test: script.py --flag value")
    assert title_of(spare) == ("swift-spare", f"swift-ft: spare of launcher {launch.process.pid}")
    assert title_of(server) == ("swift-forksrv", f"swift-ft: fork server of launcher {launch.process.pid}")

    eventually(lambda: launch.events("view_seen"), "the launcher to know that the job runs")
    os.kill(victim.pid, signal.SIGKILL)
    second = launch.rank(1, process=2)
    assert second.pid == spare
    assert title_of(second.pid)[0] == "swift-rank1"
    assert second.argv == victim.argv == ["script.py", "--flag", "value"]
    own = {"SWIFT_INCARNATION": second.env["SWIFT_INCARNATION"], "SWIFT_HAS_RUN": "1"}
    assert second.env == victim.env | own
    assert second.env["SWIFT_INCARNATION"] != victim.env["SWIFT_INCARNATION"]
    wanted = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    wanted |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    wanted |= {"SWIFT_JOB": "test", "SWIFT_COORDINATOR": coordinator.address}
    wanted |= {"SWIFT_CHECKPOINT_DIR": str(launch.directory / "ckpt"), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert wanted.items() <= second.env.items()
    told = eventually(lambda: coordinator.exits, "the notice of the exit")[0]
    assert (told.job, told.rank, told.pid, told.exit_code) == ("test", 1, victim.pid, -signal.SIGKILL)
    assert told.incarnation == victim.env["SWIFT_INCARNATION"]

    # While the job recovers there is no new spare; once it runs again, there is one.
    time.sleep(0.5)
    assert len(launch.events("worker_spawned")) == 3
    coordinator.publish(state=pb.RECOVERING, generation=2)
    time.sleep(0.3)
    assert len(launch.events("worker_spawned")) == 3
    coordinator.publish(state=pb.RUNNING, generation=2)
    (spare,) = launch.warm_spares()

    os.kill(second.pid, signal.SIGSEGV)
    assert launch.rank(1, process=3).pid == spare
    assert survivor.alive
    assert len(launch.ranks(0)) == 1
    coordinator.publish(state=pb.FINISHED, generation=3)
    below = launch.processes()
    launch.go_all()
    code, stderr = launch.wait()
    assert code == 0
    assert stderr.count("\n") == 3  # one line for each replacement, and for the recovery that ended
    assert stderr.count("swift: the job goes on\n") == 1
    assert "rank 1: killed by SIGKILL: replaced by process" in stderr
    assert_all_gone(below)
    assert not coordinator.failures


def test_what_a_rank_forks_is_not_called_a_rank(start: Start) -> None:
    """Workers of a DataLoader were, and whoever looked for the rank's process killed one of them."""
    launch = start("--nproc-per-node=1", "--job=test", "--spares=0")
    rank = launch.rank(0)
    launch.go(0, "child = os.fork()\nif not child:\n    time.sleep(60)\nos.waitpid(child, 0)")
    (child,) = eventually(lambda: psutil.Process(rank.pid).children(), "its child")
    eventually(lambda: title_of(child.pid)[1] == "swift-ft: forked by rank 0 of test", "its name")
    assert title_of(rank.pid)[1] == "swift-ft: rank 0 of test: script.py --flag value"
    child.kill()
    assert launch.wait()[0] == 0


def _warm_at(launch: Launch, pid: int) -> list[float]:
    return [event["t"] for event in launch.events("worker_warm") if event["pid"] == pid]


# No process can be started while there is a file of that name.
FULL = """
import errno, os, subprocess, sys
class Popen(subprocess.Popen):
    def __init__(self, *args, **options):
        if os.path.exists("full"):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        super().__init__(*args, **options)
subprocess.Popen = Popen
from swift_ft.launch.command import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.matrix)])
def test_a_machine_that_can_start_no_process_keeps_its_ranks_and_tries_again(
    start: Start, method: str
) -> None:
    launch = start("--nproc-per-node=2", f"--start-method={method}", launcher=("-c", FULL))
    ranks = [launch.rank(number) for number in range(2)]
    launch.warm_spares()
    (launch.directory / "full").touch()
    others = [p.pid for p in launch.processes(recursive=False) if p.pid not in {rank.pid for rank in ranks}]
    assert len(others) == 1 + (method == "fork")
    for pid in others:  # the spare, and the fork server
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: launch.events("spare_not_started"), "a spare that could not be started")
    os.kill(ranks[0].pid, signal.SIGKILL)
    launch.until_said(
        "swift: rank 0: no process can be started (Resource temporarily unavailable): look at the limits of processes "
        "and open files (ulimit -u, ulimit -n, pids.max of the cgroup): tried again in 1 s"
    )
    assert ranks[1].alive
    (launch.directory / "full").unlink()
    launch.rank(0, 2)
    launch.go_all()
    assert launch.rest()[0] == 0
    assert len(launch.ranks(1)) == 1


def test_warm_takes_milliseconds_and_cold_takes_an_import_of_torch(start: Start) -> None:
    launch = start("--nproc-per-node=1", f"--preload-only={PRELOAD_DEFAULT}", "--start-method=spawn")
    launch.warm_spares()
    seconds, imported_before = {}, {}
    for process, kind in ((1, "warm"), (2, "cold")):
        victim = launch.rank(0, process)
        killed = time.clock_gettime(time.CLOCK_MONOTONIC)
        os.kill(victim.pid, signal.SIGKILL)
        replacement = launch.rank(0, process + 1)
        seconds[kind] = replacement.t - killed
        known = partial(_warm_at, launch, replacement.pid)
        eventually(known, "the launcher to have heard that the replacement is warm")
        imported_before[kind] = known()[0] < killed
    print(f"SIGKILL to the first line of the replacement's script: {seconds}")
    assert [event["warm"] for event in launch.events("spare_assigned")[1:]] == [True, False]
    assert imported_before == {"warm": True, "cold": False}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_running(
    start: Start, coordinator: ScriptedCoordinator, signum: signal.Signals
) -> None:
    """A coordinator that knows the job is told that it was stopped, after what became of its ranks."""
    known = signum == signal.SIGTERM
    if known:
        coordinator.publish(state=pb.RUNNING, generation=1)
    # Ranks with a child of their own, and deaf to polite requests.
    script = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "60"])
open(f"ready.{os.environ['RANK']}", "w").close()
time.sleep(60)
"""
    launch = start("--nproc-per-node=2", "--shutdown-timeout=1", script=script)
    eventually(lambda: len(list(launch.directory.glob("ready.*"))) == 2, "both ranks", 30.0)
    launch.warm_spares()
    own = launch.processes(recursive=False)
    below = launch.processes()
    assert len(below) == 6  # two ranks, their children, the spare, the fork server
    if known:
        eventually(lambda: launch.events("view_seen"), "the launcher to know that the job runs")
    launch.process.send_signal(signum)
    if known:  # a job that runs is saved first
        eventually(lambda: coordinator.asked, "the word that a checkpoint is wanted")
        assert coordinator.asked == [(-1, "", "a launcher was told to stop")]
        coordinator.publish(state=pb.RUNNING, generation=1, checkpoints=[5], checkpoint_at=9)
        coordinator.publish(state=pb.RUNNING, generation=1, checkpoints=[5, 9])
    code, stderr = launch.wait()
    assert code == 128 + signum
    *before, last = stderr.splitlines()
    assert last == f"swift: stopped by {signum.name}"
    assert [line.partition(" (")[0] for line in before] == known * [
        "swift: SIGTERM: a checkpoint is made first"
    ]
    if known:
        assert [told[1:] for told in coordinator.stops] == [(f"SIGTERM on {socket.gethostname()}", 2)]
    assert not [process for process in own if process.is_running()], "it waits for its own"
    assert_all_gone(below)


def test_under_nohup_a_terminal_that_goes_away_ends_nothing(start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        launch = start("--nproc-per-node=1", "--spares=0")
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.rank(0)
    launch.process.send_signal(signal.SIGHUP)
    launch.go(0)
    assert launch.wait() == (0, "")


WITHOUT_THREADS = """
import runpy, sys
from swift_ft.launch.link import CoordinatorLink

def fail(link, view):
    raise RuntimeError("can't start new thread")

CoordinatorLink._on_view = fail
runpy.run_module("swift_ft.launch", run_name="__main__", alter_sys=True)
"""


def test_a_launcher_that_loses_a_thread_ends_with_its_ranks(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    launch = start("--nproc-per-node=2", launcher=("-c", WITHOUT_THREADS))
    launch.rank(0), launch.rank(1)
    below = launch.processes()
    coordinator.publish(state=pb.RUNNING, generation=1)
    code, stderr = launch.wait()
    assert code == 3
    assert "swift: run: RuntimeError: can't start new thread in thread view-watcher-test (" in stderr
    assert_all_gone(below)


@pytest.mark.parametrize(
    ("last_words", "exit_code", "says", "told"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom", "rank 1: exit code 1"),
        (
            "import swift_ft.errors; raise swift_ft.errors.UsageError('do\\nthis')",
            2,
            "swift: do this",
            "exit code 2",
        ),
    ],
    ids=["exception", "usage"],
)
def test_an_error_of_the_script_stops_the_job(
    start: Start, coordinator: ScriptedCoordinator, last_words: str, exit_code: int, says: str, told: str
) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2")
    launch.rank(0)
    launch.rank(1)
    below = launch.processes()
    launch.go(1, last_words)
    code, stderr = launch.wait()
    assert code == exit_code
    assert says in stderr.splitlines()
    assert "frozen" not in stderr
    if exit_code == 2:
        assert stderr.count("\n") == 1
    assert_all_gone(below)
    assert told in coordinator.failures[0]
    assert len(launch.events("spare_assigned")) == 2


def test_ranks_that_end_at_the_same_moment_are_both_counted(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2")
    ranks = [launch.rank(0), launch.rank(1)]
    below = launch.processes()
    # It sleeps until both have ended, so that one look finds both.
    launch.process.send_signal(signal.SIGSTOP)
    launch.go(0, "raise SystemExit(1)")
    eventually(lambda: not ranks[0].alive, "the end of rank 0")
    launch.go(1, "import swift_ft.errors; raise swift_ft.errors.UsageError('do this')")
    eventually(lambda: not ranks[1].alive, "the end of rank 1")
    launch.process.send_signal(signal.SIGCONT)
    code, stderr = launch.wait()
    assert (code, stderr) == (2, "swift: do this\n")
    assert_all_gone(below)
    exits = {event["rank"]: event["code"] for event in launch.events("child_exit")}
    assert exits == {0: 1, 1: 2}


def test_views_are_obeyed(start: Start, coordinator: ScriptedCoordinator) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2")
    launch.rank(0)
    zombie = launch.rank(1)
    launch.warm_spares()
    os.kill(zombie.pid, signal.SIGSTOP)
    fenced = pb.Member(rank=1, incarnation=zombie.env["SWIFT_INCARNATION"], pid=zombie.pid)
    stranger = pb.Member(rank=0, incarnation="of another machine", pid=launch.rank(0).pid)
    coordinator.publish(state=pb.FENCING, generation=2, fenced=[fenced, stranger])
    launch.rank(1, process=2)
    assert not zombie.alive
    assert len(launch.ranks(0)) == 1
    below = launch.processes()
    coordinator.publish(state=pb.FAILED, generation=2, reason="two at once")
    code, stderr = launch.wait()
    assert code == 1
    assert stderr.splitlines()[-1] == "swift: job failed: two at once"
    assert_all_gone(below)


def test_leaving_early_fails_the_job(start: Start, coordinator: ScriptedCoordinator) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2")
    deserter = launch.rank(1)
    launch.rank(0)
    launch.go(1)
    eventually(lambda: coordinator.exits, "the notice of the exit")
    fenced = pb.Member(rank=1, incarnation=deserter.env["SWIFT_INCARNATION"], pid=deserter.pid)
    coordinator.publish(state=pb.FENCING, generation=2, fenced=[fenced])
    code, stderr = launch.wait()
    assert code == 1
    assert "rank 1: exit code 0 before the job was finished" in stderr


def test_leaving_before_it_has_joined_fails_the_job(start: Start, coordinator: ScriptedCoordinator) -> None:
    """Nobody fences a process that holds no rank, and the others would wait for it."""
    coordinator.publish(state=pb.FORMING, generation=1)
    launch = start("--nproc-per-node=2")
    launch.rank(0)
    launch.rank(1)
    launch.go(1)
    code, stderr = launch.wait()
    assert code == 1
    assert "rank 1: exit code 0 before the job was finished" in stderr


@pytest.mark.parametrize(
    "away", [pytest.param(False, id="answers", marks=pytest.mark.matrix), pytest.param(True, id="away")]
)
def test_all_that_leave_at_once_fail_the_job(
    start: Start, coordinator: ScriptedCoordinator, away: bool
) -> None:
    """Also if the coordinator is away meanwhile, for longer than a View is waited for."""
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2")
    ranks = [launch.rank(number) for number in range(2)]
    members = [
        pb.Member(rank=n, incarnation=rank.env["SWIFT_INCARNATION"], pid=rank.pid)
        for n, rank in enumerate(ranks)
    ]
    coordinator.publish(state=pb.RUNNING, generation=2, members=members)
    eventually(lambda: any(seen["generation"] == 2 for seen in launch.events("view_seen")), "that View")
    if away:
        coordinator.close()
    launch.go_all()
    if away:
        eventually(lambda: len(launch.events("child_exit")) == 2, "the exits")
        time.sleep(LEFT_S + 1.0)
        launch.check()
        coordinator.come()
    eventually(lambda: len(coordinator.exits) == 2, "the notices of the exits")
    coordinator.publish(state=pb.FENCING, generation=3, fenced=members)
    code, stderr = launch.wait()
    assert code == 1
    assert "exit code 0 before the job was finished" in stderr


MACHINES = ["--nnodes=2", "--nproc-per-node=1", "--job=two", "--local-addr=127.0.0.1", "--spares=0"]
QUICK = "--rdzv-conf=keep_alive_interval=0.5,keep_alive_max_attempt=6,last_call_timeout=0.5"


def test_two_machines_keep_their_ranks_when_one_rank_dies(start: Start, tmp_path: Path) -> None:
    flags = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two"]
    flags += ["--rdzv-endpoint=nowhere.invalid:1", "--local-addr=127.0.0.1"]
    # Both write their files into the same directory, as ranks 0 and 1.
    launches = [start(*flags), start(*flags)]
    first = {number: launches[0].rank(number) for number in (0, 1)}
    assert [first[number].env["WORLD_SIZE"] for number in (0, 1)] == ["2", "2"]
    assert first[1].env["SWIFT_JOB"] == "two"
    launcher_pid = psutil.Process(first[1].pid).ppid()
    os.kill(first[1].pid, signal.SIGKILL)
    second = launches[0].rank(1, process=2)
    assert psutil.Process(second.pid).ppid() == launcher_pid
    assert first[0].alive
    assert second.env["GROUP_RANK"] == first[1].env["GROUP_RANK"]
    launches[0].go_all()
    assert [launch.wait()[0] for launch in launches] == [0, 0]
    assert len(launches[0].ranks(0)) == 1


def lose(launch: Launch) -> None:
    """The machine: all that runs there, at once."""
    root = psutil.Process(launch.process.pid)
    everything = [*root.children(recursive=True), root]
    for process in everything:
        process.suspend()
    for process in everything:
        process.kill()
    launch.process.wait(30)


def by_place(launches: list[Launch], ranks: list[Rank]) -> list[Launch]:
    """The launcher of each rank: who comes first is the first."""
    parents = [psutil.Process(rank.pid).ppid() for rank in ranks]
    return sorted(launches, key=lambda launch: parents.index(launch.process.pid))


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("numbered", 0),
        pytest.param("numbered", 1, marks=pytest.mark.matrix),
        pytest.param("met", 0, marks=pytest.mark.matrix),
        ("met", 1),
        ("met, and the coordinator was started again", 0),
        pytest.param("met, and the coordinator was started again", 1, marks=pytest.mark.matrix),
    ],
)
def test_a_machine_is_lost_and_another_takes_its_place(
    how: str, lost: int, start: Start, coordinator: ScriptedCoordinator
) -> None:
    port = free_port()
    flags = [[*MACHINES, QUICK], [*MACHINES, QUICK]]  # the same command
    if how == "numbered":
        flags = [[*MACHINES, f"--node-rank={n}", "--master-addr=127.0.0.1"] for n in (0, 1)]
        flags = [[*each, f"--master-port={port}"] for each in flags]
    launches = [start(*each) for each in flags]
    ranks = [launches[0].rank(number) for number in (0, 1)]
    launches = by_place(launches, ranks)
    coordinator.publish(state=pb.RUNNING, generation=1)
    if "again" in how:
        coordinator.restart()
    lose(launches[lost])
    other = start(*flags[lost])
    replacement = other.rank(lost, process=2)
    assert ranks[1 - lost].alive
    assert replacement.env["WORLD_SIZE"] == "2"
    assert replacement.env["GROUP_RANK"] == ranks[lost].env["GROUP_RANK"]
    other.go_all()
    ends = [launch.wait() for launch in (launches[1 - lost], other)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert ranks[1 - lost].pid == other.ranks(1 - lost)[-1].pid  # never started anew


def test_a_machine_that_another_one_has_replaced_ends(start: Start, coordinator: ScriptedCoordinator) -> None:
    """It was not lost, only silent: by the time it speaks again its ranks are fenced."""
    launches = [start(*MACHINES, QUICK), start(*MACHINES, QUICK)]
    ranks = [launches[0].rank(number) for number in (0, 1)]
    first, second = by_place(launches, ranks)
    coordinator.publish(state=pb.RUNNING, generation=1)
    first.process.send_signal(signal.SIGSTOP)
    heir = start(*MACHINES, QUICK)
    assert heir.rank(0, process=2).env["GROUP_RANK"] == "0"
    first.process.send_signal(signal.SIGCONT)
    code, stderr = first.wait()
    assert code == 3, "its script has done nothing wrong"
    assert stderr.splitlines()[-1].endswith(" s, and another one has its place")
    assert not ranks[0].alive
    assert ranks[1].alive
    assert not coordinator.failures
    heir.go_all()
    assert [launch.wait()[0] for launch in (second, heir)] == [0, 0]


def test_a_machine_too_many_waits_and_is_not_needed(start: Start, coordinator: ScriptedCoordinator) -> None:
    launches = [start(*MACHINES, QUICK), start(*MACHINES, QUICK)]
    for number in (0, 1):
        launches[0].rank(number)
    coordinator.publish(state=pb.RUNNING, generation=1)
    third = start(*MACHINES, QUICK)
    third.until_said("swift: 3 machines are here: waiting for a place")
    coordinator.publish(state=pb.FINISHED, generation=1)
    for number in (0, 1):
        assert third.process.poll() is None, "a rank may have files of its own to save"
        launches[0].go(number)
    assert [launch.wait()[0] for launch in launches] == [0, 0]
    assert third.rest() == (0, "swift: this machine is not needed: the job is over\n")


def test_a_signal_ends_a_launcher_that_waits_for_another_machine(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    launch = start(*MACHINES)
    eventually(lambda: coordinator.met, "the rendezvous")
    launch.process.send_signal(signal.SIGINT)
    assert launch.wait(10)[0] == 130
