"""An owner and its helpers, as threads of this process with a log in memory: gradients and sends are those of one."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift._pb import coordinator_pb2 as pb
from swift.errors import Divergence, RecordMissing, ReplayRefused
from swift.log.record import Record, RecordKey, digest_of
from swift.log.share import Share
from swift.runtime import _torch
from swift.runtime.channel import Channel
from swift.runtime.faults import FaultInjector
from swift.runtime.groups import Mesh
from swift.runtime.help import helper as helping
from swift.runtime.help import owner as owning
from swift.runtime.help.helper import Helper
from swift.runtime.help.manifest import manifest
from swift.runtime.help.owner import Owner, can_share, send_away
from swift.runtime.stage import LoggedPipelineStage, logged_loss
from swift.runtime.state import TrainerState
from swift.runtime.tensors import as_bytes, owned_bytes, same_bits
from tests.unit.runtime.test_help_line import in_parallel
from tests.unit.runtime.test_transport import Inner, Network

STAGES, WIDTH, ROWS = 3, 8, 4
STEPS = range(5, 8)


@dataclass
class Log:
    """Records by stream; what is lacking is left out of `held`."""

    records: dict[tuple[str, RecordKey], tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    lacking: set[tuple[str, RecordKey]] = field(default_factory=set)
    read: list[tuple[str, RecordKey]] = field(default_factory=list)
    shares: list[Share | None] = field(default_factory=list)
    """That was asked for, of each stream that was followed."""

    def put(self, stream: str, key: RecordKey, tensor: torch.Tensor) -> None:
        dtype, shape, body = owned_bytes(tensor)
        self.records[stream, key] = (dtype, shape, bytes(body))

    # a reader

    def digests(self, stream: str, from_step: int) -> dict[RecordKey, bytes]:
        found = {key: digest_of(*value) for (name, key), value in self.records.items() if name == stream}
        if not found:
            raise RecordMissing(stream)
        return {key: digest for key, digest in found.items() if (stream, key) not in self.lacking}

    def follow(self, stream: str, from_step: int, share: Share | None = None) -> Any:
        self.shares.append(share)

        def get(key: RecordKey, _timeout: float, _cancelled: Any) -> Record:
            assert key.step >= from_step
            assert share is None or share.has(key), f"{stream} {key} is not in {share}"
            self.read.append((stream, key))
            dtype, shape, body = self.records[stream, key]
            return Record(key, dtype, shape, memoryview(body), b"", 1, 0)

        return SimpleNamespace(get=get, drop_below=lambda _step: None, close=lambda: None)

    def close(self) -> None:
        pass


class Captured:
    """The capture of a rank that runs, or replays alone: everything that it sends."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, RecordKey], torch.Tensor] = {}

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        self.sent[stream, key] = tensor.detach().clone()

    def settle(self) -> None:
        pass

    drop = settle


class Part(nn.Module):
    def __init__(self, dropout: float = 0.3, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.norm = norm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.norm(self.linear(x) @ self.strided))) + x


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


