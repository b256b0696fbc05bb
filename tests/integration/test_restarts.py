"""A script without a session under `swift-ft run`: all ranks are restarted, as torchrun does."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from swift_ft.launch.standalone import free_port
from tests.integration.launch_world import (
    BEGINS,
    PLAIN_SCRIPT,
    Launch,
    ScriptedCoordinator,
    Start,
    assert_all_gone,
)
from tests.integration.logserver_world import python
from tests.patience import eventually

# Each process leaves a line with what it was given. What it does then depends on the attempt.
SCRIPT = """\
import json, os, signal, sys
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"]
names += ["ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
names += ["OMP_NUM_THREADS"]
assert all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
def leave(**more):
    line = json.dumps({name: os.environ.get(name) for name in names} | more)
    fd = os.open("attempts", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, line.encode() + b"\\n")
"""
MEETS = """\
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(float(os.environ["RANK"]) + 1)
dist.all_reduce(total)
leave(total=total.item())
if attempt == 0:
    if os.environ["RANK"] == "1":
        while len(open("attempts").readlines()) < 2:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
dist.destroy_process_group()
"""
FAILS = """\
leave()
if os.environ["RANK"] == "1":
    while len(open("attempts").readlines()) < 2 * (attempt + 1):
        pass
    sys.exit(3)
signal.pause()
"""


def attempts(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "attempts").read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["TORCHELASTIC_RESTART_COUNT"], line["RANK"]))


@pytest.mark.parametrize(
    ("script", "restarts", "code", "processes"),
    [(MEETS, ["--max-restarts=1"], 0, 4), (MEETS, [], 1, 2), (FAILS, ["--max-restarts=1"], 1, 4)],
)
def test_a_script_without_a_session_ends_as_under_torchrun(
    script: str,
    restarts: list[str],
    code: int,
    processes: int,
    tmp_path: Path,
    start: Start,
    coordinator: ScriptedCoordinator,
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "script.py").write_text(SCRIPT + script)
    flags = ["--nproc-per-node=2", *restarts]
    # Else it keeps its store, in which the next attempt's ranks may find the last one's addresses (torch 2.13).
    env = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    words = ("-m", "torch.distributed.run", "--standalone", *flags, "script.py")
    theirs = python(*words, cwd=tmp_path / "theirs", env=env, timeout_s=100)
    assert theirs.returncode == code, theirs.stderr
    launch = start(*flags, directory=tmp_path / "ours", script=SCRIPT + script)
    found, said = launch.wait(60)
    assert found == code, said
    assert attempts(tmp_path / "ours") == attempts(tmp_path / "theirs")
    assert len(attempts(tmp_path / "ours")) == processes
    told = [line for line in said.splitlines() if line.startswith("swift: ")]
    assert sum("job test is not protected: its script has begun no session" in line for line in told) == 1
    assert sum(": all ranks are restarted (1 of 1)" in line for line in told) == len(restarts)
    if script is FAILS:
        assert (
            told[-1] == "swift: rank 1: exit code 3: the job is stopped, after 1 restarts (--max-restarts 1)"
        )
    assert not [told for told in coordinator.exits if told.exit_code]
    assert not coordinator.failures


def test_all_processes_are_new_and_meet_in_a_new_store(start: Start, tmp_path: Path) -> None:
    launch = start("--nproc-per-node=2", "--max-restarts=5", script=PLAIN_SCRIPT)
    first = [launch.rank(0), launch.rank(1)]
    launch.go(0)  # has ended well when the other one dies: it begins again all the same
    eventually(lambda: not first[0].alive, "its end")
    (tmp_path / "go.0").unlink()
    os.kill(first[1].pid, signal.SIGKILL)
    second = [launch.rank(0, 2), launch.rank(1, 2)]
    assert {rank.env["TORCHELASTIC_RESTART_COUNT"] for rank in second} == {"1"}
    assert {rank.env["TORCHELASTIC_MAX_RESTARTS"] for rank in second} == {"5"}
    ports = [{rank.env["MASTER_PORT"] for rank in ranks} for ranks in (first, second)]
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
    assert not any(rank.alive for rank in first)
    everything = launch.processes()
    launch.go_all()
    assert launch.wait()[0] == 0
    assert_all_gone(everything)


SESSION = (
    f"""\
import os, signal, time
if os.environ["RANK"] == "0":
    {BEGINS}"""
    + """\
open(f"here.{os.environ['RANK']}.{os.getpid()}", "w").close()
while len([name for name in os.listdir() if name.startswith("here.")]) < 2:
    time.sleep(0.01)
if os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
)


