"""A loss that is not finite: said once where it begins, or the end of the job (`SessionConfig.non_finite_loss`).

Looked at are what a schedule's loss function gives, single numbers that a whole module's forward returns, and what a
trainer hands to `Session.check_loss`. It costs some microseconds a loss.
"""

import math
import sys
from contextlib import suppress
from typing import Protocol

import torch

from swift import events
from swift.errors import NonFiniteLoss

_ELEMENTS_MAX = 1 << 16
"""A loss of each token, say, is looked at up to so many."""


class Replays(Protocol):
    """The channel."""

    @property
    def replaying(self) -> bool: ...


class Losses:
    """One rank's. Trainer's thread only."""

    def __init__(self, rank: int, choice: str, channel: Replays) -> None:
        self._rank = rank
        self._choice = choice
        self._channel = channel
        self._bad_in = -2
        """The last step that had one."""

    def look(self, step: int, what: str, loss: torch.Tensor) -> None:
        """Raises NonFiniteLoss if the trainer chose that."""
        if self._choice == "ignore" or self._channel.replaying or not _has_numbers(loss):
            return
        worst = _worst(loss.detach())
        if math.isfinite(worst):
            return
        # It stays so, as a rule: it is said where it begins.
        begins, self._bad_in = step > self._bad_in + 1, max(step, self._bad_in)
        words = f"{what} of step {step} is {worst}"
        if begins:
            events.emit("non_finite_loss", rank=self._rank, step=step, what=what, value=str(worst))
        if self._choice == "fail":
            raise NonFiniteLoss(f"{words}: checkpoints up to version {step} are of before it")
        if begins:
            with suppress(OSError, ValueError):
                print(
                    f"swift: rank {self._rank}: {words}; training goes on (non_finite_loss='fail' ends the job)",
                    file=sys.stderr,
                    flush=True,
                )


def _has_numbers(loss: torch.Tensor) -> bool:
    ordinary = type(loss) is torch.Tensor and loss.device.type != "meta"
    return ordinary and loss.is_floating_point() and 0 < loss.numel() <= _ELEMENTS_MAX


def _worst(loss: torch.Tensor) -> float:
    """The first element that is not finite; else any."""
    if loss.numel() == 1:
        return float(loss)
    flat = loss.reshape(-1)
    return float(flat[torch.isfinite(flat).to(torch.uint8).argmin()])
