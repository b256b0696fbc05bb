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
from swift_ft.state.tensors import as_bytes
from swift_ft.train import replay_helper, shared_replay
from swift_ft.train.gradient_chain import module_layout
from swift_ft.train.replay_helper import Helper
from swift_ft.train.shared_replay import Owner, send_away, why_alone
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.shared_replay_world import (
    ROWS,
    STEPS,
    WIDTH,
    Part,
    Rank,
    alone,
    log_for,
    logged,
    published,
    same_parameters,
    shared,
    site_in,
    told_shapes,
)


@pytest.fixture
def store() -> Iterator[Any]:
    with told_shapes() as found:
        yield found


def test_help_ends_before_the_replay_does(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    single, log = logged(1, store, Schedule1F1B, 4)
    both = shared(1, (0,), store, log, Schedule1F1B, 4, until=STEPS.start + 1, monkeypatch=monkeypatch)
    assert both.sharing.helped.steps == 1
    same_parameters(both.owner, single)


def test_more_ranks_than_make_it_quicker_stay_out(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    single, log = logged(1, store, ScheduleGPipe, 2)
    both = shared(1, (0, 2), store, log, ScheduleGPipe, 2, monkeypatch=monkeypatch)
    assert both.sharing._helpers == (0,)
    same_parameters(both.owner, single)


def test_another_result_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = logged(1, store, ScheduleGPipe, 4)
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
        sharing = Owner(site_in(Network(), rank), Help(owner=2, helpers=(), until=9))
        rank.optimizer.zero_grad()
        assert sharing._unfit((), {}, False) == ""
        if why == "gradients are there":
            rank.module.linear.weight.grad = torch.zeros_like(rank.module.linear.weight)
        else:
            change(rank)
        assert why in sharing._unfit((), {}, False)

    def test_external_inputs_and_outputs(self, store: Any) -> None:
        rank = alone(2, store, log_for(2, 2), ScheduleGPipe, 2)
        sharing = Owner(site_in(Network(), rank), Help(owner=2, helpers=(), until=9))
        rank.optimizer.zero_grad()
        assert "no plain tensor" in sharing._unfit(("text",), {}, False)
        assert "no plain tensor" in sharing._unfit((), {"scale": torch.ones(1, requires_grad=True)}, False)
        assert "return_outputs=False" in sharing._unfit((), {}, True)

    def test_whoever_cannot_make_the_module(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        single, log = logged(1, store, ScheduleGPipe, 4)

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
        helper = Helper(site_in(Network(), rank), lambda _i: Part())
        assert helper._build(asked)[1] == ""
        monkeypatch.setattr(replay_helper, "available_memory", lambda: 100)
        assert "MiB of memory" in helper._build(asked)[1]

    def test_an_owner_without_memory(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        single, log = logged(1, store, ScheduleGPipe, 4)
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
        helper = Helper(site_in(Network(), rank), lambda _i: make(rank))
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
        helper = Helper(site_in(network, rank), lambda _i: Part())
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
    helper = Helper(site_in(Network(), rank), make)
    torch.manual_seed(5)
    random.seed(5)
    wanted = (torch.rand(1).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert helper._build(asked)[1] == ""
    assert (torch.rand(1).item(), random.random()) == wanted


def test_a_state_that_changed_meanwhile_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trainer's module shares with its own stage in a way that addresses do not show."""
    _, log = logged(1, store, ScheduleGPipe, 4)
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