def test_a_script_that_has_begun_a_session_is_not_restarted(start: Start, tmp_path: Path) -> None:
    """The rank dies before the coordinator has heard of the job: it alone is replaced."""
    launch = start("--nproc-per-node=2", "--max-restarts=1", script=SESSION)
    launch.until_said("swift: rank 0: killed by SIGKILL, and --max-restarts is used up: the job is stopped")
    assert launch.rest()[0] == 1
    assert len(list(tmp_path.glob("here.0.*"))) == 2
    assert len(list(tmp_path.glob("here.1.*"))) == 1
    assert not launch.events("restarted")


def test_before_anybody_has_met_a_killed_rank_is_replaced_alone(start: Start) -> None:
    """It may have been about to begin a session."""
    launch = start("--nproc-per-node=2", script=PLAIN_SCRIPT)
    ranks = [launch.rank(0), launch.rank(1)]
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert launch.rank(1, 2).env["TORCHELASTIC_RESTART_COUNT"] == "0"
    assert ranks[0].alive
    launch.go_all()
    assert launch.wait()[0] == 0


def start_two(start: Start, meeting: str, restarts: int) -> list[Launch]:
    """Two machines, which write their files into one directory."""
    flags = ["--nnodes=2", "--nproc-per-node=1", "--job=two", "--local-addr=127.0.0.1", "--spares=0"]
    flags += [f"--max-restarts={restarts}"]
    numbers: list[list[str]] = [[], []]
    if meeting == "numbered":
        flags += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
        numbers = [["--node-rank=0"], ["--node-rank=1"]]
    return [start(*flags, *number, script=PLAIN_SCRIPT) for number in numbers]


@pytest.mark.parametrize("meeting", ["met", pytest.param("numbered", marks=pytest.mark.matrix)])
def test_several_machines_restart_together(start: Start, meeting: str, tmp_path: Path) -> None:
    launches = start_two(start, meeting, restarts=2)
    ports = set()
    for count in (1, 2, 3):
        ranks = [launches[0].rank(number, count) for number in (0, 1)]
        assert [rank.env["TORCHELASTIC_RESTART_COUNT"] for rank in ranks] == [str(count - 1)] * 2
        assert len({rank.env["MASTER_PORT"] for rank in ranks}) == 1
        ports.add(ranks[0].env["MASTER_PORT"])
        if count == 2:  # one that has ended well begins again, too
            launches[0].go(0)
            eventually(lambda rank=ranks[0]: not rank.alive, "its end")
            (tmp_path / "go.0").unlink()
        if count < 3:
            os.kill(ranks[1].pid, signal.SIGKILL)
    assert len(ports) == 3
    launches[0].go_all()
    ends = [launch.wait() for launch in launches]
    assert [code for code, _ in ends] == [0, 0], ends
    for _, said in ends:
        assert "swift: rank 1: killed by SIGKILL: all ranks are restarted (1 of 2)\n" in said
        assert "swift: rank 1: killed by SIGKILL: all ranks are restarted (2 of 2)\n" in said


def test_several_machines_end_together_without_a_restart(start: Start) -> None:
    launches = start_two(start, "met", restarts=0)
    ranks = [launches[0].rank(number) for number in (0, 1)]
    os.kill(ranks[1].pid, signal.SIGKILL)
    ends = [launch.wait() for launch in launches]
    assert [code for code, _ in ends] == [1, 1], ends
    assert all("swift: rank 1: killed by SIGKILL: the job is stopped" in said for _, said in ends)
