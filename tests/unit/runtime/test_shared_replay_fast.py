"""Gradients that each rank adds up by itself: sums of sums, and what is compared with the log no more."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from swift.errors import Divergence
from swift.log.record import RecordKey, digest_of
from swift.runtime.shared_replay.gradient_order import OwnGradients
from swift.runtime.shared_replay.gradients import added
from swift.runtime.shared_replay.verifying_capture import VerifyingCapture
from swift.runtime.tensors import owned_bytes, same_bits
from tests.unit.runtime.shared_replay_world import (
    STEPS,
    Log,
    Part,
    Rank,
    Shared,
    alone,
    log_for,
    placed,
    shared,
    told_shapes,
)
from tests.unit.runtime.test_shared_replay_gradients import Everything, made, microbatches


@pytest.fixture
def store() -> Iterator[Any]:
    with told_shapes() as found:
        yield found


def one_by_one(module: Everything, which: range) -> None:
    xs = microbatches(torch.float32)
    for mb in which:
        module(xs[mb], mb).backward()


def combined(shares: list[range], *, fast: bool) -> list[torch.Tensor | None]:
    """What comes out of a line of ranks with these shares."""
    totals: list[torch.Tensor | None] | None = None
    for share in shares:
        module = made(torch.float32, None)
        own = OwnGradients(list(module.parameters()), first=totals is None, fast=fast)
        one_by_one(module, share)
        mine = own.taken()
        assert all(parameter.grad is None for parameter in module.parameters())
        totals = totals or [None] * len(mine)
        totals = [added(total, addends) for total, addends in zip(totals, mine, strict=True)]
    assert totals is not None
    return totals


def test_the_sum_of_two_sums() -> None:
    sums = []
    for share in (range(3), range(3, 5)):
        module = made(torch.float32, None)
        one_by_one(module, share)
        sums.append([parameter.grad for parameter in module.parameters()])
    wanted = [
        one if other is None else one + other if one is not None else other
        for one, other in zip(*sums, strict=True)
    ]
    plain = made(torch.float32, None)
    one_by_one(plain, range(5))
    found = combined([range(3), range(3, 5)], fast=True)
    others = 0
    for total, sum_of_sums, parameter in zip(found, wanted, plain.parameters(), strict=True):
        if total is None or sum_of_sums is None or parameter.grad is None:
            assert total is sum_of_sums is parameter.grad is None
            continue
        assert same_bits(total, sum_of_sums)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-4)
        others += not same_bits(total, parameter.grad)
    assert others, "these numbers show no difference between the two ways"


def test_ordered_has_the_bits_of_one_process() -> None:
    plain = made(torch.float32, None)
    one_by_one(plain, range(5))
    for total, parameter in zip(
        combined([range(3), range(3, 5)], fast=False), plain.parameters(), strict=True
    ):
        if parameter.grad is None:
            assert total is None
        else:
            assert total is not None
            assert same_bits(total, parameter.grad)


def logged(rank: int, count: int, store: Any, schedule: Any = ScheduleGPipe) -> tuple[Log, Part, Rank]:
    log = log_for(rank, count, schedule)
    single = alone(rank, store, log, schedule, count)
    for (stream, key), tensor in single.captured.sent.items():
        log.put(stream, key, tensor)
    return log, single


def close(one: Shared, other: Rank) -> None:
    """AdamW makes steps of 0.1 here: one that is lost, or taken twice, is far off."""
    differs = 0
    for mine, theirs in zip(one.owner.parameters, other.parameters, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
        differs += not same_bits(mine, theirs)
    assert differs, "the bits are those of one process: nothing was combined fast"
    for step, losses in other.losses.items():
        assert one.owner.losses[step] == pytest.approx(losses, rel=1e-4)


def steps_sent(rank: Rank, kinds: str) -> set[int]:
    return {key.step for stream, key in rank.captured.sent if stream[-1] in kinds}


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("rank", "helpers"), [(0, (1,)), (1, (0, 2)), (2, (1, 0))])
def test_only_the_first_step_is_compared(
    rank: int,
    helpers: tuple[int, ...],
    schedule: Any,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, single = logged(rank, 7, store, schedule)
    both = shared(rank, helpers, store, log, schedule, 7, fast=True, monkeypatch=monkeypatch)
    close(both, single)
    streams = (rank > 0) + (rank < 2)
    own = len(both.sharing._own)
    assert both.sharing.helped.steps == len(STEPS)
    assert both.sharing.helped.verified == (7 - own) * streams
    assert steps_sent(both.owner, "FB") == {STEPS.start}
    if rank != 1:  # what comes from outside is the log's still
        assert steps_sent(both.owner, "XT") == set(STEPS)
    first = {at: tensor for at, tensor in single.captured.sent.items() if at[1].step == STEPS.start}
    for at, tensor in both.owner.captured.sent.items():
        if at in first:
            assert same_bits(tensor, first[at])
    assert both.owner.channel.off_log
    assert not any(helper.channel.off_log for helper in both.helpers)
    for parameter in both.owner.parameters:
        assert not parameter._post_accumulate_grad_hooks


def test_the_first_step_that_differs_is_found(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, _ = logged(1, 4, store)
    at = ("s1.F", RecordKey(STEPS.start, 0, 512))
    dtype, shape, body = log.records[at]
    log.records[at] = (dtype, shape, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(Divergence, match="the tensor that a helper computed"):
        shared(1, (0, 2), store, log, ScheduleGPipe, 4, fast=True, monkeypatch=monkeypatch)


def test_what_the_log_lacks_later_is_not_put_there(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log, single = logged(1, 4, store)
    log.lacking = {at for at in single.captured.sent if at[1].step in (STEPS.start, STEPS.stop - 1)}
    both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, fast=True, monkeypatch=monkeypatch)
    handed = {at for at in both.owner.captured.sent if at[0][-1] in "FB"}
    assert handed == {at for at in log.lacking if at[1].step == STEPS.start}
    for at in handed:
        assert same_bits(both.owner.captured.sent[at], single.captured.sent[at])


def test_an_owner_that_is_off_the_log_compares_nothing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on with a replay that was cut short."""
    log, single = logged(1, 4, store)
    both = shared(1, (0, 2), store, log, ScheduleGPipe, 4, fast=True, off_log=True, monkeypatch=monkeypatch)
    close(both, single)
    assert both.sharing.helped.verified == 0
    assert steps_sent(both.owner, "FB") == set()