class Rank:
    """A rank of a pipeline, as far as a replay needs it."""

    def __init__(self, rank: int, store: Any, module: nn.Module, schedule: Any, microbatches: int) -> None:
        self.rank, self.module, self.microbatches = rank, module, microbatches
        self.channel = Channel(
            Mesh(rank, STAGES), 3, torch.device("cpu"), FaultInjector(rank), store, lambda: None, lambda: None
        )
        self.captured = Captured()
        self.channel._capture = self.captured
        updates: Any = SimpleNamespace(wait_free=False, begin_step=lambda _v: None, optimizers=[])
        stage: Any = LoggedPipelineStage(module, rank, STAGES, torch.device("cpu"))
        stage.group_rank = rank
        stage._attach(self.channel, updates)
        self.stage = stage
        self.schedule = schedule(stage, microbatches, loss_fn=loss_fn)
        _torch.wrap_loss(self.schedule, logged_loss([stage], self.channel))
        self.state = TrainerState(3, updates)
        self.state.stages, self.state.schedules, self.state.version = [stage], [self.schedule], 9
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        self.losses: dict[int, list[float]] = {}

    def step(self, step: int, batch: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        """What a trainer does in one."""
        self.channel.begin_step(step)
        self.stage.begin_step()
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self.stage.is_last:
            options |= {"target": batch[1], "losses": losses}
        self.schedule.step(
            *([batch[0]] if self.stage.is_first else []), **{"return_outputs": False, **options}
        )
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.losses[step] = [float(loss.detach()) for loss in losses]


def batch(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * microbatches, WIDTH, generator=generator)
    return x, x.roll(1, 1)


@pytest.fixture
def store() -> Iterator[Any]:
    """With what neighbours say about shapes; they are the same everywhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=STAGES)
    found = HashStore()
    metas = (_torch.TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, requires_grad=True),)
    gradients = (
        _torch.TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, requires_grad=False),
    )
    said = SimpleNamespace(_store=found)
    for one, other in ((0, 1), (1, 2)):
        Channel.put_meta(said, f"forward/{one}-{other}/1", _torch.meta_to_json(metas))  # type: ignore[arg-type]
        Channel.put_meta(said, f"backward/{other}-{one}/1", _torch.meta_to_json(gradients))  # type: ignore[arg-type]
    yield found
    dist.destroy_process_group()


def log_for(rank: int, microbatches: int) -> Log:
    """What the neighbours have sent."""
    log = Log()
    for step in STEPS:
        generator = torch.Generator().manual_seed(1000 + step)
        for mb in range(microbatches):
            for stream, neighbour in ((f"s{rank - 1}.F", rank - 1), (f"s{rank + 1}.B", rank + 1)):
                if 0 <= neighbour < STAGES:
                    key = RecordKey(step, mb, rank * 256)
                    log.put(stream, key, torch.randn(ROWS, WIDTH, generator=generator))
    return log


def alone(rank: int, store: Any, log: Log, schedule: Any, microbatches: int, **options: Any) -> Rank:
    found = Rank(rank, store, Part(), schedule, microbatches)
    found.channel.begin_replay(log, STEPS.start, -1)  # type: ignore[arg-type]
    for step in STEPS:
        found.step(step, batch(step, microbatches), **options)
    return found


@dataclass
class Shared:
    """A replay that was shared: its owner, its helpers, and what the owner knows of these."""

    owner: Rank
    sharing: Owner
    helpers: list[Rank]


def shared(
    rank: int,
    helpers: tuple[int, ...],
    store: Any,
    log: Log,
    schedule: Any,
    microbatches: int,
    *,
    makes: Callable[[int], nn.Module] = lambda _index: Part(),
    module: Callable[[], nn.Module] = Part,
    until: int = STEPS.stop,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> Shared:
    monkeypatch.setattr(helping, "LogReader", lambda *_arguments: log)
    network = Network()
    owner = Rank(rank, store, module(), schedule, microbatches)
    others = [Rank(one, store, Part(), schedule, microbatches) for one in helpers]
    help = pb.Help(owner=rank, helpers=helpers, until=until)
    sharing = Owner(rank, help, Inner(network, rank), owner.channel, owner.state, lambda: None)
    turns = threading.RLock()  # torch's generator is the process's: one rank computes at a time

    def run(index: int) -> None:
        if index:
            other = others[index - 1]
            helper = Helper(
                other.rank, makes, Inner(network, other.rank), other.channel, other.state, lambda: None
            )
            helper.run(rank, pb.Plan(generation=2), "job")
            return
        owner.channel.begin_replay(log, STEPS.start, -1)  # type: ignore[arg-type]
        sharing.ask()
        sharing.gather(STEPS.start, 2)
        for step in STEPS:
            sharing.at(step)
            owner.step(step, batch(step, microbatches), **options)
        sharing.at(STEPS.stop)
        sharing.close()

    one_at_a_time(turns, monkeypatch)
    in_parallel(1 + len(others), run)
    assert network.left() == 0
    return Shared(owner, sharing, others)


def one_at_a_time(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward is computed with the generator that was seeded for it: ranks are threads here, not processes."""

    def alone(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def locked(*arguments: Any, **named: Any) -> Any:
            with turns:
                return inner(*arguments, **named)

        monkeypatch.setattr(owner, name, locked)

    alone(LoggedPipelineStage, "forward_one_chunk")
    alone(Channel, "begin_step")
    alone(_torch.SingleSchedule, "_initialize_stage")


def same_parameters(one: Rank, other: Rank) -> None:
    for (name, mine), theirs in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
        assert same_bits(mine, theirs), name


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("rank", "helpers"), [(0, (1,)), (1, (0, 2)), (2, (1, 0))])
@pytest.mark.parametrize("microbatches", [3, 5])
def test_a_shared_replay_has_the_bits_of_one(
    rank: int,
    helpers: tuple[int, ...],
    schedule: Any,
    microbatches: int,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = log_for(rank, microbatches)
    single = alone(rank, store, log, schedule, microbatches)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
    before = [helping.state_digest(single.state)]
    log.read.clear()
    log.shares.clear()
    both = shared(rank, helpers, store, log, schedule, microbatches, monkeypatch=monkeypatch)
    same_parameters(both.owner, single)
    assert both.owner.losses == single.losses
    assert helping.state_digest(both.owner.state) == before[0]
    streams = (rank > 0) + (rank < STAGES - 1)
    assert len([1 for stream, _ in log.read if stream[-1] in "FB"]) == len(STEPS) * microbatches * streams
    assert None not in log.shares
    helped = both.sharing.helped
    assert helped.steps == len(STEPS)
    own = len(both.sharing._own)
    assert helped.microbatches == len(STEPS) * (microbatches - own)
    assert helped.verified == len(STEPS) * (microbatches - own) * streams
    assert (
        len([1 for stream, _ in both.owner.captured.sent if stream[-1] in "FB"]) == len(STEPS) * own * streams
    )
    assert both.owner.stage.share is None
    for parameter in both.owner.module.parameters():
        assert not parameter._post_accumulate_grad_hooks


def test_the_owner_gets_what_the_log_lacks(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_for(1, 4)
    single = alone(1, store, log, ScheduleGPipe, 4)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
        if key.step == STEPS.stop - 1:
            log.lacking.add((stream, key))
    both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, monkeypatch=monkeypatch)
    handed = both.owner.captured.sent
    last = {at: tensor for at, tensor in single.captured.sent.items() if at[1].step == STEPS.stop - 1}
    assert len(last) == 8
    for at, tensor in last.items():
        assert same_bits(handed[at], tensor)
    same_parameters(both.owner, single)


def test_help_ends_before_the_replay_does(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_for(1, 4)
    single = alone(1, store, log, Schedule1F1B, 4)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
    both = shared(1, (0,), store, log, Schedule1F1B, 4, until=STEPS.start + 1, monkeypatch=monkeypatch)
    assert both.sharing.helped.steps == 1
    same_parameters(both.owner, single)


def test_more_ranks_than_make_it_quicker_stay_out(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_for(1, 2)
    single = alone(1, store, log, ScheduleGPipe, 2)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
    both = shared(1, (0, 2), store, log, ScheduleGPipe, 2, monkeypatch=monkeypatch)
    assert both.sharing._helpers == (0,)
    same_parameters(both.owner, single)


def test_another_result_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_for(1, 4)
    for (stream, key), tensor in alone(1, store, log, ScheduleGPipe, 4).captured.sent.items():
        log.put(stream, key, tensor)
    checked = helping.Checked({"s1.F": log.digests("s1.F", 0)})
    key = RecordKey(STEPS.start, 0, 512)
    _, _, body = log.records["s1.F", key]
    tensor = torch.frombuffer(bytearray(body), dtype=torch.float32).view(ROWS, WIDTH)
    checked.record("s1.F", key, tensor, now=False, keep=True)
    assert checked.verified == 1
    as_bytes(tensor)[5] ^= 1
    with pytest.raises(Divergence, match="the tensor that a helper computed"):
        checked.record("s1.F", key, tensor, now=False, keep=True)


class TestNobodyHelps:
    @pytest.mark.parametrize(
        ("why", "change"),
        [
            (
                "gradients are there",
                lambda rank: [p.grad.zero_() for p in rank.module.parameters() if p.grad is not None],
            ),
            ("hooks", lambda rank: rank.module.linear.weight.register_hook(lambda grad: None)),
            (
                "hooks",
                lambda rank: rank.module.linear.weight.register_post_accumulate_grad_hook(lambda p: None),
            ),
            ("sparse", lambda rank: setattr(rank.module, "sparse", True)),
            ("scaled", lambda rank: rank.state.objects.update(scaler=torch.amp.GradScaler("cpu"))),
            ("changes buffers", lambda rank: setattr(rank.stage, "changes_buffers", True)),
        ],
    )
    def test_why(self, why: str, change: Any, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = alone(2, store, log_for(2, 2), ScheduleGPipe, 2)
        sharing = Owner(2, pb.Help(owner=2), Inner(Network(), 2), rank.channel, rank.state, lambda: None)
        rank.optimizer.zero_grad()
        assert sharing._unfit((), {}, False) == ""
        if why == "gradients are there":
            rank.module.linear.weight.grad = torch.zeros_like(rank.module.linear.weight)
        else:
            change(rank)
        assert why in sharing._unfit((), {}, False)

    def test_external_inputs_and_outputs(self, store: Any) -> None:
        rank = alone(2, store, log_for(2, 2), ScheduleGPipe, 2)
        sharing = Owner(2, pb.Help(owner=2), Inner(Network(), 2), rank.channel, rank.state, lambda: None)
        rank.optimizer.zero_grad()
        assert "no plain tensor" in sharing._unfit(("text",), {}, False)
        assert "no plain tensor" in sharing._unfit((), {"scale": torch.ones(1, requires_grad=True)}, False)
        assert "return_outputs=False" in sharing._unfit((), {}, True)

    def test_running_statistics(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found out when shapes are inferred, before anything is computed; the rest is replayed alone."""

        def make() -> nn.Module:
            return Part(norm=nn.BatchNorm1d)

        log = log_for(1, 4)
        single = Rank(1, store, make(), ScheduleGPipe, 4)
        single.channel.begin_replay(log, STEPS.start, -1)  # type: ignore[arg-type]
        for step in STEPS:
            single.step(step, batch(step, 4))
        for (stream, key), tensor in single.captured.sent.items():
            log.put(stream, key, tensor)
        both = shared(
            1,
            (0, 2),
            store,
            log,
            ScheduleGPipe,
            4,
            makes=lambda _i: make(),
            module=make,
            monkeypatch=monkeypatch,
        )
        assert both.sharing.helped.steps == 0
        assert len(both.owner.captured.sent) == len(single.captured.sent)
        same_parameters(both.owner, single)

    def test_whoever_cannot_make_the_module(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        log = log_for(1, 4)
        single = alone(1, store, log, ScheduleGPipe, 4)
        for (stream, key), tensor in single.captured.sent.items():
            log.put(stream, key, tensor)

        def cannot(_index: int) -> nn.Module:
            raise MemoryError("no room")

        both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, makes=cannot, monkeypatch=monkeypatch)
        assert both.sharing._helpers == ()
        same_parameters(both.owner, single)

    def test_without_memory(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = Rank(0, store, Part(), ScheduleGPipe, 4)
        asked = {"stage": 1, "microbatches": 4, "tensors": manifest(Part())}
        helper = Helper(0, lambda _i: Part(), Inner(Network(), 0), rank.channel, rank.state, lambda: None)
        assert helper._build(asked)[1] == ""
        monkeypatch.setattr(helping, "available_memory", lambda: 100)
        assert "MiB of memory" in helper._build(asked)[1]

    def test_an_owner_without_memory(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        log = log_for(1, 4)
        single = alone(1, store, log, ScheduleGPipe, 4)
        for (stream, key), tensor in single.captured.sent.items():
            log.put(stream, key, tensor)
        monkeypatch.setattr(owning, "available_memory", lambda: 100)
        both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, monkeypatch=monkeypatch)
        assert both.sharing._helpers == ()
        same_parameters(both.owner, single)

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda rank: rank.module, "shares memory"),
            (lambda rank: nn.Linear(WIDTH, WIDTH), "another module than the owner's: strided"),
            (lambda rank: Part(norm=nn.Identity), "another module"),
            (lambda rank: Part().to(torch.bfloat16), "bfloat16"),
        ],
    )
    def test_other_modules(self, make: Any, why: str, store: Any) -> None:
        rank = Rank(0, store, Part(), ScheduleGPipe, 4)
        asked = {"stage": 1, "microbatches": 4, "tensors": manifest(Part())}
        helper = Helper(0, lambda _i: make(rank), Inner(Network(), 0), rank.channel, rank.state, lambda: None)
        module, said = helper._build(asked)
        assert module is None
        assert why in said

    def test_other_schedules(self, store: Any) -> None:
        rank = Rank(0, store, Part(), ScheduleGPipe, 4)
        assert can_share(rank.state)
        rank.state.schedules = [SimpleNamespace()]
        assert not can_share(rank.state)

    def test_an_owner_that_cannot_share(self, store: Any) -> None:
        network = Network()
        rank = Rank(0, store, Part(), ScheduleGPipe, 4)
        send_away(Inner(network, 1), [0])
        helper = Helper(0, lambda _i: Part(), Inner(network, 0), rank.channel, rank.state, lambda: None)
        helper.run(1, pb.Plan(), "job")
        assert network.left() == 0


def test_randomness_of_a_trainer_is_kept(store: Any) -> None:
    import random

    rank = Rank(0, store, Part(), ScheduleGPipe, 4)

    def make(_index: int) -> nn.Module:
        random.seed(1)
        torch.manual_seed(1)
        return Part()

    asked = {"stage": 1, "microbatches": 4, "tensors": manifest(Part())}
    helper = Helper(0, make, Inner(Network(), 0), rank.channel, rank.state, lambda: None)
    torch.manual_seed(5)
    random.seed(5)
    wanted = (torch.rand(1).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert helper._build(asked)[1] == ""
    assert (torch.rand(1).item(), random.random()) == wanted


def test_a_state_that_changed_meanwhile_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trainer's module shares with its own stage in a way that addresses do not show."""
    log = log_for(1, 4)
    for (stream, key), tensor in alone(1, store, log, ScheduleGPipe, 4).captured.sent.items():
        log.put(stream, key, tensor)
    touched: list[nn.Module] = []

    def makes(_index: int) -> nn.Module:
        found = Part()

        def touch(*_arguments: Any) -> None:
            touched[0].linear.bias.data.add_(1)

        found.register_forward_hook(touch)
        return found

    own = Rank.__init__

    def made(self: Rank, rank: int, *arguments: Any) -> None:
        own(self, rank, *arguments)
        self.state.present = True
        if rank == 0:
            touched.append(self.module)

    monkeypatch.setattr(Rank, "__init__", made)
    with pytest.raises(ReplayRefused, match="the state of rank 0 changed while it helped rank 1"):
        shared(1, (0,), store, log, ScheduleGPipe, 4, makes=makes, monkeypatch=monkeypatch)
