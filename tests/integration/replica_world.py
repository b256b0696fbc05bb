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

from swift_ft.comm.gloo import GlooBackend
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.process_groups import Interrupted, ProcessGroups
from swift_ft.errors import ReplicaDiffers
from swift_ft.planner import Assignment
from swift_ft.state.tensors import digest
from swift_ft.state.transfer import DefaultGroup, Transfer, local, receive_state, send_state
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


class Rank:
    def __init__(self, rank: int, world: int, place: Path, build: bool = True, shards: bool = False) -> None:
        """`shards`: two replicas of two shards each."""
        self.rank, self.place = rank, place
        self.entered = 1
        backend = GlooBackend()
        kinds = {"default": tuple(range(world))}
        if shards:
            kinds = Assignment.grid(world, replicas=2, shards=2).process_groups(rank)
        self.groups = {
            name: ReconfigurableGroup(name, ranks, ranks.index(rank), backend)
            for name, ranks in kinds.items()
        }
        groups = list(self.groups.values())
        self.communicator = ProcessGroups(backend, rank, groups, groups[0], stores=MasterStore)
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
        """Plays this rank's part and says how it went: ``received-R``, ``sent-R`` or ``failed-R``."""
        check: Callable[[], None] = options.pop("check", lambda: None)
        state = options.pop("state", None)
        label = options.pop("label", "")
        kept: BaseException  # its frames stay alive, as they do in a session that is about to look at them
        try:
            if self.rank == transfer.joiner:
                mine = make_state(99)
                into = split({"stages": mine["stages"]})[0] if into is None else into
                received = receive_state(transfer, self.rank, into, check, **options)
                in_place = all(received.state["stages"]["1"][k.split(".")[-1]] is v for k, v in into.items())
                tied = received.state["stages"]["1"]
                self.say(
                    f"{label}received",
                    digest=digest_of(received.state),
                    told=received.digest,
                    bytes=received.bytes,
                    in_place=in_place,
                    parameters=digest(into) == digest(split({"stages": received.state["stages"]})[0]),
                    tied=tied["embedding"] is into["state.stages.1.embedding"],
                )
            elif self.rank in transfer.sources:
                sent = send_state(transfer, self.rank, state or make_state(1), check, **options)
                self.say(f"{label}sent", told=sent.digest, bytes=sent.bytes)
        except (RuntimeError, ReplicaDiffers, Interrupted) as error:
            kept = error
            self.say(f"{label}failed", kind=type(kept).__name__, message=str(kept))


class FlippedBit(DefaultGroup):
    """One bit of one chunk changes between the socket and the tensor."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        inner = super().recv(tensors, source, tag)

        class Work:
            def wait(self) -> None:
                inner.wait()
                if tag == 16 + 3:
                    tensors[0][-1] ^= 4

        return Work()


def copies(me: Rank) -> None:
    """Rank 3 copies: from one source, from two, from three; over a bad line; from sources that are not the same.

    None of these leaves a source waiting: what differs is in the bytes, and is found when all have been sent.
    """
    for case in ("1", "2", "3", "flipped", "differs"):
        sources = (0, 1, 2)[: int(case)] if case.isdigit() else (0, 1, 2)
        transfer = Transfer(joiner=3, sources=sources, version=VERSION)
        state = make_state(1)
        if case == "differs" and me.rank == 1:
            state["stages"]["1"]["bias17"][3] += 1
            state["optimizers"][0]["state"][0]["exp_avg"][0, 0] += 1
        wire = FlippedBit() if case == "flipped" and me.rank == 3 else DefaultGroup()
        me.copy(transfer, label=f"{case}-", state=state, wire=wire)


def sharded(me: Rank) -> None:
    """FSDP2 over 2 replicas of 2 shards: ranks 2 and 3 have lost their state and copy it shard by shard."""
    from torch.distributed.fsdp import fully_shard

    from swift_ft.state.fsdp import device_mesh

    mesh = device_mesh(Assignment.grid(4, replicas=2, shards=2), me.groups)
    torch.manual_seed(me.rank // 2)  # the second replica starts from other weights
    model = torch.nn.Sequential(torch.nn.Linear(9, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 5))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(seed: int) -> None:
        inputs = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def state() -> dict[str, Any]:
        optimizers = [optimizer.state_dict()]
        return {"version": VERSION, "stages": {"0": model.state_dict()}, "optimizers": optimizers}

    def local_digest() -> str:
        tensors, rest = split(state())
        return digest(
            {path: local(tensor).contiguous() for path, tensor in tensors.items()}, json.dumps(rest)
        )

    if me.rank < 2:
        for parameter in model.parameters():  # what a step leaves, without the replicas' help
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    into = split({"stages": {"0": model.state_dict()}})[0]
    for joiner, source in ((2, 0), (3, 1)):
        transfer = Transfer(joiner=joiner, sources=(source,), version=VERSION)
        if me.rank == source:
            send_state(transfer, me.rank, state(), lambda: None)
        elif me.rank == joiner:
            received = receive_state(transfer, me.rank, into, lambda: None)
            model.load_state_dict(received.state["stages"]["0"])
            optimizer.load_state_dict(received.state["optimizers"][0])
    me.say("shard", digest=local_digest())
    step(5)
    me.say("later", digest=local_digest())
    if me.rank in (0, 3):  # rank 0's shard is not the one that rank 3 needs
        transfer = Transfer(joiner=3, sources=(0,), version=VERSION)
        if me.rank == 0:
            threading.Thread(target=lambda: (me.wait_for("failed-3"), os._exit(0)), daemon=True).start()
        me.copy(transfer, split({"stages": {"0": model.state_dict()}})[0], state=state())


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
    me = Rank(rank, world, place, build=case != "replacement", shards=case == "sharded")
    if case == "interrupted":
        interrupted(me)
    elif case in ("source_dies", "replacement"):
        source_dies(me, 2 if case == "replacement" else 1)
    else:
        {"copies": copies, "sharded": sharded}[case](me)
    me.communicator.tear_down()


if __name__ == "__main__":
    run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
