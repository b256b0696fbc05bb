"""Children of the launcher, without the launcher: which spare is taken, how they are stopped."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from swift_ft.launch.children import Child, Nursery
from swift_ft.launch.rendezvous import LoopbackRendezvous
from swift_ft.launch.worker import Program
from tests.patience import eventually


@pytest.fixture(params=["fork", "spawn"])
def nursery(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nursery]:
    told: list[str] = []
    nursery = Nursery(
        dict(os.environ), str(tmp_path), "json", fork=request.param == "fork", on_unfit=told.append
    )
    nursery.prepare()
    yield nursery
    nursery.close()
    assert told == []


def wait_warm(nursery: Nursery, *children: Child) -> None:
    deadline = time.monotonic() + 20
    while not all(child.warm for child in children):
        assert time.monotonic() < deadline
        assert not nursery.wait(1.0)[1]


def assign(child: Child, directory: Path, script: str, *args: str) -> None:
    path = directory / f"script{child.pid}.py"
    path.write_text(script)
    child.assign(0, Program(env={}, script=str(path), module=False, args=list(args), cwd=str(directory)))


def test_warm_spares_come_first_then_the_oldest(nursery: Nursery) -> None:
    spares = [nursery.spawn() for _ in range(3)]
    assert nursery.spares == spares
    spares[2].warm = True
    assert nursery.spares == [spares[2], spares[0], spares[1]]
    spares[2].rank = 0
    assert nursery.spares == spares[:2]


LARGE = """
import mmap, time
memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, len(memory), mmap.PAGESIZE):
    memory[page] = 1
open("large", "w").close()
time.sleep(60)
"""


def test_a_killed_child_is_missed_before_its_memory_is_freed(nursery: Nursery, tmp_path: Path) -> None:
    found = []
    for _ in range(5):  # on a busy machine the kernel may be as quick as the launcher
        child = nursery.spawn()
        wait_warm(nursery, child)
        assign(child, tmp_path, LARGE)
        while not (tmp_path / "large").exists():
            assert nursery.wait(0.01) == ([], [])
        os.kill(child.pid, signal.SIGKILL)
        while not (ended := nursery.wait(20.0)[1]):
            pass
        assert (ended, child.exit_code) == ([child], -signal.SIGKILL)
        found.append(child.gone)
        while not child.gone:  # it is told of once
            assert nursery.wait(20.0) == ([], [])
        assert nursery.children == []
        (tmp_path / "large").unlink()
    assert not all(found)


# Whoever holds a life may leave it without dying: what it was told of then is its end, and nothing before it.
LEAVES = {
    "exec": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(0.5)'])",
    "a thread stays": (
        "import ctypes, threading, time\nthreading.Thread(target=lambda: (time.sleep(0.5), os._exit(0))).start()\n"
        "import os; ctypes.CDLL(None).pthread_exit(None)"
    ),
    "a fork": "import os, time\nif os.fork() == 0: os._exit(7)\ntime.sleep(0.5)",
    "it exits": "raise SystemExit(0)",
}


@pytest.mark.parametrize("script", LEAVES.values(), ids=LEAVES.keys())
def test_a_child_that_lets_go_without_being_killed_is_missed_when_it_has_ended(
    nursery: Nursery, tmp_path: Path, script: str
) -> None:
    child = nursery.spawn()
    wait_warm(nursery, child)
    assign(child, tmp_path, script)
    while not (ended := nursery.wait(20.0)[1]):
        assert child.exit_code is None
    assert (ended, child.exit_code, child.gone) == ([child], 0, True)


def test_a_rank_given_to_a_cold_child_waits_for_it(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.spawn()
    assign(child, tmp_path, "open('ran', 'w').close()")
    while not nursery.wait(20.0)[1]:
        assert child.warm
    assert (child.exit_code, (tmp_path / "ran").exists()) == (0, True)
    assert nursery.children == []


def test_a_session_is_heard_of_that_begins_before_anybody_reads(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.spawn()
    assign(child, tmp_path, "from swift_ft import warm_up; warm_up.begin_session()")
    eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE or None, "its end")
    while not nursery.wait(20.0)[1]:
        pass
    assert (child.exit_code, child.has_session) == (0, True)


def test_arguments_of_any_size_and_nobody_waits_for_who_does_not_read_yet(
    nursery: Nursery, tmp_path: Path
) -> None:
    words = "x" * 2_000_000
    child = nursery.spawn()
    os.kill(child.pid, signal.SIGSTOP)
    assign(child, tmp_path, "import sys; open('size', 'w').write(str(len(sys.argv[1])))", words)
    os.kill(child.pid, signal.SIGCONT)
    while not nursery.wait(20.0)[1]:
        pass
    assert (tmp_path / "size").read_text() == str(len(words))
    dead = nursery.spawn()
    os.kill(dead.pid, signal.SIGSTOP)
    assign(dead, tmp_path, "", words)
    dead.kill_group()
    while not nursery.wait(20.0)[1]:
        pass
    names = {thread.name: thread for thread in threading.enumerate()}
    if (writer := names.get("assignment")) is not None:
        writer.join(20.0)
        assert not writer.is_alive()


# An unprivileged user, whose pipes take already all that they may.
USED_UP = """
import fcntl, os
from pathlib import Path
from swift_ft.launch.children import Nursery
limit = 4096 * int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
nursery = Nursery({}, "", "json", on_unfit=print)
for _ in range(limit // (1 << 20) + 1):
    try:
        fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)
    except PermissionError:
        break
