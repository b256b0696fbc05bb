"""What cannot go together with updates='wait_free', in a line each: gradients are applied while backward runs."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from swift.errors import UsageError
from swift.optim.journal import Journal


def check(journals: Iterable[Journal], objects: Mapping[str, Any], *, elsewhere: bool) -> None:
    """(before the run) Raises UsageError. `objects`: what the trainer has registered. `elsewhere`: DDP or FSDP reduces
    gradients."""
    if elsewhere:
        raise UsageError(
            "updates='wait_free' with DistributedDataParallel or FSDP: they reduce by themselves; use "
            "session.pipeline_stage(module) without them, or updates='after_backward'"
        )
    if not all(journal.early for journal in journals):
        raise UsageError(
            "updates='wait_free' with a step pre-hook on the optimizer, which must see all gradients before any "
            "update; use updates='after_backward'"
        )
    if any(isinstance(value, torch.amp.GradScaler) for value in objects.values()):
        raise no_scaler()


def no_scaler() -> UsageError:
    return UsageError(
        "updates='wait_free' with a gradient scaler: gradients are applied before they could be "
        "unscaled; use updates='after_backward'"
    )


def no_tie() -> UsageError:
    return UsageError(
        "session.tie with updates='wait_free': gradients are applied before those of other stages are there; "
        "use updates='after_backward'"
    )


def no_second_backward() -> UsageError:
    return UsageError(
        "a second backward pass in a step with updates='wait_free', whose first one was applied; put all but "
        "the last one in `with session.accumulating():`, or use updates='after_backward'"
    )
