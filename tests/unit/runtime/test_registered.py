"""What a trainer registers: generators; lists, dicts and deques as they are, of which what the script holds by another
name goes back as well."""

import copy
import json
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch

from swift_ft.errors import ServiceError
from swift_ft.state.rng import digest_of_states
from swift_ft.state.tree import join, split
from swift_ft.train.training_state import as_registered, load_object


def through_a_checkpoint(registered: Any) -> Any:
    tensors, skeleton = split(registered.state_dict())
    return join(json.loads(json.dumps(skeleton)), {name: tensor.clone() for name, tensor in tensors.items()})


def make() -> dict[str, Any]:
    return {
        "best": {"value": 9.0},
        "ema": [torch.zeros(2), torch.zeros(3)],
        "past": deque([1], 3),
        "bank": np.zeros(2),
    }


def change(stats: dict[str, Any]) -> None:
    stats["best"]["value"] -= 1
    stats["ema"][0].add_(1)
    stats["ema"][1] = stats["ema"][1] + 1  # another tensor from here on
    stats["past"].append(2)
    stats["bank"] += 1
    stats["new"] = [1]


def test_a_dropped_step_is_taken_back_under_every_name() -> None:
    stats = make()
    best, pairs, start, past = (
        stats["best"],
        list(zip("ab", stats["ema"], strict=True)),
        stats["ema"][1],
        stats["past"],
    )
    registered = as_registered(stats)
    before = copy.deepcopy(registered.state_dict())
    change(stats)
    registered.load_state_dict(before)
    assert best is stats["best"]
    assert best == {"value": 9.0}
    assert pairs[0][1] is stats["ema"][0]
    assert pairs[0][1].tolist() == [0, 0]
    assert stats["ema"][1].tolist() == start.tolist() == [0, 0, 0]
    assert past is stats["past"]
    assert list(past) == [1]
    assert past.maxlen == 3
    assert stats["bank"].tolist() == [0, 0]
    assert "new" not in stats


def test_another_process_has_it_under_every_name() -> None:
    stats, other = make(), make()
    best, pairs, bank = other["best"], list(other["ema"]), other["bank"]
    first, second = as_registered(stats), as_registered(other)
    change(stats)
    second.load_state_dict(through_a_checkpoint(first))
    assert best is other["best"]
    assert best == {"value": 8.0}
    assert pairs[0] is other["ema"][0]
    assert pairs[0].tolist() == [1, 1]
    assert other["ema"][1].tolist() == [1, 1, 1]
    assert bank.tolist() == [1, 1]
    assert other["new"] == [1]


def test_a_list_that_holds_one_thing_twice_keeps_two_values() -> None:
    item = torch.zeros(1)
    items = [item, item]
    registered = as_registered(items)
    items[1] = torch.ones(1)
    saved = copy.deepcopy(registered.state_dict())
    registered.load_state_dict(saved)
    assert [value.item() for value in items] == [0, 1]


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda g: torch.rand((), generator=g).item()),
        (random.Random(3), lambda g: g.random()),
        (np.random.RandomState(3), lambda g: float(g.rand())),
        (np.random.default_rng(3), lambda g: float(g.random())),
        (np.random.Generator(np.random.Philox(3)), lambda g: float(g.random())),
    ],
    ids=["torch", "random", "RandomState", "default_rng", "Philox"],
)
def test_a_generator_of_ones_own_can_be_registered(generator: Any, draw: Any) -> None:
    registered = as_registered(generator)
    draw(generator)
    saved = through_a_checkpoint(registered)
    first = [draw(generator) for _ in range(3)]
    registered.load_state_dict(saved)
    assert [draw(generator) for _ in range(3)] == first


def test_what_has_a_state_is_registered_itself() -> None:
    class Scheduler:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    for thing in (Scheduler(), OrderedDict(), (1,), {1}):
        assert as_registered(thing) is thing


class Draws:
    """An object that draws while it loads."""

    drawn: tuple[float, ...] = ()

    def load_state_dict(self, state: int) -> None:
        self.drawn = random.random(), float(np.random.rand()), torch.rand(()).item()
        if state < 0:
            raise KeyError("place")


def test_what_an_object_draws_while_it_loads_is_the_same_everywhere_and_leaves_no_trace() -> None:
    one, other = Draws(), Draws()
    random.seed(1)
    load_object("x", one, 0)
    np.random.seed(7)
    torch.manual_seed(7)
    before = digest_of_states()
    load_object("x", other, 0)
    assert one.drawn == other.drawn
    assert digest_of_states() == before


def test_an_object_that_cannot_load_is_named_and_generators_come_back() -> None:
    before = digest_of_states()
    with pytest.raises(
        ServiceError, match=r"register\(loader=...\) cannot load its state: KeyError: 'place'"
    ):
        load_object("loader", Draws(), -1)
    assert digest_of_states() == before
