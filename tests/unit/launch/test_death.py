"""A process that has died: its exit code, by what /proc says of it; and whether it was out of memory."""

import os
import subprocess
from pathlib import Path

import pytest

from swift_ft.launch.death import MemoryKills, exit_code_of
from swift_ft.launch.decisions import describe_exit

NEITHER = Path("/dev/null")


def test_only_a_process_that_ends_has_an_exit_code() -> None:
    assert exit_code_of(os.getpid()) is None
    for command, code in (("exit 3", 3), ("kill -9 $$", -9)):
        process = subprocess.Popen(["sh", "-c", command])
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert exit_code_of(process.pid) == code
        assert process.wait() == code
    assert exit_code_of(process.pid) is None, "it is gone"


def group(directory: Path) -> tuple[Path, Path]:
    """A cgroup with a limit; returns the file that names it, and that with its counters."""
    own, where = directory / "own", directory / "job"
    where.mkdir()
    own.write_text("1:name=systemd:/other\n0::/job\n")
    (where / "memory.max").write_text(f"{512 << 20}\n")
    count(where / "memory.events", 10, 3)
    return own, where / "memory.events"


def count(counters: Path, limit_reached: int, killed: int) -> None:
    counters.write_text(f"low 0\noom {limit_reached}\noom_kill {killed}\noom_group_kill 0\n")


def test_a_kill_by_the_cgroups_limit_is_told_once_each(tmp_path: Path) -> None:
    own, counters = group(tmp_path)
    kills = MemoryKills(tmp_path, own, NEITHER)
    assert kills.words(7) == "", "somebody has killed it"
    count(counters, 11, 4)
    words = f"out of memory: the cgroup {counters.parent} has reached its limit of 512 MiB"
    assert kills.words(7) == words
    assert kills.words(8) == ""
    assert describe_exit(-9, words) == f"killed by SIGKILL ({words})"
    count(counters, 12, 6)  # all of them at once (memory.oom.group)
    assert kills.words(9) == kills.words(10) == words
    assert kills.words(11) == ""


def test_a_kill_that_was_not_for_the_cgroups_limit_does_not_name_it(tmp_path: Path) -> None:
    own, counters = group(tmp_path)
    kills = MemoryKills(tmp_path, own, NEITHER)
    count(counters, 10, 4)
    words = f"out of memory: the machine has none left, or a group around the cgroup {counters.parent}"
    assert kills.words(7) == words
    assert kills.words(8) == ""
    count(counters, 11, 5)
    assert "has reached its limit of 512 MiB" in kills.words(9)
    count(counters, 11, 6)
    assert kills.words(10) == words


@pytest.mark.parametrize("kind", ["Out of memory", "Memory cgroup out of memory"])
def test_a_kill_that_the_kernel_names_is_told(kind: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    kernel = tmp_path / "kmsg"
    kernel.write_text(f"2,1,4000000,-;{kind}: Killed process 40 (python) total-vm:1kB\n")
    kills = MemoryKills(tmp_path, tmp_path / "own", kernel)
    with kernel.open("a") as messages:
        messages.write(
            f"3,2,5000000,-;{kind}: Killed process 41 (python) total-vm:1kB\n6,3,6000000,-;other 42 \n"
        )
    assert kills.words(4) == kills.words(42) == ""
    assert kills.words(41) == "out of memory: the kernel's messages (dmesg) name it"
    assert kills.words(41) == "", "another process of that number"
    assert kills.words(40) == "", "before the launcher began"
    assert MemoryKills(tmp_path, tmp_path / "own", tmp_path / "unreadable").words(41) == ""
