"""A replay that is shared has the gradients, losses and sends of one that is not; and when it is not shared."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from swift_ft import events, torch_private
from swift_ft.errors import Divergence, ReplayRefused
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey
from swift_ft.planner import Help
from swift_ft.state.digests import digest_of
from swift_ft.state.tensors import as_bytes
from swift_ft.train import replay_helper, shared_replay
from swift_ft.train.gradient_chain import Addends, module_layout
from swift_ft.train.replay_helper import Helper
from swift_ft.train.shared_replay import (
    Owner,
    StepAction,
    actions_of,
    one_by_one,
    send_away,
    why_alone,
    why_no_help,
)
from swift_ft.train.stage import LoggedPipelineStage
from tests.local_backend import LocalWire, Network
from tests.unit.runtime.shared_replay_world import (
    RANKS,
    ROWS,
    STEPS,
    WIDTH,
    Log,
    Part,
    Rank,
    Shared,
    alone,
    log_for,
    logged,
    placed,
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


def test_another_result_is_refused(store: Any) -> None:
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


def asked() -> dict[str, Any]:
    """Of a helper, for stage 1."""
    return {"stages": [1], "microbatches": 4, "tensors": module_layout(nn.ModuleDict({"stage1": Part()}))}


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
        helper = Helper(site_in(Network(), rank), lambda _i: Part())
        assert helper._build(asked())[1] == ""
        monkeypatch.setattr(replay_helper, "available_memory", lambda: 100)
        assert "MiB of memory" in helper._build(asked())[1]

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
        helper = Helper(site_in(Network(), rank), lambda _i: make(rank))
        modules, said = helper._build(asked())
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

    helper = Helper(site_in(Network(), rank), make)
    question = asked()
    torch.manual_seed(5)
    random.seed(5)
    wanted = (torch.rand(1).item(), random.random())
    torch.manual_seed(5)
    random.seed(5)
    assert helper._build(question)[1] == ""
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


# -- one stage or several, under each of torch's schedules: the bits of one process --------------------


# `Part.turned` is laid out in another way by a split backward than by a whole one.
pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")

# What does not divide by the number of ranks, where the schedule takes it.
SCHEDULES = [
    (ScheduleGPipe, 3),
    (Schedule1F1B, 5),
    (ScheduleInterleaved1F1B, 5),
    (ScheduleInterleavedZeroBubble, 8),
    (ScheduleZBVZeroBubble, 5),
    (ScheduleDualPipeV, 7),
]


def crossings(rank: int, schedule: Any) -> int:
    """Tensors that a rank sends to others in a microbatch."""
    indices, of = placed(schedule, rank)
    beside = [other for index in indices for other in (index - 1, index + 1) if 0 <= other < of]
    return len([other for other in beside if other not in indices])


def same(both: Shared, single: Rank, log: Log, microbatches: int, schedule: Any) -> None:
    same_parameters(both.owner, single)
    assert both.owner.losses == single.losses
    assert digest_of(both.owner.state.state_dict()) == digest_of(single.state.state_dict())
    helped, own = both.sharing.helped, len(both.sharing._own)
    assert helped.steps == len(STEPS)
    assert helped.microbatches == len(STEPS) * (microbatches - own) * len(single.stages)
    # All that crosses to or from another rank is read, and compared, once; nothing else is.
    rank = both.owner.rank
    assert helped.verified == len(STEPS) * (microbatches - own) * crossings(rank, schedule)
    received = [stream for stream, _ in log.read if stream[-1] in "FB"]
    assert len(received) == len(STEPS) * microbatches * crossings(rank, schedule)
    sent = [stream for stream, _ in both.owner.captured.sent if stream[-1] in "FB"]
    assert len(sent) == len(STEPS) * own * crossings(rank, schedule)
    assert None not in log.shares
    for stage in both.owner.stages:
        assert stage.share is None
    for parameter in both.owner.parameters:
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
@pytest.mark.parametrize(("rank", "helpers"), [(0, (1, 2)), (1, (2,)), (2, (1, 0))])
def test_a_shared_replay_has_the_bits_of_one(
    rank: int,
    helpers: tuple[int, ...],
    schedule: Any,
    microbatches: int,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    single, log = logged(rank, store, schedule, microbatches)
    both = shared(rank, helpers, store, log, schedule, microbatches, monkeypatch=monkeypatch)
    same(both, single, log, microbatches, schedule)


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
def test_what_the_list_says_is_what_is_computed(
    schedule: Any, microbatches: int, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[StepAction] = []

    def noting(name: str, kind: Any) -> None:
        inner = getattr(LoggedPipelineStage, name)

        def noted(self: Any, mb: int, *arguments: Any, **named: Any) -> Any:
            done.append(StepAction(self.stage_index, kind(named), mb))
            return inner(self, mb, *arguments, **named)

        monkeypatch.setattr(LoggedPipelineStage, name, noted)

    noting("forward_one_chunk", lambda _named: "F")
    noting("backward_one_chunk", lambda named: "B" if named.get("full_backward", True) else "I")
    noting("backward_weight_one_chunk", lambda _named: "W")
    rank = alone(1, store, log_for(1, microbatches, schedule), schedule, microbatches)
    assert done == (actions_of(rank.state) or []) * len(STEPS)
    done.clear()
    _, log = logged(1, store, schedule, microbatches)
    done.clear()
    both = shared(1, (0,), store, log, schedule, microbatches, monkeypatch=monkeypatch)
    owned = actions_of(both.owner.state) or []
    helped = [action for action in one_by_one(owned) if action.microbatch not in both.sharing._own]
    # The owner is asked for all of them; the helper's are between them, in their order.
    asked = [*owned, *helped] * len(STEPS)
    assert sorted(done) == sorted(asked)
    firsts = [action for action in done if action.microbatch not in both.sharing._own]
    assert len(firsts) == 2 * len(helped) * len(STEPS)


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
def test_external_inputs_of_every_stage(
    schedule: Any, microbatches: int, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = torch.linspace(0.5, 1.5, ROWS * microbatches).unsqueeze(1)
    single, log = logged(0, store, schedule, microbatches, scale=scale)
    both = shared(0, (1, 2), store, log, schedule, microbatches, scale=scale, monkeypatch=monkeypatch)
    same(both, single, log, microbatches, schedule)
    entered = {stream for stream, _ in log.read if stream.endswith(".X")}
    assert entered == {f"s{index}.X" for index in placed(schedule, 0)[0]}
    assert len(log.read) == len(set(log.read))


@pytest.mark.parametrize(("schedule", "microbatches"), SCHEDULES)
def test_the_owner_gets_what_the_log_lacks(
    schedule: Any, microbatches: int, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, log = logged(2, store, schedule, microbatches)
    last = {at for at in single.captured.sent if at[1].step == STEPS.stop - 1 and at[0][-1] in "FB"}
    log.lacking |= last
    both = shared(2, (0, 1), store, log, schedule, microbatches, monkeypatch=monkeypatch)
    handed = both.owner.captured.sent
    for at in last:
        assert torch.equal(handed[at], single.captured.sent[at])
    assert len(last) == microbatches * crossings(2, schedule)
    same_parameters(both.owner, single)


def test_gradients_of_split_backwards_have_strides_of_their_own(store: Any) -> None:
    """Else no test of layouts means anything."""
    rank = alone(1, store, log_for(1, 5, ScheduleZBVZeroBubble), ScheduleZBVZeroBubble, 5)
    gradients = [stage.submod.turned.grad for stage in rank.stages]
    assert [g.stride() for g in gradients] == [(1, WIDTH)] * 2


class TestNobodyHelpsWithStages:
    def test_stages_that_share_a_parameter(self, store: Any) -> None:
        rank = Rank(0, store, Part, ScheduleZBVZeroBubble, 4)
        assert why_alone(rank.state) == ""
        rank.stages[1].submod.linear.weight = rank.stages[0].submod.linear.weight
        assert why_alone(rank.state) == "stages of one rank share a parameter"
        assert why_no_help(rank.state) == ""  # others' stages do not

    def test_another_order_of_gradients(self, store: Any) -> None:
        rank = Rank(0, store, Part, ScheduleLoopedBFS, 4)
        assert "not added in the order of microbatches" in why_alone(rank.state)

    def test_running_statistics_of_either_stage(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def make(index: int) -> nn.Module:
            return Part(index, norm=nn.BatchNorm1d if index > 2 else nn.LayerNorm)

        schedule, microbatches = ScheduleZBVZeroBubble, 5
        log = log_for(1, microbatches, schedule)
        single = alone(1, store, log, schedule, microbatches, make)
        for (stream, key), tensor in single.captured.sent.items():
            log.put(stream, key, tensor)
        both = shared(
            1, (0,), store, log, schedule, microbatches, makes=make, module=make, monkeypatch=monkeypatch
        )
        assert both.sharing.helped.steps == 0
        same_parameters(both.owner, single)

    def test_without_memory_for_all_stages(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = Rank(1, store, Part, ScheduleZBVZeroBubble, 5)
        weights = sum(parameter.nbytes for parameter in rank.parameters)
        assert weights == 2 * sum(parameter.nbytes for parameter in rank.module.parameters())
        single, log = logged(1, store, ScheduleZBVZeroBubble, 5)
        monkeypatch.setattr(shared_replay, "available_memory", lambda: weights * 3 - 1)  # one stage would fit
        both = shared(1, (0, 2), store, log, ScheduleZBVZeroBubble, 5, monkeypatch=monkeypatch)
        assert both.sharing._helpers == ()
        same_parameters(both.owner, single)


def test_a_list_of_one_stage_with_split_backwards(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch offers it: its runtime walks any list, also with one stage on a rank."""

    class ZeroBubble(ScheduleInterleavedZeroBubble):
        def __init__(self, stages: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(stages if isinstance(stages, list) else [stages], *arguments, **named)

    monkeypatch.setattr(
        "tests.unit.runtime.shared_replay_world.placed", lambda _schedule, rank: ([rank], RANKS)
    )
    single, log = logged(1, store, ZeroBubble, 5)
    found = torch_private.schedule_actions(single.schedule)
    assert found is not None
    assert {kind for _, kind, _ in found} == {"F", "I", "W"}
    both = shared(1, (0, 2), store, log, ZeroBubble, 5, monkeypatch=monkeypatch)
    assert both.sharing.helped.steps == len(STEPS)
    same_parameters(both.owner, single)


class TestAddends:
    def test_gradients_in_one_memory_are_refused(self) -> None:
        """torch adds to both what it adds to one of them; apart, they would have other bits."""
        one, other = (nn.Parameter(torch.zeros(3)) for _ in range(2))
        addends = Addends([one, other])
        gradient = torch.ones(3)

        def weigh() -> None:
            with addends.weighing():
                one.grad = gradient
                other.grad = gradient

        with pytest.raises(ReplayRefused, match="in the same memory"):
            weigh()
        addends.close()

    def test_each_addition_is_kept(self) -> None:
        parameter = nn.Parameter(torch.zeros(3))
        addends = Addends([parameter])
        for context in (addends.weighing(), nullcontext()):
            with context:
                for value in (1.0, 2.0):
                    addend = torch.full((3,), value)
                    if parameter.grad is None:
                        parameter.grad = addend
                    else:
                        parameter.grad += addend
        addends.close()
        assert [float(addend[0]) for addend in addends.of[0]] == [1.0, 2.0]
        assert parameter.grad is not None
        assert float(parameter.grad[0]) == 3.0
