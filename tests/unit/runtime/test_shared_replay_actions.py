"""What a rank computes in a step: torch's own lists, and what falls to a share."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleLoopedBFS
from torch.testing._internal.distributed.fake_pg import FakeStore

from swift_ft import torch_private
from swift_ft.lab.drill.topology import SCHEDULES, Topology
from swift_ft.lab.drill.trainer import make_schedule
from swift_ft.train.shared_replay import StepAction, of_share, one_by_one, shares, unordered, workers

NAMES = list(SCHEDULES)


@contextmanager
def ranks(rank: int, of: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=of)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stages(indices: list[int], of: int) -> list[Any]:
    return [PipelineStage(nn.Linear(1, 1), index, of, torch.device("cpu")) for index in indices]


def schedules(name: str, pipeline: int, most: int = 17) -> Iterator[tuple[Any, list[int], int]]:
    """Of every rank, of every number of microbatches that the schedule takes."""
    for rank in range(pipeline):
        with ranks(rank, pipeline):
            shape = Topology(pipeline_ranks=pipeline, schedule=name, microbatches=2 * pipeline)
            indices, of = list(shape.stages_of(rank)), shape.stages
            for microbatches in range(1, most):
                try:
                    yield make_schedule(name, stages(indices, of), microbatches), indices, microbatches
                except ValueError:  # too few for it, or no multiple
                    continue


def actions_of(schedule: Any) -> list[StepAction]:
    found = torch_private.schedule_actions(schedule)
    assert found is not None
    return [StepAction(*action) for action in found]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_all_of_torchs_add_gradients_in_the_order_of_microbatches(name: str, pipeline: int) -> None:
    seen = 0
    for schedule, indices, microbatches in schedules(name, pipeline):
        assert unordered(actions_of(schedule), indices, microbatches) == ""
        seen += 1
    assert seen >= pipeline


@pytest.mark.parametrize("name", NAMES)
def test_shares_are_the_same_actions_in_another_order(name: str) -> None:
    for schedule, indices, microbatches in schedules(name, 4, 14):
        actions = actions_of(schedule)
        for count in range(1, min(microbatches, 5)):
            parts = [one_by_one(of_share(actions, part)) for part in shares(microbatches, count)]
            together = [action for part in parts for action in part]
            assert Counter(together) == Counter(actions)
            assert unordered(together, indices, microbatches) == ""
            for mb in range(microbatches):
                assert of_share(together, {mb}) == of_share(actions, {mb})
            for part in parts:
                assert [action.microbatch for action in part] == sorted(action.microbatch for action in part)


def test_how_torch_splits_backwards() -> None:
    """A microbatch of one stage is computed whole, another split: which, is the schedule's business."""
    kinds = {
        name: {action.kind for schedule, *_ in schedules(name, 4, 10) for action in actions_of(schedule)}
        for name in NAMES
    }
    assert kinds == {
        "1f1b": {"F", "B"},
        "gpipe": {"F", "B"},
        "interleaved1f1b": {"F", "B"},
        "interleavedzerobubble": {"F", "I", "W"},
        "zbv": {"F", "I", "W"},
        "dualpipev": {"F", "B", "I", "W"},
    }


class TestNobodyShares:
    def test_gradients_in_another_order(self) -> None:
        with ranks(0, 2):
            schedule = ScheduleLoopedBFS(stages([0, 2], 4), 3, loss_fn=nn.functional.mse_loss)
            why = unordered(actions_of(schedule), [0, 2], 3)
        assert why == "the gradients of stage 0 are not added in the order of microbatches"

    def test_what_a_trainer_computes_itself(self) -> None:
        with ranks(0, 2):
            schedule = make_schedule("dualpipev", stages([0, 3], 4), 4)
            schedule.register_custom_function(
                torch_private._schedules.OVERLAP_F_B, lambda _action, _context: None
            )
            assert torch_private.schedule_actions(schedule) is None

    def test_a_schedule_of_a_trainers_own(self) -> None:
        class Own(Schedule1F1B):
            pass

        with ranks(0, 2):
            assert torch_private.schedule_actions(Own(stages([0], 2)[0], 4)) is None

    @pytest.mark.parametrize(
        ("words", "why"),
        [
            ("0F0 0B0 0F1 0B1", ""),
            ("0F0 0F1 0I0 0I1 0W0 0W1", ""),
            ("0F0 0F1 0I1 0I0 0W0 0W1", ""),  # weights' gradients alone have an order
            ("0F0 0F1 0I0 0B1 0W0", "not added in the order"),
            ("0F0 0F1 0I0 0I1 0W1 0W0", "not added in the order"),
            ("0F0 0W0 0I0 0F1 0B1", "not one forward and one backward of microbatch 0"),
            ("0F0 0B0 0W0 0F1 0B1", "not one forward and one backward of microbatch 0"),
            ("0F0 0B0 0F1", "not one forward and one backward of microbatch 1"),
            ("0F0 0B0", "not one forward and one backward of microbatch 1"),
            ("0F0 0B0 0F1 0B1 0F2 0B2", "more than 2 microbatches"),
            ("0F0 0B0 1F1 0B1", "1F1 is of a stage that is not this rank's"),
        ],
    )
    def test_lists(self, words: str, why: str) -> None:
        actions = [StepAction(int(word[0]), word[1], int(word[2])) for word in words.split()]
        found = unordered(actions, [0], 2)
        assert (why in found) if why else not found


# -- shares --------------------------------------------------------------------------------------------


counts = st.integers(1, 40)


@given(microbatches=counts, available=counts)
def test_every_microbatch_once_and_in_order(microbatches: int, available: int) -> None:
    each = shares(microbatches, workers(microbatches, available))
    assert [mb for share in each for mb in share] == list(range(microbatches))
    sizes = [len(share) for share in each]
    assert sizes == sorted(sizes, reverse=True)  # the last one is the owner
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[-1] >= 1


@given(microbatches=counts, available=counts)
def test_no_more_workers_than_make_it_quicker(microbatches: int, available: int) -> None:
    chosen = workers(microbatches, available)
    assert 1 <= chosen <= available
    largest = max(map(len, shares(microbatches, chosen)))
    assert largest == -(-microbatches // min(available, microbatches))
    assert chosen == 1 or max(map(len, shares(microbatches, chosen - 1))) > largest


def test_shares_of_eight() -> None:
    assert [workers(8, available) for available in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 3, 4, 4, 8, 8]
    assert shares(8, 3) == [range(3), range(3, 6), range(6, 8)]
