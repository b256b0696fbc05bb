"""Steps that a loss cuts short, wherever it does: those that are left end bit for bit alike, and as calculated."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.train import lossy
from swift_ft.train.config import SessionConfig
from tests.unit.runtime.cut_world import LAYERS, NEVER, WIDTH, Job, Rank, Script, loss_of

STEPS, RANKS = 3, 3
OPS = LAYERS + 1
"""Collectives of a step that nothing cuts: the vote is the last one."""
Told = dict[int, dict[int, list[dict[str, Any]]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Step -> rank -> what it tells of its buckets."""
    steps: Told = {}

    def emit(event: str, **fields: Any) -> None:
        if event == "lossy_step":
            steps.setdefault(fields["step"], {})[fields["rank"]] = fields["buckets"]

    monkeypatch.setattr(lossy.events, "emit", emit)
    return steps


def calculated(told: Told, present: list[set[int]], ranks: int) -> list[torch.Tensor]:
    """By plain torch. `present`: who was there in each step that nothing cut."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    for step in range(STEPS):
        everybody = {
            "parameters": range(LAYERS),
            "contributors": sorted(present[step]),
            "divisor": len(present[step]),
        }
        buckets = next(iter(told[step].values())) if step in told else [everybody]
        of_origin = {
            origin: torch.autograd.grad(loss_of(model, step, origin), parameters) for origin in range(ranks)
        }
        for bucket in buckets:
            for number in bucket["parameters"]:
                first, *others = (of_origin[origin][number] for origin in bucket["contributors"])
                total = first.clone()
                for other in others:
                    total.add_(other)
                parameters[number].grad = total / bucket["divisor"]
        optimizer.step()
    return [p.detach() for p in parameters]


def check(job: Job, left: list[Rank], told: Told) -> None:
    """All that are left are alike, tell the same, and have what is calculated from it."""
    assert {rank.version for rank in left} == {STEPS}
    for step, by_rank in told.items():
        first, *others = by_rank.values()
        assert all(other == first for other in others), f"step {step}: ranks tell other things"
        assert sorted(number for bucket in first for number in bucket["parameters"]) == list(range(LAYERS))
        assert all(bucket["divisor"] == len(bucket["contributors"]) for bucket in first)
    lost_since = {}
    targets = [chosen.target_version for chosen in job.plans]
    for script, target in zip(job.scripts, targets, strict=False):
        lost_since[script.victim] = target
    ranks = range(len(job.ranks))
    present = [{rank for rank in ranks if lost_since.get(rank, STEPS) > step} for step in range(STEPS)]
    wanted = calculated(told, present, len(ranks))
    for rank in left:
        for own, right in zip(rank.bits(), wanted, strict=True):
            assert torch.equal(own, right), f"rank {rank.number}"


def cut_in_second_step(gets: dict[int, int], dies_at: int, **more: Any) -> Script:
    return Script(
        victim=1, dies_at=OPS + dies_at, gets={rank: OPS + count for rank, count in gets.items()}, **more
    )


@pytest.mark.parametrize("wait_free", [False, True])
@pytest.mark.parametrize("dies_at", [0, 1, 3, LAYERS, OPS])
def test_wherever_the_results_stop(dies_at: int, wait_free: bool, told: Told) -> None:
    for first, second in itertools.product((0, 2, LAYERS, OPS), repeat=2):
        told.clear()
        script = cut_in_second_step({0: first, 2: second}, dies_at)
        job = Job(RANKS, [script], wait_free=wait_free, steps=STEPS)
        check(job, job.run(), told)


def test_what_one_has_all_get_and_the_rest_is_of_those_that_are_left(told: Told) -> None:
    job = Job(RANKS, [cut_in_second_step({0: 2, 2: 1}, 2)], wait_free=False, steps=STEPS)
    check(job, job.run(), told)
    of_buckets = [tuple(bucket["contributors"]) for bucket in told[1][0]]
    assert of_buckets == [(0, 1, 2)] * 2 + [(0, 2)] * (LAYERS - 2)
    assert [str(each.strategy) for each in job.plans[0].ranks] == ["LOSSY_FORWARD"] * 2


@pytest.mark.parametrize("wait_free", [False, True])
def test_a_step_that_one_is_not_in_is_dropped_by_all(wait_free: bool, told: Told) -> None:
    """Nothing of it can be averaged, and who is in it would only wait."""
    script = Script(victim=1, dies_at=NEVER, idle=frozenset({2}), idle_at=1)
    job = Job(RANKS, [script], wait_free=wait_free, steps=STEPS)
    check(job, job.run(), told)
    assert not told
    assert job.plans[0].target_version == 1


@pytest.mark.parametrize("wait_free", [False, True])
def test_a_second_loss_while_the_rest_is_averaged(wait_free: bool, told: Told) -> None:
    """In the agreement, in what is given, in what is averaged anew, in the vote."""
    for second_dies_at, gets in itertools.product(range(7), (0, 1, 2, 4, NEVER)):
        told.clear()
        scripts = [
            cut_in_second_step({0: 2, 2: 1, 3: 3}, 3),
            Script(victim=2, dies_at=second_dies_at, gets={0: gets}),
        ]
        job = Job(4, scripts, wait_free=wait_free, steps=STEPS)
        left = job.run()
        assert [rank.number for rank in left] == [0, 3]
        check(job, left, told)


@pytest.mark.parametrize("seed", range(8))
def test_cuts_at_random(seed: int, told: Told) -> None:
    draw = random.Random(seed)
    wait_free = bool(seed % 2)
    for _ in range(4):
        told.clear()
        base = OPS * draw.randrange(STEPS)
        gets = {rank: base + draw.randrange(OPS + 2) for rank in (0, 2) if draw.random() < 0.8}
        script = Script(victim=1, dies_at=base + draw.randrange(OPS), gets=gets)
        job = Job(RANKS, [script], wait_free=wait_free, steps=STEPS)
        check(job, job.run(), told)


# --- that the check can fail ---


def test_another_divisor_is_noticed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swift_ft.planner.Assignment.contributions", lambda self, group: RANKS)
    job = Job(RANKS, [cut_in_second_step({0: 2, 2: 1}, 2)], wait_free=False, steps=STEPS)
    left = job.run()
    with pytest.raises(AssertionError):
        check(job, left, told)


def test_an_average_that_is_not_given_is_noticed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody goes on with what it has."""
    given = lossy.given
    monkeypatch.setattr(lossy, "given", lambda held: [])
    job = Job(RANKS, [cut_in_second_step({0: 2, 2: 2}, 2)], wait_free=False, steps=STEPS)
    check(job, job.run(), told)  # nothing is lacking here
    told.clear()

    def anew(held: list[list[int]]) -> list[lossy.Given]:
        gifts = given(held)
        return [lossy.Given(bucket=g.bucket, generation=g.generation, source=1 - g.source) for g in gifts]

    monkeypatch.setattr(lossy, "given", anew)
    job = Job(RANKS, [cut_in_second_step({0: 2, 2: 1}, 2)], wait_free=False, steps=STEPS)
    left = job.run()
    with pytest.raises(AssertionError):
        check(job, left, told)


# --- what is refused ---


def test_steps_that_cannot_be_finished_are_refused() -> None:
    asked = SessionConfig(strategy="lossy-forward", replicas=2, allow_inexact=True, updates="wait_free")
    assert asked.agreed()["lost_shard"] == "drop"
    assert not asked.redistributes
    rank = Job(RANKS, [], wait_free=False, steps=STEPS).ranks[0]
    with pytest.raises(UsageError, match="a train_step that updates twice"):
        rank.cut_step.check_step(2)
    rank.updates.add(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(UsageError, match="several optimizers"):
        rank.cut_step.check(rank.updates.journals)
    other = Job(RANKS, [], wait_free=False, steps=STEPS).ranks[0]
    other.updates.add(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(UsageError, match="LBFGS"):
        other.cut_step.check(other.updates.journals[1:])
