"""What ranks tell each other in the vote over a step: one tensor, of which the greatest value in each place counts.

[0]  the next step is to be held
[1]  a line is written for each step (`session.log`)
[2]  the next step waits for its vote (`swift.runtime.staggering`)
then for each pipeline rank how often optimizers step in this step, and the same negated; -inf of the others
"""

from typing import NamedTuple

import torch

from swift.errors import UsageError


class Outcome(NamedTuple):
    """The same at all ranks."""

    hold_next: bool
    lines: bool
    waits_next: bool


def ballot(*, holds: bool, lines: bool, waits: bool, steps: float, group: int, groups: int) -> torch.Tensor:
    """Of a rank of pipeline rank `group`."""
    votes = torch.full((3 + 2 * groups,), -torch.inf, dtype=torch.float64)
    votes[0], votes[1], votes[2] = float(holds), float(lines), float(waits)
    votes[3 + 2 * group], votes[4 + 2 * group] = steps, -steps
    return votes


def outcome(votes: torch.Tensor, step: int) -> Outcome:
    """Raises UsageError if replicas do not step alike."""
    most, fewest = votes[3::2], -votes[4::2]
    for stage, (high, low) in enumerate(zip(most.tolist(), fewest.tolist(), strict=True)):
        if high != low:
            raise UsageError(
                f"in step {step} optimizers have stepped {high:g} times on one replica of pipeline rank "
                f"{stage} and {low:g} times on another; let all replicas decide alike whether they step, for "
                "instance by dist.all_reduce of what they decide by"
            )
    return Outcome(hold_next=bool(votes[0]), lines=bool(votes[1]), waits_next=bool(votes[2]))
