"""An owner and its helpers, as threads of this process with a log in memory."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import Schedule1F1B, ScheduleDualPipeV, ScheduleGPipe, ScheduleZBVZeroBubble
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_ft import torch_private
from swift_ft.coordinator_messages import PublishedPlan
from swift_ft.errors import RecordMissing
from swift_ft.log.reader import ReadFilter
from swift_ft.log.record import Record, RecordKey, digest_of
from swift_ft.planner import Help, Plan
from swift_ft.state.tensors import same_bits
from swift_ft.train import replay_helper
from swift_ft.train.boundary_log import Capture, Channel, Shapes
from swift_ft.train.participants import Site
from swift_ft.train.replay_helper import Helper
from swift_ft.train.shared_replay import Owner
from swift_ft.train.stage import LoggedPipelineStage, logged_loss
from tests.local_backend import LocalWire, Network, in_parallel
from tests.log_client import owned_bytes
from tests.unit.runtime.wired import channel_of, site_of, state_of, updates_of

RANKS, WIDTH, ROWS = 3, 8, 4
STEPS = range(5, 8)


@dataclass
class Log:
    """Records by stream; what is lacking is left out of `held`."""

    records: dict[tuple[str, RecordKey], tuple[str, tuple[int, ...], bytes]] = field(default_factory=dict)
    lacking: set[tuple[str, RecordKey]] = field(default_factory=set)
    read: list[tuple[str, RecordKey]] = field(default_factory=list)
    shares: list[ReadFilter | None] = field(default_factory=list)
    """That was asked for, of each stream that was followed."""

    def put(self, stream: str, key: RecordKey, tensor: torch.Tensor) -> None:
        dtype, shape, body = owned_bytes(tensor)
        self.records[stream, key] = (dtype, shape, bytes(body))

    # a reader

    def digests(
        self, stream: str, from_step: int, *, cancelled: Callable[[], bool]
    ) -> dict[RecordKey, bytes]:
        found = {key: digest_of(*value) for (name, key), value in self.records.items() if name == stream}
        if not found:
            raise RecordMissing(stream)
        return {key: digest for key, digest in found.items() if (stream, key) not in self.lacking}

    def follow(self, stream: str, from_step: int, share: ReadFilter | None = None) -> Any:
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


class Captured(Capture):
    """The capture of a rank that runs, or replays alone: everything that it sends."""

    def __init__(self) -> None:
        self.sent: dict[tuple[str, RecordKey], torch.Tensor] = {}

    def record(self, stream: str, key: RecordKey, tensor: torch.Tensor, *, now: bool, keep: bool) -> None:
        self.sent[stream, key] = tensor.detach().clone()


class Part(nn.Module):
    """What a stage computes; no two stages have the same weights."""

    def __init__(self, index: int = 0, dropout: float = 0.3, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(11 + index)
        self.linear, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(2, 2)
        self.strided = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH))  # whose gradient is computed with other strides
        self.norm = norm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.dropout(torch.tanh(self.norm(self.linear(x) @ self.strided)))
        if scale is not None:
            hidden = hidden * scale
        return (hidden.unsqueeze(1) * self.turned.t()).sum(2) + x


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def placed(schedule: Any, rank: int) -> tuple[list[int], int]:
    """The stages of a rank, and how many there are: one each, or two in a loop or a V."""
    if issubclass(schedule, ScheduleGPipe | Schedule1F1B):
        return [rank], RANKS
    if issubclass(schedule, ScheduleZBVZeroBubble | ScheduleDualPipeV):
        return [rank, 2 * RANKS - 1 - rank], 2 * RANKS
    return [rank, rank + RANKS], 2 * RANKS


class Rank:
    """A rank of a pipeline, as far as a replay needs it."""

    def __init__(
        self, rank: int, store: Any, make: Callable[[int], nn.Module], schedule: Any, microbatches: int
    ) -> None:
        self.rank, self.microbatches = rank, microbatches
        self.channel = channel_of(rank, RANKS, store=lambda: store)
        self.captured = Captured()
        self.channel.capture = self.captured
        self.channel.witness = None
        updates = updates_of()
        indices, of = placed(schedule, rank)
        self.stages = [self._stage(make(index), index, of, updates) for index in indices]
        self.stage, self.module = self.stages[0], self.stages[0].submod
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        several = len(indices) > 1
        self.schedule = schedule(self.stages if several else self.stage, microbatches, loss_fn=loss_fn)
        torch_private.wrap_loss(self.schedule, logged_loss(self.stages, self.channel))
        self.state = state_of(3, updates)
        self.state.stages, self.state.schedules, self.state.version = self.stages, [self.schedule], 9
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        self.losses: dict[int, list[float]] = {}

    def _stage(self, module: nn.Module, index: int, of: int, updates: Any) -> Any:
        stage: Any = LoggedPipelineStage(module, index, of, torch.device("cpu"))
        stage.group_rank = self.rank
        stage._attach(self.channel, updates)
        return stage

    def step(self, step: int, batch: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        """What a trainer does in one."""
        self.channel.begin_step(step)
        for stage in self.stages:
            stage.begin_step()
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if any(stage.is_last for stage in self.stages):
            options |= {"target": batch[1], "losses": losses}
        first = any(stage.is_first for stage in self.stages)
        self.schedule.step(*([batch[0]] if first else []), **{"return_outputs": False, **options})
        nn.utils.clip_grad_norm_(
            self.parameters, 0.01
        )  # always: a norm has the bits of its gradients' layout
        self.optimizer.step()
        self.losses[step] = [float(loss.detach()) for loss in losses]


def batch(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * microbatches, WIDTH, generator=generator)
    return x, x.roll(1, 1)


@contextmanager
def told_shapes() -> Iterator[Any]:
    """A store with what neighbours say about shapes; they are the same everywhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    found = HashStore()
    metas = (
        torch_private.TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, requires_grad=True),
    )
    gradients = (
        torch_private.TensorMeta(torch.Size([ROWS, WIDTH]), (WIDTH, 1), torch.float32, requires_grad=False),
    )
    said = Shapes(lambda: found, 0, lambda: None)
    said.infer(STEPS.start, 0, training=True, first=True)
    for one, other in itertools.pairwise(range(2 * RANKS)):
        said.put("F", one, other, torch_private.meta_to_json(metas))
        said.put("B", other, one, torch_private.meta_to_json(gradients))
    yield found
    dist.destroy_process_group()


