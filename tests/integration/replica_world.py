"""Ranks that copy a state: one process each, real gloo.

``python -m tests.integration.replica_world RANK WORLD DIR CASE``

Every rank writes what came of it to ``DIR/<name>-<rank>``; the files named in `wait_for` are how it is steered.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from swift_ft.comm.backend import Pending
from swift_ft.comm.gloo import GlooBackend
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import Interrupted, ProcessGroups
from swift_ft.errors import ReplicaDiffers
from swift_ft.state.tensors import digest
from swift_ft.state.transfer import Transfer, receive_state, send_state
from swift_ft.state.tree import split
from tests.integration.master_stores import MasterStore

VERSION = 7


def make_state(seed: int) -> dict[str, Any]:
    """A state with a bit of everything; about 9 MiB."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tied = rand(300, 200)
    parameters = {
        "embedding": tied,
        "big": rand(1000, 700),
        "half": rand(33, 7).bfloat16(),
        "transposed": rand(400, 300).t(),
        "running": torch.randint(0, 1 << 40, (5,), generator=generator),
        "mask": rand(11) > 0,
        "empty": torch.empty(0, 3),
        "head": tied,
        **{f"bias{i}": rand(i % 9) for i in range(200)},
    }
    moments = {
        i: {"step": torch.tensor(7.0), "exp_avg": rand(*p.shape), "exp_avg_sq": rand(*p.shape)}
        for i, p in enumerate(parameters.values())
    }
    return {
        "version": VERSION,
        "stages": {"1": parameters},
        "optimizers": [{"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, float("nan"))}]}],
        "objects": {"loader": {"position": 12, "epoch": None}},
    }


def digest_of(state: dict[str, Any]) -> str:
    tensors, rest = split(state)
    return digest(tensors, json.dumps(rest))


class DefaultGroup:
    """A `Wire` over torch's default group."""

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Pending:
        work = dist.isend(tensors[0], to, tag=tag)
        assert work is not None
        return work

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Pending:
        work = dist.irecv(tensors[0], source, tag=tag)
        assert work is not None
        return work


class Rank:
    def __init__(self, rank: int, world: int, place: Path, build: bool = True) -> None:
        self.rank, self.place = rank, place
        self.entered = 1
        backend = GlooBackend()
        group = ReconfigurableGroup("default", tuple(range(world)), rank, backend)
        self.communicator = ProcessGroups(backend, rank, [group], group, stores=MasterStore)
        if build:
            self.communicator.build(1)
            dist.barrier()

    def say(self, name: str, **fields: Any) -> None:
        path = self.place / f"{name}-{self.rank}"
        path.with_suffix(".tmp").write_text(json.dumps(fields))
        path.with_suffix(".tmp").rename(path)

    def wait_for(self, name: str) -> None:
        while not (self.place / name).exists():
            time.sleep(0.001)

    def notice(self) -> None:
        """(a thread) What a session does when a newer generation is published."""
        self.wait_for("notice")
        self.communicator.interrupt(2, lambda: self.entered == 2)

    def copy(self, transfer: Transfer, into: dict[str, torch.Tensor] | None = None, **options: Any) -> None:
        """Plays this rank's part and says how it went: ``received-R`` or ``failed-R``."""
        check: Callable[[], None] = options.pop("check", lambda: None)
        kept: BaseException  # its frames stay alive, as they do in a session that is about to look at them
        try:
            if self.rank == transfer.joiner:
                mine = make_state(99)
                into = split({"stages": mine["stages"]})[0] if into is None else into
                received = receive_state(transfer, self.rank, into, check, wire=DefaultGroup(), **options)
                self.say("received", digest=digest_of(received.state))
            elif self.rank in transfer.sources:
                send_state(transfer, self.rank, make_state(1), check, wire=DefaultGroup(), **options)
        except (RuntimeError, ReplicaDiffers, Interrupted) as error:
            kept = error
            self.say("failed", kind=type(kept).__name__, message=str(kept))


def interrupted(me: Rank) -> None:
    """The joiner is called off with operations posted, while its source sends on; then its memory is its own."""
    transfer = Transfer(joiner=1, sources=(0,), version=VERSION)
    if me.rank == 0:
        me.copy(transfer)
        me.say("over")
        return
    into = split({"stages": make_state(99)["stages"]})[0]
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise Interrupted("generation 2 supersedes 1")

    me.copy(transfer, into, check=check)
    for tensor in into.values():
        tensor.zero_()
    (me.place / "zeroed").touch()
    me.communicator.tear_down()
    me.wait_for("over-0")
    me.say("untouched", all=not any(tensor.count_nonzero() for tensor in into.values()))


def source_dies(me: Rank, generation: int) -> None:
    """Rank 0 dies while it sends to rank 2; rank 1, the other source, serves both once the group is rebuilt."""
    if generation == 1:
        threading.Thread(target=me.notice, daemon=True).start()

        def die(done: int, total: int) -> None:
            if me.rank == 0 and done == total // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        me.copy(Transfer(joiner=2, sources=(0, 1), version=VERSION), on_chunk=die)
        me.wait_for("notice")
    me.entered = 2
    me.communicator.build(2)
    for joiner in (0, 2):
        me.copy(Transfer(joiner=joiner, sources=(1,), version=VERSION))
    me.say("threads", names=[t.name for t in threading.enumerate() if not t.daemon])


def run(rank: int, world: int, place: Path, case: str) -> None:
    torch.set_num_threads(1)
    me = Rank(rank, world, place, build=case != "replacement")
    if case == "interrupted":
        interrupted(me)
    else:
        source_dies(me, 2 if case == "replacement" else 1)
    me.communicator.tear_down()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
