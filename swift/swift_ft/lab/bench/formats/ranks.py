"""A rank of `swift-ft bench checkpoint --formats`: saves and loads, turn by turn, together with the others.

    ranks.py RANK RANKS PLACE    PLACE: a directory that all share

(every rank) prints "ready"; then, until its input ends, reads a `Turn` as a line of JSON and answers with its
             measurements, or with the error of the save
(every rank) waits for the others before a save, between save and load, and after the load
"""

import json
import mmap
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.lab.bench.formats.kinds import FORMATS
from swift_ft.lab.bench.formats.states import State, bytes_of, leaves, losses, make, nbytes, write_tensors
from swift_ft.lab.bench.output import Rounds
from swift_ft.state.tree import split

PATIENCE = timedelta(minutes=10)
"""Time after which a rank stops waiting for another one."""
LIMITS = "limits"
"""Pseudo-format: the machine's own speed for the same bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One save and one load of all ranks, or one measurement of the limits."""

    parameter_bytes: int
    """Bytes of the whole model's parameters; each rank saves its own shard."""
    format: str
    fsync: bool = False
    compare: bool = False
    """Whether what is loaded is compared with what was saved."""


class Rank:
    """One rank, with its shard of the model."""

    def __init__(self, number: int, ranks: int, place: Path) -> None:
        self._number, self._ranks, self._place = number, ranks, place
        self._size = 0
        self._shard: State = {}

    def measure(self, turn: Turn) -> dict[str, Any]:
        """Runs a turn. Returns seconds and bytes, or only ``error`` if the format or the disk failed."""
        if self._size != turn.parameter_bytes:
            self._size = turn.parameter_bytes
            self._shard = {f"rank{self._number}": make(self._size // self._ranks, seed=self._number)}
        together = self._ranks > 1 and turn.format != LIMITS and FORMATS[turn.format].collective
        folder = self._place / ("all" if together else f"rank{self._number}")
        folder.mkdir(exist_ok=True)
        measured: dict[str, Any] = {}
        self._barrier()
        if turn.format == LIMITS:
            error = _error_of(lambda: measured.update(limits(self._shard, folder / "limit")))
        else:
            error = _error_of(lambda: measured.update(self._save(turn, folder, together)))
            self._barrier()
            error = error or _error_of(lambda: measured.update(self._load(turn, folder)))
        self._barrier()
        shutil.rmtree(folder, ignore_errors=True)
        return {"error": error} if error else measured

    def _save(self, turn: Turn, folder: Path, together: bool) -> dict[str, Any]:
        began, worked = time.monotonic(), time.process_time()
        wait = FORMATS[turn.format].save(self._shard, folder, turn.fsync, together)
        blocked = time.monotonic() - began
        wait()
        total, worked = time.monotonic() - began, time.process_time() - worked
        if together:
            self._barrier()
        counts = not together or self._number == 0  # joint files are counted once
        files = [path for path in folder.rglob("*") if path.is_file()] if counts else []
        return {
            "blocked_s": blocked,
            "total_s": total,
            "cpu_s": worked,
            "bytes": sum(path.stat().st_size for path in files),
            "state_bytes": nbytes(self._shard),
        }

    def _load(self, turn: Turn, folder: Path) -> dict[str, Any]:
        began = time.monotonic()
        loaded = FORMATS[turn.format].load(folder, self._shard)
        touch(loaded)
        measured: dict[str, Any] = {"load_s": time.monotonic() - began}
        if turn.compare:
            name = f"rank{self._number}"
            measured["losses"] = losses(self._shard[name], loaded.get(name, {}))
        return measured

    def _barrier(self) -> None:
        if self._ranks > 1:
            dist.barrier()


def _error_of(do: Callable[[], object]) -> str:
    """Returns the error in one line, or "". Raises only KeyboardInterrupt and SystemExit, since the others must not
    wait for this rank: the benchmark reports the error to them."""
    try:
        do()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  (whatever a format's library raises; DCP's is no Exception)
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def touch(state: State) -> None:
    """Reads a byte of each page, because a file that is only mapped into memory is not loaded before that."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            bytes_of(value)[:: mmap.PAGESIZE].sum()


def limits(state: State, path: Path) -> dict[str, float]:
    """Measures the same bytes copied in memory, written to one file, written and synced, read again: the seconds of
    each. Raises OSError."""
    rounds = Rounds()
    tensors = [tensor for tensor in split(state)[0].values() if tensor.nbytes]
    with rounds.timed("copy_s"):
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for name, fsync in (("write_s", False), ("write_fsync_s", True)):
        path.unlink(missing_ok=True)
        with rounds.timed(name):
            write_tensors(path, copies, fsync=fsync)
    with rounds.timed("read_s"), path.open("rb", buffering=0) as file:
        for tensor in copies:
            into = memoryview(bytes_of(tensor).numpy().data)
            while into:
                into = into[file.readinto(into) :]
    path.unlink()
    return {name: seconds for name, (seconds,) in rounds.values.items()}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its ranks
    number, ranks, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    if ranks > 1:
        store = f"file://{place / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=number, world_size=ranks, timeout=PATIENCE)
    print("ready", flush=True)
    sys.stdin.readline()
    rank = Rank(number, ranks, place)
    try:
        for line in sys.stdin:
            print(json.dumps(rank.measure(Turn(**json.loads(line)))), flush=True)
    except (OSError, RuntimeError) as error:  # another rank or the benchmark has ended
        with suppress(OSError):
            print(json.dumps({"error": " ".join(str(error).split())[:300]}), flush=True)
        os._exit(1)  # without flushing again


if __name__ == "__main__":
    main()
