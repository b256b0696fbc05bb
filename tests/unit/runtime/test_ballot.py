"""What a vote says is the greatest of what ranks have said, and the same at all."""

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.train.updates import Outcome, ballot, outcome


def of(*said: torch.Tensor) -> Outcome:
    return outcome(torch.stack(said).amax(0), step=7)


def rank(
    group: int, *, holds: bool = False, lines: bool = False, waits: bool = False, steps: float = 1.0
) -> torch.Tensor:
    return ballot(holds=holds, lines=lines, waits=waits, steps=steps, group=group, groups=2)


def test_what_one_rank_says_holds_for_all() -> None:
    assert of(rank(0), rank(0), rank(1), rank(1)) == Outcome(hold_next=False, lines=False, waits_next=False)
    assert of(rank(0), rank(0, holds=True), rank(1)) == Outcome(hold_next=True, lines=False, waits_next=False)
    assert of(rank(0), rank(1), rank(1, lines=True)) == Outcome(hold_next=False, lines=True, waits_next=False)
    assert of(rank(0), rank(1, waits=True)) == Outcome(hold_next=False, lines=False, waits_next=True)


def test_replicas_step_alike_and_stages_as_they_like() -> None:
    of(rank(0, steps=2.0), rank(0, steps=2.0), rank(1, steps=0.0))
    with pytest.raises(
        UsageError, match="in step 7 optimizers have stepped 2 times on one replica of pipeline rank 1"
    ):
        of(rank(0), rank(1, steps=2.0), rank(1, steps=1.0))
