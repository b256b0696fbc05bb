"""Gradients of origins whose slots are vacant: who has them, in which order they are summed, what is refused."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.planner import Assignment
from swift_ft.state.loaders import OriginLoader
from swift_ft.train.batch_redistribution import Accumulator, Adoption
from swift_ft.train.config import SessionConfig, fitted
from swift_ft.train.reducer import Row, summed_by_origin
from tests.unit.recovery.test_assignment import dropped_origins
from tests.unit.runtime.test_ordered import on_all, values
from tests.unit.runtime.wired import site_of, step_of


@settings(max_examples=40, deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=7),
    numel=st.sampled_from([1, 2, 7, 1023, 5001]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_a_sum_is_taken_in_the_order_of_origins_whoever_has_them(
    owners: list[int], numel: int, dtype: torch.dtype, seed: int
) -> None:
    there = sorted(set(owners))
    origins = [[Row(o) for o, owner in enumerate(owners) if owner == member] for member in there]
    of = values(len(owners), numel, seed, dtype)
    expected = functools.reduce(lambda a, b: a + b, [value.clone() for value in of])
    rows = [torch.stack([of[row.origin] for row in theirs]) for theirs in origins]
    sums: dict[int, torch.Tensor] = {}
    on_all(
        len(there),
        lambda messages, place: sums.update({place: summed_by_origin(messages, rows[place], origins)}),
    )
    assert len(sums) == len(rows)
    assert all(torch.equal(each, expected) for each in sums.values())


@settings(max_examples=60, deadline=None)
@given(
    members=st.integers(1, 4),
    shared=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), max_size=3),
    numel=st.sampled_from([1, 7, 1023]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_an_origin_in_parts_is_summed_as_its_own_rank_would_have_done_it(
    members: int, shared: list[list[int]], numel: int, dtype: torch.dtype, seed: int
) -> None:
    """`shared`: of each origin whose own rank is lost, who computes each of its microbatches."""
    scale = 4
    whole = values(members, numel, seed, dtype)
    parts = [values(scale, numel, seed + 1 + n, dtype) for n in range(len(shared))]
    # Origins in an order in which those that are shared are not the last ones.
    number = [*range(0, 2 * members, 2)]
    whose = [[Row(number[member])] for member in range(members)]
    rows = [[whole[member]] for member in range(members)]
    of_origin = dict(zip(number, (value.clone() for value in whole), strict=True))
    for n, owners in enumerate(shared):
        origin = 2 * n + 1
        for microbatch, owner in enumerate(owners):
            whose[owner % members].append(Row(origin, microbatch))
            rows[owner % members].append(parts[n][microbatch])
        accumulated = parts[n][0].clone()
        for part in parts[n][1:]:
            accumulated += part
        of_origin[origin] = accumulated.div_(scale)
    expected = functools.reduce(lambda a, b: a + b, [of_origin[origin] for origin in sorted(of_origin)])
    flat = [torch.stack(mine) for mine in rows]
    sums: dict[int, torch.Tensor] = {}
    on_all(
        members,
        lambda messages, place: sums.update({place: summed_by_origin(messages, flat[place], whose, scale)}),
    )
    assert len(sums) == len(flat)
    assert all(torch.equal(each, expected) for each in sums.values())


def test_vacant_slots_go_round_those_that_are_left() -> None:
    world = Assignment.grid(5, replicas=5)
    smaller = world.held_by({0: 0, 3: 3}).redistributed()
    assert [smaller.adopted_by(slot) for slot in (0, 3)] == [(1, 4), (2,)]
    assert smaller.contributions(0) == 5
    assert dropped_origins(smaller) == ()
    assert [smaller.owner(0, origin, 7) for origin in range(5)] == [0, 0, 3, 3, 0]
    assert world.redistributed().adopted == {}
    assert smaller.held_by(dict(world.members)).adopted == {}, "who comes back has its own"


# --- loaders ---


class Batches:
    """Numbers that tell whose they are and which."""

    def __init__(self, origin: int) -> None:
        self.origin, self.position = origin, 0

    def next_batch(self) -> tuple[int, int]:
        self.position += 1
        return self.origin, self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_the_loader_of_another_origin_begins_where_its_own_stands() -> None:
    now = [1]
    loader = OriginLoader(Batches, 1, lambda: now[0])
    assert [loader.next_batch(), loader.next_batch()] == [(1, 1), (1, 2)]
    for _ in range(2):  # each time from there: a step that was taken back has not moved it
        loader.begin(0)
        now[0] = 0
        loader.load_state_dict(loader.state_dict())
        assert loader.next_batch() == (0, 3)
        assert loader.state_dict() == {"position": 2}, "its state is its own's"
        now[0] = 1
    loader.load_state_dict({"position": 7})
    assert loader.next_batch() == (1, 8)


def test_what_the_trainer_sets_on_a_loader_is_set_on_those_of_other_origins() -> None:
    now = [1]
    made = {origin: Batches(origin) for origin in range(2)}
    loader: Any = OriginLoader(made.__getitem__, 1, lambda: now[0])
    loader.epoch, loader.position = 3, 5
    assert (made[1].epoch, loader.next_batch()) == (3, (1, 6))  # type: ignore[attr-defined]
    loader.begin(0)
    now[0] = 0
    loader.load_state_dict(loader.state_dict())
    assert (loader.epoch, loader.next_batch()) == (3, (0, 7)), "its state comes behind what was set"
    loader.epoch = 4
    assert (made[0].epoch, made[1].epoch) == (4, 3), "by a step for another origin"  # type: ignore[attr-defined]
    now[0] = 1
    with pytest.raises(AttributeError):
        loader._private  # noqa: B018


class Indexed(Batches):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return self.origin, 10 * index

    def __call__(self, count: int, *, first: int = 0) -> list[tuple[int, int]]:
        return [(self.origin, first + number) for number in range(count)]


def test_a_loader_that_is_called_or_indexed() -> None:
    now = [1]
    loader = OriginLoader(Indexed, 1, lambda: now[0])
    assert (loader[2], loader(2, first=5)) == ((1, 20), [(1, 5), (1, 6)])
    loader.begin(0)
    now[0] = 0
    assert (loader[2], loader(1)) == ((0, 20), [(0, 0)])
    with pytest.raises(TypeError, match="not callable"):
        OriginLoader(Batches, 1, lambda: 1)()


def test_a_loader_that_cannot_be_taken_back_is_refused() -> None:
    with pytest.raises(UsageError, match=r"session\.loader was given what makes a list without state_dict"):
        OriginLoader(lambda origin: [origin], 0, lambda: 0)


# --- what is refused ---


def adoption_of(**updates: Any) -> tuple[Adoption, Any]:
    vacant = Assignment.grid(2, replicas=2).held_by({0: 0}).redistributed()
    said: list[str] = []
    nothing: Any = None
    state: Any = SimpleNamespace(updates=SimpleNamespace(**updates))

    def differs(_step: int, words: str) -> None:
        said.append(words)

    groups: Any = {"data": nothing, "pipeline": SimpleNamespace()}
    config = SessionConfig(replicas=2, strategy="shrink")
    site = site_of(0, config, member=SimpleNamespace(say_differs=differs), state=state)
    adoption = Adoption(site, lambda: vacant, groups, nothing)
    return adoption, said


@pytest.mark.parametrize(
    ("updates", "words"),
    [
        ({"optimizers": [1, 2], "journals": []}, "with several optimizers"),
        ({"optimizers": [1], "journals": [SimpleNamespace(whole=True)]}, r"\(LBFGS\)"),
    ],
)
def test_a_trainer_whose_steps_cannot_be_carried_out_for_another_is_refused(
    updates: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        adoption_of(**updates)[0].check()


def test_a_step_that_updates_twice_is_refused() -> None:
    adoption_of(stepped=1)[0].end_step(step_of())
    with pytest.raises(UsageError, match="updates twice"):
        adoption_of(stepped=2)[0].end_step(step_of())


def test_a_collective_without_those_that_are_lost_is_named_once() -> None:
    adoption, said = adoption_of()
    adoption.communicated(3, of_pipeline=False)
    adoption.communicated(4, of_pipeline=False)
    assert said == ["a collective of train_step lacked the part of a rank that was lost"]
    adoption.under_way = True
    with pytest.raises(UsageError, match="communicates before its gradients are reduced"):
        adoption.communicated(5, of_pipeline=False)


def test_auto_goes_on_without_a_rank_where_shrink_could() -> None:
    config = SessionConfig(replicas=2, lost_shard="redistribute")
    assert (config.shrinks, config.redistributes, config.drops) == (True, True, False)
    assert config.agreed()["lost_shard"] == "redistribute"
    assert not SessionConfig(replicas=2).shrinks


def test_auto_reroutes_if_it_is_told_so() -> None:
    config = SessionConfig(replicas=2, lost_shard="reroute", adaptive_memory=2.0)
    assert (config.shrinks, config.redistributes, config.reroutes) == (True, True, True)
    assert config.agreed()["lost_shard"] == "reroute"
    assert "lost_shard='reroute' with it; use lost_shard='redistribute'" in str(config.not_shared("with it"))
    assert "; wait" in str(config.not_shared("with it", "wait"))
    assert not SessionConfig(replicas=2, lost_shard="redistribute").reroutes


def test_of_two_the_sum_has_one_order() -> None:
    assert SessionConfig(strategy="shrink", replicas=2, reduction="fast").redistributes
    dropping = SessionConfig(strategy="shrink", replicas=2, lost_shard="drop", allow_inexact=True)
    assert not dropping.redistributes
    assert dropping.agreed()["lost_shard"] == "drop"
    assert SessionConfig(strategy="rollback", replicas=2).redistributes
    assert "lost_shard" not in SessionConfig(replicas=2).agreed(), "of no job that does not shrink"


@pytest.mark.parametrize(("world_size", "lost_shard"), [(4, "reroute"), (2, "redistribute")])
def test_the_number_of_ranks_decides_what_is_quickest(world_size: int, lost_shard: str) -> None:
    config, _ = fitted(SessionConfig(replicas=2, lost_shard="quickest"), world_size)
    assert config.agreed()["lost_shard"] == lost_shard
    assert config.reroutes == (lost_shard == "reroute")


# -- microbatches that come mixed and out of order -----------------------------------------------------


OWN, OTHER = 0, 1


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))


def backward(module: nn.Module, origin: int, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(100 * origin + microbatch)
    scale = 10.0 ** (microbatch % 5 - 2)  # sums in another order have other bits
    layer = module[2] if microbatch % 3 == 2 else module  # some use not all parameters
    (layer(torch.randn(5, 7, generator=generator)) * scale).square().mean().backward()


def by_itself(origin: int, microbatches: list[int]) -> list[torch.Tensor | None]:
    module = model()
    for microbatch in microbatches:
        backward(module, origin, microbatch)
    return gradients(module)


def same(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )


@settings(max_examples=80, deadline=None)
@given(st.permutations([(origin, mb) for origin in (OWN, OTHER) for mb in range(5)]))
def test_whatever_order_they_come_in(order: list[tuple[int, int]]) -> None:
    module = model()
    accumulators = {
        origin: Accumulator(module.parameters(), range(5), own=origin == OWN) for origin in (OWN, OTHER)
    }
    for origin, microbatch in order:
        with accumulators[origin].adding(microbatch):
            backward(module, origin, microbatch)
    assert same(gradients(module), by_itself(OWN, list(range(5))))
    theirs = [accumulators[OTHER].gradients.get(p) for p in module.parameters()]
    assert same(theirs, by_itself(OTHER, list(range(5))))


def test_the_order_matters() -> None:
    """Else the test above could not fail."""
    assert not same(by_itself(OWN, [0, 1, 2, 3, 4]), by_itself(OWN, [4, 3, 2, 1, 0]))
