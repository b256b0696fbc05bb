"""What a trainer communicates by itself: recorded and answered, or refused in one line; never waited for."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from swift_ft import torch_private
from swift_ft.comm.backend import Collective
from swift_ft.comm.groups import ReconfigurableGroup
from swift_ft.comm.message_collectives import Alone
from swift_ft.errors import Divergence, ReplayRefused, UsageError
from swift_ft.log.record import Record, RecordKey, digest_of
from swift_ft.train import set_up
from swift_ft.train.collective_policy import Gate
from swift_ft.train.pipeline_collectives import Ties
from tests.local_backend import LocalBackend
from tests.log_client import owned_bytes
from tests.unit.runtime.wired import channel_of, updates_of

RANKS = (0, 1, 2, 3)


class Log:
    """What ranks have logged: a channel's capture, and its reader."""

    def __init__(self) -> None:
        self.streams: dict[str, dict[RecordKey, torch.Tensor]] = {}

    def wait_copied(self) -> None: ...

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, **_: object) -> None:
        self.streams.setdefault(stream, {})[key] = tensor.clone()

    def follow(self, stream: str, _from_step: int, _share: object) -> Any:
        records = self.streams.get(stream, {})

        def get(key: RecordKey, _timeout_s: float, _cancelled: Callable[[], bool]) -> Record:
            dtype, shape, body = owned_bytes(records[key])
            return Record(key, dtype, shape, body, digest_of(dtype, shape, body), 1, 0)

        return SimpleNamespace(get=get, drop_below=lambda _step: None, close=lambda: None)


class Group(ReconfigurableGroup):
    """Every other rank says what this one says. Without a connection nobody says anything."""

    connected = True

    def __init__(self, name: str, ranks: tuple[int, ...], rank: int, gate: Gate | None = None) -> None:
        super().__init__(name, ranks, rank, LocalBackend(), gate=gate)

    def run(self, run: Collective) -> None:
        if not self.connected:
            raise AssertionError("a replay has nobody to communicate with")
        run(Alone(self.ranks.index(self._own), len(self.ranks)))


class Rank:
    """One of four, with a group of all and one of two."""

    def __init__(
        self,
        log: Log,
        rank: int = 0,
        sources: tuple[int, ...] | None = None,
        pipeline: ReconfigurableGroup | None = None,
        together: tuple[int, ...] = (),
        moves_batches: str = "",
    ) -> None:
        """`sources`: it replays. `together`, `moves_batches`: those of its gate."""
        self.channel = channel_of(rank)
        self.channel.capture = log  # type: ignore[assignment]
        self.channel.witness = None
        self.gate = Gate(together, (rank,), moves_batches)
        self.communicated: list[int] = []
        """Steps in which a trainer has communicated over several ranks, as far as adoption has heard."""
        self.all = Group("default", RANKS, rank, self.gate)
        self.some = Group("pipeline", (0, 2), RANKS[:3:2].index(rank), self.gate)
        ties = Ties(self.channel, pipeline or self.some)
        self.updates = updates_of(rank=rank, ties=ties, channel=self.channel)
        self.adoption: Any = SimpleNamespace(communicated=lambda step, **_: self.communicated.append(step))
        self.gate.channel, self.gate.updates, self.gate.participants = (
            self.channel,
            self.updates,
            [self.adoption],
        )
        self.some._own = rank
        for group in (self.all, self.some):
            group.connected = sources is None
        if sources is not None:
            self.channel.begin_replay(log, 0, sources)  # type: ignore[arg-type]
        self.channel.begin_step(0)


def all_of_them(rank: Rank) -> list[torch.Tensor]:
    """Every collective that gives all ranks the same."""
    own = torch.arange(4.0) if not rank.channel.replaying else torch.zeros(4)
    total, told, whole = own.clone(), own.clone(), torch.zeros(16)
    parts = [torch.zeros(4) for _ in RANKS]
    some = own.clone()
    with rank.gate.step():
        rank.all.allreduce([total], dist.AllreduceOptions()).wait()
        rank.some.allreduce([some], dist.AllreduceOptions()).wait()
        rank.all.broadcast([told]).wait()
        rank.all.barrier(opts=None).wait()
        rank.all.allgather([parts], [own]).wait()
        rank.all._allgather_base(whole, own).wait()
        strided = torch.zeros(4, 2)[:, 0]
        strided.copy_(own)
        rank.all.allreduce([strided], dist.AllreduceOptions()).wait()
    return [total, told, *parts, whole, some, strided]


