"""What stands for a value in a record."""

import random

import numpy as np
import pytest
import torch

from swift.determinism.recorder import settings, text_of
from swift.runtime.rng import digests_of_states
from swift.runtime.witness import SAMPLED_BYTES


@pytest.mark.parametrize("place", [0, 1, 12345, -1])
def test_every_bit_of_a_large_tensor_counts(place: int) -> None:
    """Also one that a sample leaves out."""
    one = torch.zeros(SAMPLED_BYTES)
    other = one.clone()
    other.view(torch.int32)[place] ^= 1
    assert text_of(one) == text_of(one.clone())
    assert text_of(one) != text_of(other)


def test_type_shape_and_sign_of_zero_count() -> None:
    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), -torch.zeros(4)]
    assert len({text_of(value) for value in values}) == len(values)


def test_what_holds_tensors() -> None:
    one = {"a": [torch.zeros(2), 1], "b": None}
    assert text_of(one) == text_of({"a": [torch.zeros(2), 1], "b": None})
    assert text_of(one) != text_of({"a": [torch.ones(2), 1], "b": None})
    assert text_of(one) != text_of({"a": [torch.zeros(2), 2], "b": None})


def test_numbers_and_strings_are_as_they_are() -> None:
    assert [text_of(value) for value in (0.1, 3, "on", None, (0.9, 0.999))] == [
        "0.1",
        "3",
        "'on'",
        "None",
        "(0.9, 0.999)",
    ]


def test_an_object_that_cannot_be_taken_apart_counts_by_its_type() -> None:
    assert text_of({"a": object()}) == text_of({"a": object()}) == "dict"


def test_a_draw_changes_the_state_of_its_generator_alone() -> None:
    draws = {"torch": lambda: torch.rand(1), "random": random.random, "numpy": np.random.rand}
    for name, draw in draws.items():
        before = digests_of_states()
        assert digests_of_states() == before
        draw()
        after = digests_of_states()
        assert {word for word in after if after[word] != before[word]} == {name}


def test_the_number_of_threads_is_a_setting() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert settings()["threads"] == str(before + 1)
    finally:
        torch.set_num_threads(before)
