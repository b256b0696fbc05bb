"""Survivors that wait in a communication are freed by a notice, and meet again in the next generation.

Real processes, real sockets, real SIGKILL. Rank 2 dies; rank 3 is its direct peer, ranks 0 and 1 are not: without
a notice they would hang until the group's timeout.
"""

import json
import textwrap
import time
from pathlib import Path

import pytest

from tests.integration.forked import Forked, Forks, meeting, new_store

WORKER = textwrap.dedent(
    """
    import json, os, signal, sys, threading, time
    from pathlib import Path
    import torch, torch.distributed as dist
    from swift_ft.comm.gloo import GlooBackend
    from swift_ft.comm.process_groups import ProcessGroups
    from swift_ft.comm.groups import ReconfigurableGroup
    from tests.integration.master_stores import MasterStore

    rank, shared, operation = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    backend = GlooBackend()
    group = ReconfigurableGroup("world", range(4), rank, backend)
    comm = ProcessGroups(backend, rank, [group], group, stores=MasterStore)
    entered = 1

    def say(name, **fields):
        path = shared / f"{name}-{rank}"
        path.with_suffix(".tmp").write_text(json.dumps(fields))
        path.with_suffix(".tmp").rename(path)

    def wait_for(name):
        while not (shared / name).exists():
            time.sleep(0.001)

    def notice():
        wait_for("notice")
        comm.interrupt(2, lambda: entered == 2)

    if rank == int(sys.argv[4]):  # a replacement starts in generation 2
        entered = 2
    else:
        comm.build(1)
        threading.Thread(target=notice, daemon=True).start()
        dist.all_reduce(torch.ones(1))
        say("built", pid=os.getpid())
        if rank == 2:
            wait_for("die")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if operation == "recv":      # 0 <- 1 <- 3 <- 2: only 3 waits for the dead rank itself
                dist.recv(torch.empty(1), {0: 1, 1: 3, 3: 2}[rank])
            elif operation == "send":    # never received
                dist.isend(torch.ones(1 << 22), {0: 1, 1: 3, 3: 2}[rank]).wait()
            else:
                dist.all_reduce(torch.ones(1 << 16))
        except RuntimeError as error:
            say("freed", error=str(error)[:80])
        wait_for("all-freed")  # who tears its groups down frees those that wait for it
        entered = 2
    begin = time.monotonic()
    comm.build(2)
    total = torch.full((1,), float(rank))
    dist.all_reduce(total)
    say("done", total=total.item(), rebuilt_s=time.monotonic() - begin, pid=os.getpid())
    comm.tear_down()
    """
)


@pytest.mark.parametrize("operation", ["recv", "send", "all_reduce"])
def test_survivors_are_freed_and_meet_again(operation: str, forks: Forks, tmp_path: Path) -> None:
    store = new_store()
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(rank: int, replacement: int = -1) -> Forked:
        return forks.run(script, [rank, tmp_path, operation, replacement], meeting(store))

    def wait_for(name: str, timeout_s: float = 40.0) -> dict[str, object]:
        deadline = time.monotonic() + timeout_s
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, (
                f"{name} never came: {sorted(p.name for p in tmp_path.iterdir())}"
            )
            time.sleep(0.005)
        return dict(json.loads((tmp_path / name).read_text() or "{}"))

    ranks = {rank: start(rank) for rank in range(4)}
    try:
        pids = {rank: wait_for(f"built-{rank}")["pid"] for rank in range(4)}
        (tmp_path / "die").touch()
        assert ranks[2].wait(20) == -9
        ranks[4] = start(2, replacement=2)
        (tmp_path / "notice").touch()
        for rank in (0, 1, 3):
            wait_for(f"freed-{rank}", 20.0)  # without it, never
        (tmp_path / "all-freed").touch()
        done = {rank: wait_for(f"done-{rank}") for rank in range(4)}
        assert {d["total"] for d in done.values()} == {6.0}
        assert all(done[rank]["pid"] == pids[rank] for rank in (0, 1, 3))
        assert ranks[4].wait(20) == 0
        assert all(ranks[rank].wait(20) == 0 for rank in (0, 1, 3))
    finally:
        for process in ranks.values():
            process.kill()