def test_a_replay_gets_what_the_first_time_gave_and_asks_nobody() -> None:
    log = Log()
    first = all_of_them(Rank(log))
    assert torch.equal(first[0], 4 * torch.arange(4.0))
    again = all_of_them(Rank(log, sources=(0,)))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_a_result_is_taken_from_a_rank_that_took_part() -> None:
    """Results of a part of the ranks are in the logs of those alone, under numbers of their own."""
    log = Log()
    members, others = Rank(log, 2), Rank(log, 0)
    with members.gate.step(), others.gate.step():
        for rank, value in ((others, 1.0), (members, 2.0)):
            rank.all.allreduce([torch.full((2,), value)], dist.AllreduceOptions())
    both = torch.full((2,), 5.0)
    with members.gate.step():
        members.some.allreduce([both], dist.AllreduceOptions())
    lost = Rank(log, 0, sources=(1, 2))  # rank 1 was in neither
    log.streams["r1.C"] = {}
    room = torch.zeros(2)
    with lost.gate.step():
        lost.some.allreduce([room], dist.AllreduceOptions())
    assert torch.equal(room, both)
    nobody = Rank(log, 0, sources=(1,))
    with (
        nobody.gate.step(),
        pytest.raises(ReplayRefused, match="no living rank has the results of collective"),
    ):
        nobody.some.allreduce([room], dist.AllreduceOptions())


def test_another_shape_than_the_first_time_is_refused() -> None:
    log = Log()
    all_of_them(Rank(log))
    lost = Rank(log, sources=(0,))
    with lost.gate.step(), pytest.raises(Divergence, match="collective 'all_reduce'@0"):
        lost.all.allreduce([torch.zeros(7)], dist.AllreduceOptions())


def calls(rank: Rank) -> Iterator[tuple[str, Callable[[], object]]]:
    """What gives every rank something else."""
    own, whole, scattered = torch.zeros(2), torch.zeros(8), [torch.zeros(2) for _ in RANKS]
    reduce, gather, scatter = dist.ReduceOptions(), dist.GatherOptions(), dist.ScatterOptions()
    yield "reduce", lambda: rank.all.reduce([own], reduce)
    yield "gather", lambda: rank.all.gather([scattered], [own], gather)
    yield "scatter", lambda: rank.all.scatter([own], [scattered], scatter)
    yield "reduce_scatter", lambda: rank.all.reduce_scatter([own], [scattered])
    yield "reduce_scatter_tensor", lambda: rank.all._reduce_scatter_base(own, whole)
    yield "all_to_all", lambda: rank.all.alltoall(scattered, scattered)
    yield "all_to_all_single", lambda: rank.all.alltoall_base(whole, whole, [], [])
    yield "send", lambda: rank.all.send([own], 1)
    yield "recv", lambda: rank.some.recv([own], 1)


def test_what_every_rank_gets_another_result_of_is_refused_in_a_step() -> None:
    rank = Rank(Log())
    for name, call in calls(rank):
        with (
            rank.gate.step(),
            pytest.raises(UsageError, match=rf"^dist\.{name} in train_step: .* use session"),
        ):
            call()
    # What torch or the session does in it passes.
    with rank.gate.step(), rank.gate.passing(), pytest.raises(RuntimeError, match="ended generation"):
        rank.all.send([torch.zeros(2)], 1)


def test_ranks_that_replay_together_may_communicate_as_they_like() -> None:
    """Those of one stage. Where batches move between ranks, there is nothing that is theirs alone."""
    for moves, refused in (("", False), ("shrink", True)):
        rank = Rank(Log(), together=RANKS, moves_batches=moves)
        for name, call in calls(rank):
            expected = (
                (UsageError, rf"^dist\.{name} in train_step")
                if refused
                else (RuntimeError, "ended generation")
            )
            if name == "recv" and not refused:
                continue  # over the group of two, which has another rank's number here
            with rank.gate.step(), pytest.raises(expected[0], match=expected[1]):
                call().wait()  # type: ignore[attr-defined]