def log_for(rank: int, microbatches: int, schedule: Any = ScheduleGPipe) -> Log:
    """What the neighbours have sent, those on other ranks."""
    log = Log()
    indices, of = placed(schedule, rank)
    beside = [
        (f"s{other}.{kind}", index)
        for index in indices
        for kind, other in (("F", index - 1), ("B", index + 1))
        if 0 <= other < of and other not in indices
    ]
    for step in STEPS:
        generator = torch.Generator().manual_seed(1000 + step)
        for mb in range(microbatches):
            for stream, index in beside:
                key = RecordKey(step, mb, index * 256)
                log.put(stream, key, torch.randn(ROWS, WIDTH, generator=generator))
    return log


def alone(
    rank: int,
    store: Any,
    log: Log,
    schedule: Any,
    microbatches: int,
    makes: Callable[[int], nn.Module] = Part,
    **options: Any,
) -> Rank:
    found = Rank(rank, store, makes, schedule, microbatches)
    found.channel.begin_replay(log, STEPS.start, ())  # type: ignore[arg-type]
    for step in STEPS:
        found.step(step, batch(step, microbatches), **options)
    return found


@dataclass
class Shared:
    """A replay that was shared: its owner, its helpers, and what the owner knows of these."""

    owner: Rank
    sharing: Owner
    helpers: list[Rank]


