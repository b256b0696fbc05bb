"""Forked ranks: as good as fresh ones, the launcher's own children, and never the last way to start one."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch import forkserver
from swift_ft.launch.children import Child, Nursery
from swift_ft.launch.forkserver import ForkFailed, ForkServer
from swift_ft.launch.worker import Program
from tests.integration.launch_world import ScriptedCoordinator, Start
from tests.patience import eventually

Make = Callable[..., Nursery]
MODULES = {
    "starts_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "keeps_a_file": "held = open('/dev/zero')",
    "breaks": "1 / 0",
    "changes": "",
}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    nurseries = []

    def make(preload: str = "json", on_unfit: Callable[[str], None] = print) -> Nursery:
        for name, text in MODULES.items():
            (tmp_path / f"{name}.py").write_text(text)
        nurseries.append(Nursery(dict(os.environ), str(tmp_path), preload, on_unfit=on_unfit))
        nurseries[-1].prepare()
        return nurseries[-1]

    yield make
    for nursery in nurseries:
        nursery.close()


def run(nursery: Nursery, directory: Path, script: str) -> Child:
    child = nursery.spawn()
    path = directory / f"script{child.pid}.py"
    path.write_text(script)
    child.assign(0, Program(env={}, script=str(path), module=False, args=[], cwd=str(directory)))
    return child


def wait_ended(nursery: Nursery, *children: Child) -> None:
    deadline = time.monotonic() + 20
    while not all(child.gone for child in children):
        assert time.monotonic() < deadline
        nursery.wait(1.0)


def server_of(nursery: Nursery) -> psutil.Process:
    assert nursery._server is not None
    return psutil.Process(nursery._server.pid)


def test_ranks_are_the_launchers_and_share_nothing(make: Make, tmp_path: Path) -> None:
    nursery = make("json,numpy.random,random,multiprocessing.process")
    script = """
import json, multiprocessing, os, random, sys, threading
import numpy
out = {
    "random": random.random(), "numpy": numpy.random.random(), "key": multiprocessing.current_process().authkey.hex(),
    "pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(), "thread": threading.main_thread().native_id,
    "fds": sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, os.listdir("/proc/self/fd"))
                  if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")),
}
open(f"{os.getpid()}.part", "w").write(json.dumps(out))
os.rename(f"{os.getpid()}.part", f"{os.getpid()}.json")
"""
    children = [run(nursery, tmp_path, script) for _ in range(2)]
    assert all(child.forked for child in children)
    wait_ended(nursery, *children)
    assert [child.exit_code for child in children] == [0, 0]
    found = [json.loads((tmp_path / f"{child.pid}.json").read_text()) for child in children]
    assert found[0]["key"] != found[1]["key"]
    for name in ("random", "numpy"):  # a replacement draws what the rank before it drew
        assert found[0][name] == found[1][name], name
    for child, about in zip(children, found, strict=True):
        assert about["pid"] == about["session"] == about["thread"] == child.pid
        assert about["parent"] == os.getpid()
    # Beside what this process gives to all: the pipe of the one who may speak, and one's own. No socket, no other's
    # pipes.
    word = os.readlink(f"/proc/self/fd/{nursery._word_read}")
    inherited = set(found[0]["fds"]) & set(found[1]["fds"])
    assert [len(set(about["fds"]) - inherited) for about in found] == [1, 1]
    assert word in inherited
    assert not [target for target in inherited if target.startswith("socket:")]


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        ("", 0),
        ("import sys; sys.exit(5)", 5),
        ("import os; os._exit(77)", 77),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
    ],
)
def test_exit_codes_and_signals_are_told(make: Make, tmp_path: Path, script: str, exit_code: int) -> None:
    nursery = make()
    child = run(nursery, tmp_path, script)
    assert child.forked
    wait_ended(nursery, child)
    assert child.exit_code == exit_code
    assert not psutil.pid_exists(child.pid)


def test_a_traceback_shows_the_script_alone(
    make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    nursery = make()
    child = run(nursery, tmp_path, "raise ValueError('boom')")
    wait_ended(nursery, child)
    err = capfd.readouterr().err
    assert "ValueError: boom" in err
    assert "swift" not in err.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("starts_a_thread", "starts_a_thread starts a thread"),
        ("keeps_a_file", "keeps_a_file keeps /dev/zero open"),
        ("breaks", "breaks: ZeroDivisionError: division by zero"),
    ],
)
def test_what_must_not_be_forked_is_spawned(make: Make, tmp_path: Path, module: str, reason: str) -> None:
    told: list[str] = []
    nursery = make(f"json,{module}", on_unfit=told.append)
    assert told == [reason]
    child = run(nursery, tmp_path, "")
    assert not child.forked
    wait_ended(nursery, child)
    assert child.exit_code == (1 if module == "breaks" else 0)
    nursery.prepare()
    assert len(told) == 1


def test_a_dead_server_costs_one_spawn_and_is_started_again(make: Make, tmp_path: Path) -> None:
    nursery = make()
    rank = run(nursery, tmp_path, "import time; time.sleep(60)")
    server = server_of(nursery)
    server.kill()
    # Not noticed yet.
    second = run(nursery, tmp_path, "")
    assert (rank.forked, second.forked) == (True, False)
    wait_ended(nursery, second)
    assert second.exit_code == 0
    nursery.prepare()
    assert run(nursery, tmp_path, "").forked
    assert rank.exit_code is None
    assert psutil.pid_exists(rank.pid)


def test_a_fork_whose_answer_is_lost_ends_and_takes_nothing_from_the_next_child(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    nursery = make()
    fork, lost = ForkServer.fork, []

    def lose_the_answer(server: ForkServer, fds: Sequence[int]) -> int:
        lost.append(fork(server, fds))
        raise ForkFailed("the fork server has died")

    monkeypatch.setattr(ForkServer, "fork", lose_the_answer)
    child = run(nursery, tmp_path, "import os; open('ran', 'w').write(str(os.getpid()))")
    assert not child.forked
    wait_ended(nursery, child)
    assert (tmp_path / "ran").read_text() == str(child.pid)
    deadline = time.monotonic() + 10
    while psutil.Process(lost[0]).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        nursery.wait(0.1)
    assert os.waitpid(lost[0], 0) == (lost[0], 0)
    assert capfd.readouterr().err == ""


def test_a_server_that_is_stuck_is_given_up(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = make()
    stuck = server_of(nursery)
    stuck.suspend()
    monkeypatch.setattr(forkserver, "FORK_S_MAX", 0.2)
    child = run(nursery, tmp_path, "")
    assert not child.forked
    assert not stuck.is_running()
    wait_ended(nursery, child)
    assert child.exit_code == 0


def test_a_server_that_dies_again_and_again_is_given_up(make: Make, tmp_path: Path) -> None:
    nursery = make("changes")
    (tmp_path / "changes.py").write_text("import os; os._exit(1)")
    server_of(nursery).kill()
    assert not nursery.spawn().forked
    nursery.prepare()
    assert nursery._server is None
    assert nursery.tend()


def test_orphans_at_other_times_are_not_adopted(make: Make, tmp_path: Path) -> None:
    nursery = make()
    script = """
