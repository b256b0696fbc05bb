"""Plans ahead: one for all losses that are alike, and where losses had better be."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swift_ft.planner.canonical_plans import JobShape, Lost, Plans, all_counts, canonical, one_f_one_b
from swift_ft.planner.schedule import Costs, Step, Work, plan_step, problems
from tests.unit.recovery.adaptive.works import losses


def plan_for(plans: Plans, lost: Lost) -> tuple[Work, Step]:
    """The plan for these workers' loss."""
    return plans.of(canonical(lost, len(plans.job.group_stages))).placed(lost)


def job(origins: int = 3, stages: int = 4, microbatches: int = 4, *, split: bool = False) -> JobShape:
    return JobShape(
        group_stages=[[stage] for stage in range(stages)],
        origins=origins,
        microbatches=microbatches,
        split=split,
        cap=one_f_one_b(stages),
    )


def test_the_canonical_form_counts() -> None:
    assert canonical([(1, 0), (3, 2), (1, 2)], 4) == (0, 2, 0, 1)
    assert canonical([], 2) == (0, 0)
    assert list(all_counts(3, 2, 1)) == [(1, 1, 0), (1, 0, 1), (0, 1, 1)]
    assert list(all_counts(2, 2, 2)) == [(2, 0), (1, 1), (0, 2)]


def test_memory_of_1f1b() -> None:
    assert one_f_one_b(4) == (4, 3, 2, 1)
    assert one_f_one_b(3, 2.0) == (6, 4, 2)
    assert one_f_one_b(3, 0.1) == (1, 1, 1)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 4), st.booleans())
def test_other_names_for_replicas_make_no_other_length(
    data: st.DataObject, origins: int, split: bool
) -> None:
    of = job(origins, 3, 3, split=split)
    lost = data.draw(losses(3, origins))
    renamed = []
    for group in range(3):
        names = data.draw(st.permutations(range(origins)))
        renamed += [(group, names[origin]) for at, origin in lost if at == group]
    plans = Plans(of, losses=0)
    (work, step), (other_work, other) = plan_for(plans, lost), plan_for(plans, renamed)
    assert step.length == other.length
    for gone, placed, its in ((lost, work, step), (renamed, other_work, other)):
        assert problems(placed, its) == []
        assert set(its.slots) <= {
            group * origins + origin
            for group in range(3)
            for origin in range(origins)
            if (group, origin) not in gone
        }


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_one_worker_more_is_never_slower(
    data: st.DataObject, origins: int, stages: int, microbatches: int, split: bool
) -> None:
    most = data.draw(st.integers(1, 2))
    plans = Plans(job(origins, stages, microbatches, split=split), losses=most)
    counts = data.draw(st.sampled_from(list(all_counts(stages, most, origins - 1)) or [(0,) * stages]))
    lengths = [plans.of(counts).step.length]
    while any(counts):
        lost = [group for group, count in enumerate(counts) if count]
        group = data.draw(st.sampled_from(lost))
        counts = (*counts[:group], counts[group] - 1, *counts[group + 1 :])
        lengths.append(plans.of(counts).step.length)
    assert all(before >= behind for before, behind in pairwise(lengths))


def test_the_plan_with_one_loss_more_is_taken_where_it_is_shorter() -> None:
    counts, more = (0, 2, 0, 0), (0, 2, 1, 0)
    alone = Plans(job(3, 4, 3, split=True), losses=0)
    assert alone.of(counts).step.length > alone.of(more).step.length
    planned = Plans(job(3, 4, 3, split=True), losses=3).of(counts)
    assert planned.step.length == alone.of(more).step.length
    work, step = planned.placed([(1, 0), (1, 2)])
    assert problems(work, step) == []
    assert len(step.slots) == 12 - 3


def test_whole_pipelines_are_left_out_where_that_is_shorter() -> None:
    """With 1F1B's memory and whole backwards, who adopts a microbatch of one stage holds its activations too long."""
    planned = Plans(job(4, 4, 8), losses=0).of((0, 1, 0, 0))
    assert planned.lost == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert planned.step.length == 42 < plan_step(job(4, 4, 8).work([(1, 0)])).length


def test_workers_that_are_left_keep_their_roles_where_they_can() -> None:
    _work, step = plan_for(Plans(job(3, 2, 2), losses=0), [(0, 0)])
    canonical_step = Plans(job(3, 2, 2), losses=0).of((1, 0)).step
    assert step.slots == canonical_step.slots
    _, other = plan_for(Plans(job(3, 2, 2), losses=0), [(0, 2)])
    assert other.slots[0] == canonical_step.slots[2]
    assert other.slots[1] == canonical_step.slots[1]


def test_what_cannot_be_planned_is_said() -> None:
    plans = Plans(job(2, 3, 2), losses=1)
    with pytest.raises(ValueError, match="3 stage groups lose 0 to 1 each"):
        plans.of((2, 0, 0))
    with pytest.raises(ValueError, match="3 stage groups"):
        plans.of((0, 0))
    with pytest.raises(ValueError, match="is not one for"):
        plans.of((1, 0, 0)).placed([(1, 0)])


def test_plans_are_kept_as_json() -> None:
    of = job(2, 3, 2, split=True)
    plans = Plans(of, losses=2)
    plans.ahead()
    text = json.dumps(plans.document())
    again = Plans(of, losses=2)
    again.load(json.loads(text))
    for total in range(3):
        for counts in all_counts(3, total, 1):
            assert again.of(counts).step == plans.of(counts).step
    assert json.dumps(again.document()) == text
    with pytest.raises(ValueError, match="of another job"):
        Plans(replace(of, microbatches=3), losses=2).load(json.loads(text))
    document = json.loads(text)
    document[0]["counts"] = [1, 1, 1]
    with pytest.raises(ValueError, match="lacks"):
        Plans(of, losses=2).load(document)


def test_a_job_of_several_stages_a_worker() -> None:
    of = JobShape(
        group_stages=[[0, 2], [1, 3]],
        origins=2,
        microbatches=3,
        split=True,
        costs=Costs(transfer=0.1),
        cap=(4, 3),
    )
    work, step = plan_for(Plans(of, losses=1), [(1, 0)])
    assert problems(work, step) == []
    assert set(step.slots) == {0, 1, 3}