def site_in(network: Network, rank: Rank) -> Site:
    world, member = LocalWire(network, rank.rank), SimpleNamespace(check=lambda: None)
    return site_of(rank.rank, member=member, channel=rank.channel, state=rank.state, world=world)


def shared(
    rank: int,
    helpers: tuple[int, ...],
    store: Any,
    log: Log,
    schedule: Any,
    microbatches: int,
    *,
    makes: Callable[[int], nn.Module] = Part,
    module: Callable[[int], nn.Module] = Part,
    until: int = STEPS.stop,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> Shared:
    monkeypatch.setattr(replay_helper, "LogReader", lambda *_arguments: log)
    network = Network()
    owner = Rank(rank, store, module, schedule, microbatches)
    others = [Rank(one, store, Part, schedule, microbatches) for one in helpers]
    help = Help(owner=rank, helpers=helpers, until=until)
    sharing = Owner(site_in(network, owner), help)
    turns = threading.RLock()  # torch's generator is the process's: one rank computes at a time

    def run(index: int) -> None:
        if index:
            other = others[index - 1]
            helper = Helper(site_in(network, other), makes)
            helper.run(rank, published(help), "job")
            return
        owner.channel.begin_replay(log, STEPS.start, ())  # type: ignore[arg-type]
        sharing.ask()
        sharing.gather(STEPS.start, 2)
        for step in STEPS:
            sharing.at(step)
            owner.step(step, batch(step, microbatches), **options)
        sharing.at(STEPS.stop)
        sharing.close()

    one_at_a_time(turns, monkeypatch)
    shapes_come_from_others(schedule, monkeypatch)
    in_parallel(1 + len(others), run)
    assert network.left() == 0
    return Shared(owner, sharing, others)


def published(*help: Help) -> PublishedPlan:
    """A plan, as far as a helper reads it."""
    plan = Plan(target_version=STEPS.stop, ranks=(), collective_source=-1, reason="", help=help)
    return PublishedPlan(generation=2, plan=plan, sources={})


def shapes_come_from_others(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two stages of one rank tell each other is in no store, though this one has it."""
    at = {index: rank for rank in range(RANKS) for index in placed(schedule, rank)[0]}
    inner = Shapes.get

    def get(self: Shapes, kind: str, one: int, other: int) -> Any:
        assert at[one] != at[other], (kind, one, other)
        return inner(self, kind, one, other)

    monkeypatch.setattr(Shapes, "get", get)


def one_at_a_time(turns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch is computed with generators seeded for it: ranks are threads here, not processes."""

    def alone(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def locked(*arguments: Any, **named: Any) -> Any:
            with turns:
                return inner(*arguments, **named)

        monkeypatch.setattr(owner, name, locked)

    for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
        alone(LoggedPipelineStage, name)
    alone(Channel, "begin_step")
    alone(torch_private.Schedule, "_initialize_pp_stages")


def same_parameters(one: Rank, other: Rank) -> None:
    for mine, theirs in zip(one.stages, other.stages, strict=True):
        pairs = zip(mine.submod.named_parameters(), theirs.submod.parameters(), strict=True)
        for (name, parameter), its in pairs:
            assert same_bits(parameter, its), f"{mine.stage_index}: {name}"
            gradients = [one.grad for one in (parameter, its) if one.grad is not None]
            assert len({gradient.stride() for gradient in gradients}) <= 1, f"{mine.stage_index}: {name}"
            assert len(gradients) != 1, f"{mine.stage_index}: {name}"


def logged(rank: int, store: Any, schedule: Any, microbatches: int, **options: Any) -> tuple[Rank, Log]:
    """A replay alone, and the log with all that it sends."""
    log = log_for(rank, microbatches, schedule)
    single = alone(rank, store, log, schedule, microbatches, **options)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
    log.read.clear()
    log.shares.clear()
    return single, log
