"""A replay that is shared has the gradients, losses and sends of one that is not; and when it is not shared."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from swift_ft import events
from swift_ft.errors import Divergence, ReplayRefused
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey
from swift_ft.planner import Help
from swift_ft.state.tensors import as_bytes, same_bits
from swift_ft.train import replay_helper, shared_replay
from swift_ft.train.gradient_chain import module_layout
from swift_ft.train.replay_helper import Helper
from swift_ft.train.shared_replay import Owner, send_away, why_alone
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.shared_replay_world import (
    RANKS,
    ROWS,
    STEPS,
    WIDTH,
    Part,
    Rank,
    alone,
    batch,
    log_for,
    published,
    same_parameters,
    shared,
    told_shapes,
)


@pytest.fixture
def store() -> Iterator[Any]:
    with told_shapes() as found:
        yield found


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
    before = [replay_helper.state_digest(single.state)]
    log.read.clear()
    log.shares.clear()
    both = shared(rank, helpers, store, log, schedule, microbatches, monkeypatch=monkeypatch)
    same_parameters(both.owner, single)
    assert both.owner.losses == single.losses
    assert replay_helper.state_digest(both.owner.state) == before[0]
    streams = (rank > 0) + (rank < RANKS - 1)
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
    checked = replay_helper.VerifyingCapture({"s1.F": log.digests("s1.F", 0, cancelled=never)})
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
        sharing = Owner(
            2,
            Help(owner=2, helpers=(), until=9),
            LocalWire(Network(), 2),
            rank.channel,
            rank.state,
            lambda: None,
        )
        rank.optimizer.zero_grad()
        assert sharing._unfit((), {}, False) == ""
        if why == "gradients are there":
            rank.module.linear.weight.grad = torch.zeros_like(rank.module.linear.weight)
        else:
            change(rank)
        assert why in sharing._unfit((), {}, False)

    def test_external_inputs_and_outputs(self, store: Any) -> None:
        rank = alone(2, store, log_for(2, 2), ScheduleGPipe, 2)
        sharing = Owner(
            2,
            Help(owner=2, helpers=(), until=9),
            LocalWire(Network(), 2),
            rank.channel,
            rank.state,
            lambda: None,
        )
        rank.optimizer.zero_grad()
        assert "no plain tensor" in sharing._unfit(("text",), {}, False)
        assert "no plain tensor" in sharing._unfit((), {"scale": torch.ones(1, requires_grad=True)}, False)
        assert "return_outputs=False" in sharing._unfit((), {}, True)

    def test_running_statistics(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Found out when shapes are inferred, before anything is computed; the rest is replayed alone."""

        def make(_index: int) -> nn.Module:
            return Part(norm=nn.BatchNorm1d)

        log = log_for(1, 4)
        single = Rank(1, store, make, ScheduleGPipe, 4)
        single.channel.begin_replay(log, STEPS.start, ())  # type: ignore[arg-type]
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
            makes=make,
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
        rank = Rank(0, store, Part, ScheduleGPipe, 4)
        asked = {
            "stages": [1],
            "microbatches": 4,
            "tensors": module_layout(nn.ModuleDict({"stage1": Part()})),
        }
        helper = Helper(0, lambda _i: Part(), LocalWire(Network(), 0), rank.channel, rank.state, lambda: None)
        assert helper._build(asked)[1] == ""
        monkeypatch.setattr(replay_helper, "available_memory", lambda: 100)
        assert "MiB of memory" in helper._build(asked)[1]

    def test_an_owner_without_memory(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        log = log_for(1, 4)
        single = alone(1, store, log, ScheduleGPipe, 4)
        for (stream, key), tensor in single.captured.sent.items():
            log.put(stream, key, tensor)
        monkeypatch.setattr(shared_replay, "available_memory", lambda: 100)
        both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, monkeypatch=monkeypatch)
        assert both.sharing._helpers == ()
        same_parameters(both.owner, single)

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (lambda rank: rank.module, "shares memory"),
            (lambda rank: nn.Linear(WIDTH, WIDTH), "another module than the owner's: stage1.strided"),
            (lambda rank: Part(norm=nn.Identity), "another module"),
            (lambda rank: Part().to(torch.bfloat16), "bfloat16"),
        ],
    )
    def test_other_modules(self, make: Any, why: str, store: Any) -> None:
        rank = Rank(0, store, Part, ScheduleGPipe, 4)
        asked = {
            "stages": [1],
            "microbatches": 4,
            "tensors": module_layout(nn.ModuleDict({"stage1": Part()})),
        }
        helper = Helper(
            0, lambda _i: make(rank), LocalWire(Network(), 0), rank.channel, rank.state, lambda: None
        )
        modules, said = helper._build(asked)
        assert modules == []
        assert why in said

    def test_other_schedules(self, store: Any) -> None:
        rank = Rank(0, store, Part, ScheduleGPipe, 4)
        assert why_alone(rank.state) == ""
        rank.state.schedules = [SimpleNamespace(_stages=rank.stages, _n_microbatches=4)]
        assert why_alone(rank.state) == "what SimpleNamespace computes in which order is not known"
        rank.stage.dw_builder = lambda: None
        assert why_alone(rank.state) == "a stage has a dw_builder"
        rank.state.schedules *= 2
        assert why_alone(rank.state) == "there is more or less than one schedule"

    def test_an_owner_that_cannot_share(self, store: Any) -> None:
        network = Network()
        rank = Rank(0, store, Part, ScheduleGPipe, 4)
        heard: list[dict[str, Any]] = []
        end = events.listen(lambda event, fields: heard.append({"event": event, **fields}))
        send_away(1, Help(owner=1, helpers=(0,), until=9), LocalWire(network, 1), 2, "of its schedule")
        end()
        (begun,) = heard
        assert (begun["event"], begun["rank"], begun["generation"]) == ("help_begin", 1, 2)
        assert (begun["helpers"], begun["declined"]) == ([], {"1": "of its schedule"})
        helper = Helper(0, lambda _i: Part(), LocalWire(network, 0), rank.channel, rank.state, lambda: None)
        helper.run(1, published(), "job")
        assert network.left() == 0


def test_randomness_of_a_trainer_is_kept(store: Any) -> None:
    import random

    rank = Rank(0, store, Part, ScheduleGPipe, 4)

    def make(_index: int) -> nn.Module:
        random.seed(1)
        torch.manual_seed(1)
        return Part()

    asked = {"stages": [1], "microbatches": 4, "tensors": module_layout(nn.ModuleDict({"stage1": Part()}))}
    helper = Helper(0, make, LocalWire(Network(), 0), rank.channel, rank.state, lambda: None)
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
