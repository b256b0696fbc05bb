"""torch's `dist._reconfigure` (2.14 and later) beside our own way to build a generation's group over gloo.

    python -m tests.compat.reconfigure [ROUNDS]      with a torch that has it

Four ranks are processes on loopback. Measured per round, by the slowest rank, from a common start: the group is built,
and its first small sum is over. Then: whether a reconfiguration frees a thread that waits in an operation of the group,
and whether what was sent before it arrives behind it.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from swift_ft.comm import LOOPBACK, default_backend

RANKS = 4


def rank_main(rank: int, port: int, rounds: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    found: dict[str, Any] = {"torch": torch.__version__}

    def meet(name: str, ranks: int = RANKS) -> None:
        store.set(f"{name}-{rank}", "")
        store.wait([f"{name}-{other}" for other in range(ranks)])

    def exchanged(name: str, ranks: int = RANKS) -> list[str]:
        store.set(f"{name}-{rank}", dist._get_reconfigure_handle())
        return [store.get(f"{name}-{other}").decode() for other in range(ranks)]

    def ours() -> None:
        from swift_ft.comm.message_collectives import operation

        backend, add = default_backend(), operation(None)
        times = []
        for number in range(rounds):
            tensor = torch.ones(4)
            meet(f"ours-{number}")
            began = time.monotonic()
            fabric = backend.open()
            connections = fabric.connect(PrefixStore(f"g{number}", store), rank, RANKS, timedelta(seconds=30))
            circuit = connections.circuit(range(RANKS), 0, "all")
            fabric.finish_connecting()
            built = time.monotonic()
            circuit.submit(lambda c, t=tensor: c.all_reduce(t, add)).wait()
            summed = time.monotonic()
            assert tensor.tolist() == [RANKS] * 4
            times.append((built - began, summed - began))
            meet(f"ours-over-{number}")
            fabric.close()
        found["ours"] = times

    def theirs() -> None:
        dist.init_process_group(
            "gloo",
            store=PrefixStore("default", store),
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=20),
            enable_reconfigure=True,
        )
        dist._reconfigure(1, exchanged("first"), timeout=timedelta(seconds=30)).wait()
        times = []
        for number in range(rounds):
            tensor = torch.ones(4)
            meet(f"theirs-{number}")
            began = time.monotonic()
            handles = exchanged(f"handles-{number}")
            dist._reconfigure(100 + number, handles, timeout=timedelta(seconds=30)).wait()
            built = time.monotonic()
            dist.all_reduce(tensor)
            summed = time.monotonic()
            assert tensor.tolist() == [RANKS] * 4
            times.append((built - began, summed - began))
            meet(f"theirs-over-{number}")
        found["theirs"] = times

    def old_message() -> None:
        if rank == 0:
            work = dist.isend(torch.tensor([1.0]), 1, tag=5)
        meet("old")
        dist._reconfigure(9001, exchanged("old-handles"), timeout=timedelta(seconds=30)).wait()
        meet("old-new")
        if rank == 1:
            room = torch.zeros(1)
            pending = dist.irecv(room, 0, tag=5)
            store.set("old-posted", "")
            pending.wait()
            found["old_message"] = "the new one" if room.item() == 2.0 else f"an old one ({room.item()})"
        if rank == 0:
            store.wait(["old-posted"])
            dist.isend(torch.tensor([2.0]), 1, tag=5).wait()
            del work
        meet("old-over")

    def in_flight() -> None:
        """Rank 3 does not take part. The others wait for it, and are reconfigured without it from another thread."""
        meet("flight")
        if rank == 3:
            time.sleep(45)
            return
        outcome: dict[str, Any] = {}

        def wait() -> None:
            try:
                dist.all_reduce(torch.ones(1 << 20))
                outcome["error"] = "none"
            except Exception as error:  # noqa: BLE001
                outcome["error"] = str(error).splitlines()[0][:100]
            outcome["t"] = time.monotonic()

        waiter = threading.Thread(target=wait, daemon=True)
        waiter.start()
        time.sleep(0.3)
        handles = exchanged("flight-handles", 3)
        began = time.monotonic()
        reconfigured: dict[str, Any] = {}

        def reconfigure() -> None:
            try:
                dist._reconfigure(9100, handles, timeout=timedelta(seconds=30)).wait()
                reconfigured["ended"] = "well"
            except Exception as error:  # noqa: BLE001
                reconfigured["ended"] = str(error).splitlines()[0][:100]
            reconfigured["s"] = time.monotonic() - began

        other = threading.Thread(target=reconfigure, daemon=True)
        other.start()
        other.join(40)
        waiter.join(40)
        found["in_flight"] = {
            "reconfigure": reconfigured or "still waits after 40 s",
            "waiter": {"error": outcome["error"], "freed_s": outcome["t"] - began}
            if outcome
            else "waits after 80 s",
        }

    for case in (ours, theirs, old_message, in_flight):
        try:
            case()
        except Exception as error:  # noqa: BLE001
            found[case.__name__ + "_failed"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(found), flush=True)
    os._exit(0)


def main() -> None:
    if len(sys.argv) > 2:
        rank_main(*map(int, sys.argv[1:]))
    from torch.distributed import TCPStore

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=120))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **LOOPBACK}
    command = [sys.executable, __file__]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store.port), str(rounds)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    found = []
    for process in ranks:
        lines = process.communicate(timeout=400)[0].splitlines()
        found.append(json.loads(lines[-1]) if lines else {})
    result: dict[str, Any] = {"torch": found[0].get("torch"), "rounds": rounds, "load": os.getloadavg()[0]}
    for name in ("ours", "theirs"):
        if all(name in each for each in found):
            slowest = [
                [max(each[name][n][k] for each in found) * 1000 for n in range(rounds)] for k in (0, 1)
            ]
            result[name] = {
                kind: {
                    "median_ms": round(statistics.median(times), 2),
                    "min_ms": round(min(times), 2),
                    "max_ms": round(max(times), 2),
                }
                for kind, times in zip(("built", "first_sum"), slowest, strict=True)
            }
    result["ranks"] = [
        {k: v for k, v in each.items() if k not in ("ours", "theirs", "torch")} for each in found
    ]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
