"""A rank of `swift-ft bench checkpoint --formats`: saves and loads, turn by turn, together with the others.

    ranks.py RANK RANKS PLACE    PLACE: a directory that all share

(every rank) prints "ready"; then, until its input ends, reads a turn as a line of JSON
             (`swift_ft.lab.bench.formats.report.Turn`) and answers with its measurements, or with the error of the save
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
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.lab.bench.formats.kinds import FORMATS, Format
from swift_ft.lab.bench.formats.report import GATHERED, LIMITS, SHARDED, Turn
from swift_ft.lab.bench.formats.states import State, bytes_of, leaves, losses, make, nbytes, together
from swift_ft.state.tree import empty_tensors, join, split

PATIENCE = timedelta(minutes=10)
"""Time after which a rank stops waiting for another one."""
PIECE_BYTES = 8 << 20


class Rank:
    """One rank, with its shard of the model."""

    def __init__(self, number: int, ranks: int, place: Path) -> None:
        self._number, self._ranks, self._place = number, ranks, place
        self._size = 0
        self._shard: State = {}
        self._made: dict[int, State] = {}
        """Shards by rank: its own, and those of other ranks once a comparison needs them."""

    def measure(self, turn: Turn) -> dict[str, Any]:
        """Runs a turn. Returns seconds and bytes, or only ``error`` if the format or the disk failed."""
        if self._size != turn.parameter_bytes:
            self._size = turn.parameter_bytes
            self._shard = make(self._size // self._ranks, seed=self._number)
            self._made = {self._number: self._shard}
        folder = self._place / ("all" if self._is_together(turn) else f"rank{self._number}")
        folder.mkdir(exist_ok=True)
        self._barrier()
        try:
            return self._limits(turn, folder) if turn.format == LIMITS else self._format(turn, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _is_together(self, turn: Turn) -> bool:
        if turn.format == LIMITS or self._ranks == 1 or turn.layout == GATHERED:
            return False
        return FORMATS[turn.format].collective

    def _format(self, turn: Turn, folder: Path) -> dict[str, Any]:
        kind, saves = FORMATS[turn.format], self._saves(turn)
        measured: dict[str, Any] = {}
        error = _error_of(lambda: measured.update(self._save(kind, turn, folder)))
        self._barrier()
        if not error and saves:
            error = _error_of(lambda: measured.update(self._load(kind, turn, folder)))
        self._barrier()
        return {"error": error} if error else measured

    def _saves(self, turn: Turn) -> bool:
        return turn.layout == SHARDED or self._number == 0

    def _save(self, kind: Format, turn: Turn, folder: Path) -> dict[str, Any]:
        together = self._is_together(turn)
        began, worked = time.monotonic(), time.process_time()
        state = self._state(turn)
        wait = kind.save(state, folder, turn.fsync, together) if self._saves(turn) else None
        blocked = time.monotonic() - began
        if wait is not None:
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

    def _state(self, turn: Turn) -> State:
        """Returns the state that this rank saves; gathers it first, if the layout requires that."""
        if self._ranks > 1 and turn.layout == GATHERED:
            return gather(self._shard, self._number, self._ranks)
        return {f"rank{self._number}": self._shard}

    def _load(self, kind: Format, turn: Turn, folder: Path) -> dict[str, Any]:
        like = self._like(turn)
        began = time.monotonic()
        loaded = kind.load(folder, like)
        touch(loaded)
        measured: dict[str, Any] = {"load_s": time.monotonic() - began}
        if turn.round <= 0:
            found = [losses(shard, loaded.get(name, {})) for name, shard in like.items()]
            measured["losses"] = together(found)
        return measured

    def _like(self, turn: Turn) -> State:
        """Returns the expected result of `_state`, computed locally."""
        for rank in range(self._ranks) if turn.layout == GATHERED else ():
            if rank not in self._made:
                self._made[rank] = make(self._size // self._ranks, seed=rank)
        return {f"rank{rank}": shard for rank, shard in self._made.items()}

    def _limits(self, turn: Turn, folder: Path) -> dict[str, Any]:
        """Measures the same bytes' limits: copied in memory, written to one file, written and synced, read again."""
        gathered = time.monotonic()
        state = self._state(turn)
        measured: dict[str, Any] = {"gather_s": time.monotonic() - gathered}
        self._barrier()
        error = ""
        if self._saves(turn):
            error = _error_of(lambda: measured.update(limits(state, folder / "limit")))
        self._barrier()
        return {"error": error} if error else measured

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


def gather(shard: State, number: int, ranks: int) -> State:
    """(every rank) Returns all ranks' shards on rank 0, and an empty state elsewhere."""
    if number:
        tensors, skeleton = split(shard)
        words = torch.frombuffer(bytearray(json.dumps(skeleton).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(words)]), 0)
        dist.send(words, 0)
        for tensor in tensors.values():
            dist.send(bytes_of(tensor), 0)
        return {}
    state: State = {"rank0": shard}
    for rank in range(1, ranks):
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank)
        words = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(words, rank)
        skeleton = json.loads(words.numpy().tobytes())
        tensors = empty_tensors(skeleton)
        for tensor in tensors.values():
            _receive(tensor, rank)
        state[f"rank{rank}"] = join(skeleton, tensors)
    return state


def _receive(tensor: torch.Tensor, rank: int) -> None:
    if tensor.is_contiguous():
        dist.recv(bytes_of(tensor), rank)
        return
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    dist.recv(bytes_of(plain), rank)
    tensor.copy_(plain)


def touch(state: State) -> None:
    """Reads a byte of each page, because a file that is only mapped into memory is not loaded before that."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            bytes_of(value)[:: mmap.PAGESIZE].sum()


def limits(state: State, path: Path) -> dict[str, float]:
    """Measures the seconds of each limit. Raises OSError."""
    tensors = [tensor for tensor in split(state)[0].values() if tensor.nbytes]
    took: dict[str, float] = {}
    began = time.monotonic()
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    took["copy_s"] = time.monotonic() - began
    for name, fsync in (("write_s", False), ("write_fsync_s", True)):
        path.unlink(missing_ok=True)
        began = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for tensor in copies:
                left = memoryview(bytes_of(tensor).numpy().data)
                while left:
                    left = left[file.write(left) :]
            if fsync:
                os.fsync(file)
        took[name] = time.monotonic() - began
    began = time.monotonic()
    with path.open("rb", buffering=0) as file:
        for tensor in copies:
            into = memoryview(bytes_of(tensor).numpy().data)
            while into:
                into = into[file.readinto(into) :]
    took["read_s"] = time.monotonic() - began
    path.unlink()
    return took


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends its ranks
    number, ranks, place = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    if ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place / 'store'}",
            rank=number,
            world_size=ranks,
            timeout=PATIENCE,
        )
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