import os, subprocess
held = subprocess.Popen(["sleep", "60"], start_new_session=True)
open("pid.part", "w").write(str(held.pid)); os.rename("pid.part", "pid")
"""
    trainer = run(nursery, tmp_path, script)
    wait_ended(nursery, trainer)
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    assert orphan.ppid() != os.getpid()
    orphan.kill()


def test_a_job_goes_on_without_its_server_and_gets_another(
    start: Start, coordinator: ScriptedCoordinator
) -> None:
    coordinator.publish(state=pb.RUNNING, generation=1)
    launch = start("--nproc-per-node=2", "--spares=0")
    first = [launch.rank(number) for number in (0, 1)]
    (server,) = [event["server_pid"] for event in launch.events("fork_server_ready")]
    os.kill(server, signal.SIGKILL)
    eventually(lambda: len(launch.events("fork_server_ready")) == 2, "another fork server")
    assert all(rank.alive for rank in first)
    os.kill(first[1].pid, signal.SIGKILL)
    second = launch.rank(1, process=2)
    assert [event["forked"] for event in launch.events("worker_spawned")] == [True] * 3
    assert psutil.Process(second.pid).ppid() == launch.process.pid
    launch.go_all()
    code, stderr = launch.wait()
    assert code == 0
    assert f"replaced by process {second.pid} (a fork)" in stderr
    assert not psutil.pid_exists(launch.events("fork_server_ready")[1]["server_pid"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_modules_with_threads_are_told_of_once(start: Start, tmp_path: Path, method: str) -> None:
    (tmp_path / "starts_a_thread.py").write_text(MODULES["starts_a_thread"])
    launch = start("--nproc-per-node=2", "--preload=starts_a_thread", f"--start-method={method}")
    launch.go_all()
    code, stderr = launch.wait(60)
    assert code == 0
    assert stderr.count("starts_a_thread starts a thread: ranks are not forked") == (method == "fork")
    assert {event["forked"] for event in launch.events("worker_spawned")} == {False}