def test_what_a_rank_that_is_off_the_log_helps_with_is_compared(store: Any) -> None:
    """Its own state is one thing, the stage that it computes another."""
    rank = Rank(0, store, Part, ScheduleGPipe, 4)
    rank.channel.off_log = True
    dtype, shape, body = owned_bytes(torch.ones(3))
    checked = VerifyingCapture({"s1.F": {RecordKey(5, 0, 512): digest_of(dtype, shape, body)}})
    beside = rank.channel.beside(checked)
    beside.begin_step(5)
    beside.sent(1, "F", 0, 512, torch.ones(3))
    assert checked.verified == 1
    with pytest.raises(Divergence):
        beside.sent(1, "F", 0, 512, torch.zeros(3))
    assert rank.channel.off_log


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize(("schedule", "count"), [(ScheduleInterleaved1F1B, 5), (ScheduleZBVZeroBubble, 7)])
def test_several_stages_on_a_rank(
    schedule: Any, count: int, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, single = logged(1, count, store, schedule)
    both = shared(1, (0, 2), store, log, schedule, count, fast=True, monkeypatch=monkeypatch)
    close(both, single)
    indices, of = placed(schedule, 1)
    crossing = [
        other for i in indices for other in (i - 1, i + 1) if 0 <= other < of and other not in indices
    ]
    own = len(both.sharing._own)
    assert both.sharing.helped.steps == len(STEPS)
    assert both.sharing.helped.verified == (count - own) * len(crossing)
    assert steps_sent(both.owner, "FB") == {STEPS.start}