def test_before_the_run_a_collective_is_told_and_a_message_refused() -> None:
    rank = Rank(Log())
    told: list[tuple[str, str, bool]] = []

    def begin(group: ReconfigurableGroup, name: str, *_: object, alike: bool) -> Any:
        told.append((group.label, name, alike))
        return object()

    rank.gate.set_up = begin
    rank.all.barrier()
    rank.some.scatter([torch.zeros(1)], [[torch.zeros(1)] * 2], dist.ScatterOptions())
    assert told == [("default", "barrier", True), ("pipeline", "scatter", False)]
    with pytest.raises(UsageError, match=r"dist\.send outside of train_step: .* comes there alone"):
        rank.all.send([torch.zeros(1)], 1)
    rank.gate.around(lambda _step: None)
    with pytest.raises(UsageError, match=r"dist\.barrier outside of train_step, while session\.run goes on"):
        rank.all.barrier()  # as a script does where an error ends its run
    rank.gate.over = True
    for call in (lambda: rank.all.barrier().wait(), lambda: rank.all.send([torch.zeros(1)], 1)):
        with pytest.raises(RuntimeError, match="ended generation"):  # it tries
            call()


def test_a_rank_alone_waits_for_nobody() -> None:
    group = ReconfigurableGroup("default", (0,), 0, LocalBackend(), gate=Rank(Log()).gate)
    with pytest.raises(RuntimeError, match="ended generation"):
        group.barrier()


def test_objects_travel_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain ones; others are refused, and nothing is unpickled."""
    rank = Rank(Log())
    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(torch_private._c10d, name, getattr(torch_private, name))
    torch_private.carry_objects_by(set_up.encoded, set_up.decoded, lambda: True)
    monkeypatch.setattr(torch_private._c10d._world, "default_pg", None)
    torch_private.register_group(rank.all, "default", RANKS, LocalBackend())
    torch_private.make_default(rank.all)
    try:
        plain = {"accuracy": 0.5, "names": ("a", b"b"), 3: [None, True, float("inf")]}
        with rank.gate.step():
            gathered: list[Any] = [None] * 4
            dist.all_gather_object(gathered, plain)
            assert gathered == [plain] * 4
            longer = torch_private._c10d._object_to_tensor("longer", "cpu", None)[0]
            longer.resize_(100)  # as torch does where another rank's object is longer
            with pytest.raises(UsageError, match="nothing is unpickled from a peer"):
                dist.all_gather_object(gathered, object())
            with pytest.raises(UsageError, match="with tensors among them"):
                dist.all_gather_object(gathered, {"loss": torch.zeros(1)})
    finally:
        dist.destroy_process_group()


def test_groups_are_refused_that_would_not_outlive_a_failure() -> None:
    rank = Rank(Log(), together=(0, 1))
    assert rank.gate.new_group([0, 1], "0")  # of one stage
    assert not rank.gate.new_group([1, 2], "1")
    assert rank.gate.made == ["0: 0,1", "1: 1,2"]
    with pytest.raises(UsageError, match="use_local_synchronization=True"):
        rank.gate.new_group([0, 1], "a0b1c2")
    with rank.gate.step(), pytest.raises(UsageError, match=r"dist\.new_group\(\[0, 1\]\) in train_step"):
        rank.gate.new_group([0, 1], "2")
    with pytest.raises(UsageError, match="with strategy='shrink'"):
        Rank(Log(), moves_batches="shrink").gate.new_group([0, 1], "2")
    gate = Gate((0, 1, 2, 3), (2, 3), moves_batches="shrink")
    assert gate.new_group([2, 3], "0")  # of one cell
    assert not gate.new_group([0, 1], "1")
    with pytest.raises(UsageError, match="with strategy='shrink'"):
        gate.new_group([1, 2], "2")


def test_a_result_is_no_computation_for_autograd() -> None:
    """As in torch's own groups: a loss that was averaged in place can still be derived."""
    rank = Rank(Log())
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * 2).exp().sum()
    before = loss.grad_fn
    with rank.gate.step():
        rank.all.allreduce([loss], dist.AllreduceOptions())
        rank.all.broadcast([weight])
    assert loss.grad_fn is before
    loss.backward()
    assert weight.grad is not None
