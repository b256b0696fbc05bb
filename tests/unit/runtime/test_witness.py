"""What a step took in and gave is remembered, and compared when it is done again."""

import copy
import pickle

import torch
from torch import nn

from swift.runtime.witness import (
    INPUT,
    LOSS,
    RESULT,
    SAMPLED_BYTES,
    TARGET,
    Witness,
    digest_of,
    watch_forwards,
)
from tests.unit.runtime.wired import ignored


class Said:
    def __init__(self) -> None:
        self.words: list[tuple[int, str]] = []
        self.broken = False
        self.witness = Witness(
            lambda step, words: self.words.append((step, words)), lambda: self.broken, ignored
        )


def test_a_step_done_again_is_compared_once_and_named() -> None:
    said = Said()
    for step, values in ((3, (1.0, 2.0)), (4, (3.0, 4.0)), (3, (1.0, 2.0)), (4, (3.0, 5.0)), (4, (0.0, 0.0))):
        said.witness.begin(step)
        for microbatch, value in enumerate(values):
            said.witness.saw(INPUT, 0, microbatch, 0, torch.tensor(value))
    [(step, words)] = said.words
    assert step == 4
    assert words.startswith(
        "external input 0 of stage 0, microbatch 1, of step 4 differs from the first time"
    )
    assert "session.register(loader=...)" in words


def test_what_was_cut_short_is_compared_as_far_as_it_went() -> None:
    said = Said()
    said.witness.begin(5)
    said.witness.saw(TARGET, 1, 0, 0, torch.ones(2))
    said.broken = True  # what comes now was computed from a broken message
    said.witness.saw(LOSS, 1, 0, 0, torch.tensor(float("nan")))
    said.broken = False
    said.witness.begin(5)
    said.witness.saw(TARGET, 1, 0, 0, torch.ones(2))
    said.witness.saw(LOSS, 1, 0, 0, torch.tensor(0.5))
    said.witness.saw(RESULT, 0, 0, 0, torch.tensor(0.5))
    assert said.words == []


def test_what_is_never_done_again_is_forgotten_and_so_is_what_may_differ() -> None:
    said = Said()
    for step in range(4):
        said.witness.begin(step)
        said.witness.saw(LOSS, 0, 0, 0, torch.tensor(float(step)))
    said.witness.forget_below(2)
    said.witness.begin(1)
    said.witness.saw(LOSS, 0, 0, 0, torch.tensor(9.0))
    said.witness.forget()
    said.witness.begin(3)
    said.witness.saw(LOSS, 0, 0, 0, torch.tensor(9.0))
    assert said.words == []


def test_every_bit_type_and_shape_counts_and_of_large_tensors_a_sample() -> None:
    large = torch.zeros(SAMPLED_BYTES)  # four times as many bytes
    other = large.clone()
    other[-4] = 1.0
    values = [
        torch.zeros(2),
        torch.tensor([0.0, -0.0]),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, 1),
        torch.zeros(0),
        torch.zeros(4).to_sparse(),
        large,
        other,
    ]
    assert len({digest_of(value) for value in values}) == len(values)
    assert digest_of(torch.zeros(3, 2).t()) == digest_of(torch.zeros(2, 3))


def test_forwards_of_a_whole_module_are_seen_unless_they_only_look() -> None:
    said = Said()
    module = nn.Linear(2, 2)
    watch_forwards(module, said)
    for scale in (1.0, 2.0):
        said.witness.begin(0)
        module(torch.ones(1, 2))
        with torch.no_grad():
            module(scale * torch.ones(1, 2))
    assert said.words == []
    said.witness.begin(0)
    module(torch.zeros(1, 2))
    assert said.words[0][1].startswith("external input 0 of stage 0, microbatch 0, of step 0 differs")


def test_a_module_that_is_watched_can_be_copied_and_pickled() -> None:
    said = Said()
    module = nn.Linear(2, 2)
    watch_forwards(module, said)
    said.witness.begin(0)
    module(torch.ones(1, 2))
    said.witness.begin(0)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        assert torch.equal(twin(torch.zeros(1, 2)), module.bias.unsqueeze(0))
    assert said.words == []