before = len(os.listdir("/proc/self/fd"))
assert nursery._start(lambda fds: None) is None
assert len(os.listdir("/proc/self/fd")) == before
"""


def test_a_child_can_be_started_by_a_user_whose_pipes_are_used_up() -> None:
    subprocess.run([sys.executable, "-c", USED_UP], check=True, timeout=60)


def test_a_child_that_died_unseen_can_be_given_a_rank(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.spawn()
    wait_warm(nursery, child)
    child.kill_group()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assign(child, tmp_path, "")
    assert nursery.wait(5.0) == ([], [child])
    assert child.exit_code == -9


def test_stop_is_polite_first_and_can_be_hurried(nursery: Nursery, tmp_path: Path) -> None:
    polite, deaf = nursery.spawn(), nursery.spawn()
    assign(polite, tmp_path, "import time; time.sleep(60)")
    deaf_script = (
        "import signal, time\nsignal.signal(15, signal.SIG_IGN); open('deaf', 'w').close(); time.sleep(60)"
    )
    assign(deaf, tmp_path, deaf_script)
    wait_warm(nursery, polite, deaf)
    while not (tmp_path / "deaf").exists():
        time.sleep(0.01)
    began = time.monotonic()
    nursery.stop([polite, deaf], 0.3, hurry=lambda: False)
    assert time.monotonic() - began >= 0.3
    assert (polite.exit_code, deaf.exit_code) == (-15, -9)

    (tmp_path / "deaf").unlink()
    deaf = nursery.spawn()
    assign(deaf, tmp_path, deaf_script)
    while not (tmp_path / "deaf").exists():
        time.sleep(0.01)
    began = time.monotonic()
    nursery.wake()
    nursery.stop([deaf], 30.0, hurry=lambda: True)
    assert time.monotonic() - began < 30.0
    assert deaf.exit_code == -9


def test_the_store_of_one_machine_listens_on_loopback_only() -> None:
    rendezvous = LoopbackRendezvous(1, 5.0)
    port = rendezvous.next_rendezvous().master_port
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    store = TCPStore("127.0.0.1", port)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_child_and_its_fork_may_end_before_the_launcher_looks(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.spawn()
    wait_warm(nursery, child)
    nursery.wait(0.1)  # so that the child's end is seen before that of its pipe
    assign(child, tmp_path, "import os, time\nif os.fork() == 0: time.sleep(0.3)\nos._exit(3)")
    for descriptor in (child.pidfd, child.warm_fd):
        select.select([descriptor], [], [], 20.0)
    assert nursery.wait(5.0) == ([], [child])
    assert (child.exit_code, child.gone) == (3, True)
