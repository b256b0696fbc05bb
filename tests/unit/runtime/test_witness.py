"""What a step took in and gave is remembered, and compared when it is done again."""

import pytest
import torch
from torch import nn

from swift_ft.train.step_digests import SAMPLED_BYTES, Witness, digest_of, watch_forwards
from swift_ft.train.transcript import (
    ENTERS,
    GIVEN,
    GRADIENT,
    INPUT,
    LEAVES,
    LOSS,
    RESULT,
    SENT,
    STATE,
    TARGET,
    Seen,
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
    watch_forwards(module, lambda: said.witness)
    for scale in (1.0, 2.0):
        said.witness.begin(0)
        module(torch.ones(1, 2))
        with torch.no_grad():
            module(scale * torch.ones(1, 2))
    assert said.words == []
    said.witness.begin(0)
    module(torch.zeros(1, 2))
    assert said.words[0][1].startswith("external input 0 of stage 0, microbatch 0, of step 0 differs")


class Rehearsing(Said):
    """Has the transcript of step 3, as the rank has recorded it: an input, a state, what a module gave, a loss."""

    SEEN = (
        Seen(STATE, 0, 0, 0, "optimizer 0.step"),
        Seen(INPUT, 0, 0, 0),
        Seen(LEAVES, 0, 0, 0, "layers.1"),
        Seen(LOSS, 0, 0, 0),
    )

    def __init__(self) -> None:
        super().__init__()
        rank = Said().witness
        rank.begin(3)
        for seen in self.SEEN:
            rank.note(seen, b"as it was")
        self.transcript = rank.transcript()
        self.witness.expect(3, self.transcript)
        self.witness.begin(3)

    def does(self, *seen: Seen, other: tuple[Seen, ...] = ()) -> str:
        """What is said, of a step that comes to these."""
        for each in seen:
            self.witness.note(each, b"another" if each in other else b"as it was")
        self.witness.check_all_seen()
        return self.words[0][1] if self.words else ""


def test_a_transcript_is_in_the_order_of_the_computation() -> None:
    rehearsal = Rehearsing()
    assert tuple(rehearsal.transcript) == Rehearsing.SEEN
    assert rehearsal.does(*Rehearsing.SEEN) == ""
    assert tuple(rehearsal.witness.transcript()) == Rehearsing.SEEN


def test_the_first_difference_is_named_and_not_its_consequences() -> None:
    rehearsal = Rehearsing()
    words = rehearsal.does(*Rehearsing.SEEN, other=Rehearsing.SEEN[2:])
    assert words.startswith(
        "output 0 of module layers.1 for equal inputs, in its forward 0, of step 3 differs from the first time: the "
        "module keeps something that is not captured"
    )
    assert len(rehearsal.words) == 1


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (Seen(STATE, 0, 0, 0, "parameter 0.weight"), "parameter 0.weight of step 3 differs"),
        (Seen(ENTERS, 0, 2, 1, "norm"), "input 1 of module norm in its forward 2 of step 3 differs"),
        (Seen(SENT, 1, 2, 0), "what stage 1 sends, microbatch 2, of step 3 differs"),
        (Seen(GIVEN, 0, 4, 0, "data"), "what is given to collective 4 of group data of step 3 differs"),
        (Seen(GRADIENT, 0, 0, 0, "0.weight"), "the gradient of parameter 0.weight of step 3 differs"),
        (Seen(RESULT, 0, 0, 2), "the result of collective 2 of step 3 differs"),
    ],
)
def test_each_kind_has_its_words(seen: Seen, words: str) -> None:
    said = Said()
    said.witness.expect(3, {seen: b"as it was"})
    said.witness.begin(3)
    said.witness.note(seen, b"another")
    assert said.words[0][1].startswith(words)


def test_what_was_there_and_is_not_now_is_named() -> None:
    rehearsal = Rehearsing()
    state, first, _, loss = Rehearsing.SEEN
    assert rehearsal.does(state, first, loss) == (
        "output 0 of module layers.1 for equal inputs, in its forward 0, of step 3 was there the first time, and is "
        "not now"
    )


def test_what_was_not_there_is_named() -> None:
    rehearsal = Rehearsing()
    again = Seen(LEAVES, 0, 1, 0, "layers.1")
    words = rehearsal.does(*Rehearsing.SEEN, again)
    assert words.endswith("in its forward 1, of step 3 was not there the first time")


def test_a_step_that_was_dropped_in_a_rehearsal_is_expected_as_a_whole_again() -> None:
    rehearsal = Rehearsing()
    rehearsal.witness.note(Rehearsing.SEEN[0], b"as it was")
    rehearsal.witness.begin(3)
    words = rehearsal.does(*Rehearsing.SEEN[1:])
    assert words.startswith("optimizer 0.step of step 3 was there the first time")


def test_nothing_is_said_once_it_is_quiet() -> None:
    rehearsal = Rehearsing()
    rehearsal.witness.quiet = True
    assert rehearsal.does(Rehearsing.SEEN[3], other=Rehearsing.SEEN) == ""


def test_whoever_cuts_a_step_short_is_asked_before_each_thing() -> None:
    rehearsal = Rehearsing()
    passed: list[Seen] = []
    rehearsal.witness.passing = passed.append
    rehearsal.does(*Rehearsing.SEEN)
    assert tuple(passed) == Rehearsing.SEEN


def test_what_is_counted_is_counted_anew_in_each_step() -> None:
    witness = Said().witness
    witness.begin(3)
    assert [witness.count(ENTERS, "a"), witness.count(LEAVES, "a"), witness.count(ENTERS, "a")] == [0, 0, 1]
    witness.begin(4)
    assert witness.count(ENTERS, "a") == 0


def test_a_sample_is_taken_unless_all_is_wanted() -> None:
    large = torch.zeros(SAMPLED_BYTES)
    other = large.clone()
    other[-3] = 1.0
    assert digest_of(large) == digest_of(other)
    assert digest_of(large, whole=True) != digest_of(other, whole=True)
