"""Whether a killed rank was out of memory."""

from pathlib import Path

import pytest

from swift_ft.launch.decisions import describe_exit
from swift_ft.launch.memory_kills import MemoryKills

NEITHER = "/dev/null"


def group(directory: Path, version: int) -> tuple[Path, Path]:
    """A cgroup with a limit; returns the file that names it, and that with its counter."""
    own = directory / "own"
    where = directory / "job" if version == 2 else directory / "memory" / "job"
    where.mkdir(parents=True)
    own.write_text("0::/job\n" if version == 2 else "9:cpu:/other\n4:memory:/job\n0::/\n")
    (where / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{512 << 20}\n")
    counter = where / ("memory.events" if version == 2 else "memory.oom_control")
    count(counter, 3)
    return own, counter


def count(counter: Path, number: int) -> None:
    counter.write_text(f"low 0\noom {number + 7}\noom_kill {number}\noom_group_kill 0\n")


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_by_the_cgroups_limit_is_told_once_each(version: int, tmp_path: Path) -> None:
    own, counter = group(tmp_path, version)
    kills = MemoryKills(0.0, tmp_path, own)
    assert kills.words(7, NEITHER) == "", "somebody has killed it"
    count(counter, 4)
    words = f"out of memory: the cgroup {counter.parent} has reached its limit of 512 MiB"
    assert kills.words(7, NEITHER) == words
    assert kills.words(8, NEITHER) == ""
    assert describe_exit(-9, words) == f"killed by SIGKILL ({words})"


@pytest.mark.parametrize("kind", ["Out of memory", "Memory cgroup out of memory"])
def test_a_kill_that_the_kernel_names_is_told(kind: str, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    kernel = tmp_path / "kmsg"
    kernel.write_text(
        f"3,1,5000000,-;{kind}: Killed process 41 (python) total-vm:1kB\n6,2,6000000,-;other 42 \n"
    )
    kills = MemoryKills(4.0, tmp_path, tmp_path / "own")
    assert kills.words(41, str(kernel)) == "out of memory: the kernel's messages (dmesg) name it"
    assert kills.words(42, str(kernel)) == kills.words(4, str(kernel)) == ""
    assert MemoryKills(5.5, tmp_path, tmp_path / "own").words(41, str(kernel)) == "", "an older process"
    assert kills.words(41, str(tmp_path / "unreadable")) == ""
