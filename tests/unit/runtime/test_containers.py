"""Lists, dicts and deques that are registered as they are: what the script holds by another name goes back as well."""

import copy
from collections import deque
from typing import Any

import numpy as np
import torch

from swift.checkpoint.state import join, split
from swift.runtime.rng import as_registered


def through_a_checkpoint(registered: Any) -> Any:
    tensors, skeleton = split(registered.state_dict())
    return join(skeleton, {name: tensor.clone() for name, tensor in tensors.items()})


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
    assert start is stats["ema"][1]
    assert past is stats["past"]
    assert list(past) == [1]
    assert past.maxlen == 3
    assert stats["bank"].tolist() == [0, 0]
    assert "new" not in stats


def test_another_process_has_it_under_every_name() -> None:
    stats, other = make(), make()
    best, pairs, start, bank = other["best"], list(other["ema"]), other["ema"][1], other["bank"]
    first, second = as_registered(stats), as_registered(other)
    change(stats)
    second.load_state_dict(through_a_checkpoint(first))
    assert best is other["best"]
    assert best == {"value": 8.0}
    assert pairs[0] is other["ema"][0]
    assert pairs[0].tolist() == [1, 1]
    assert other["ema"][1].tolist() == [1, 1, 1]
    assert start.tolist() == [0, 0, 0], "a step has put another tensor in its place"
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
