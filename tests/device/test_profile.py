"""A profile tells how long the device computes, not how long a launch takes, and waits for nothing."""

import contextlib

import pytest
import torch

from swift_ft.device import until_over
from swift_ft.train.profiling import WARM_STEPS, StepProfile
from tests.device.machine import BUSY_S, accelerator, here, hold, no_waits


@pytest.mark.parametrize("slow", ["F", "B", "update"])
def test_the_time_is_the_devices(slow: str) -> None:
    x = torch.ones(8, device=here())
    profile = StepProfile()
    with contextlib.ExitStack() as later, no_waits():
        for number in range(WARM_STEPS + 1):
            last = number == WARM_STEPS
            profile.begin()
            for part in ("F", "B", "update"):
                with contextlib.nullcontext() if part == "update" else profile.computing(0, part):
                    if last and part == slow:
                        begun = accelerator().mark()
                        later.callback(hold())
                        later.callback(
                            until_over, begun
                        )  # called first: the time is the device's from here on
                    x.add_(1)
            profile.end(number, replay=False)
        assert profile.measured({}, None, None) is None, "not read before it has passed"
    accelerator().synchronize()
    with no_waits():
        profile.begin()
        profile.end(0, replay=True)  # read with the end of any later step
    found = profile.measured({}, None, None)
    assert found is not None
    (stage,) = found.stages
    seconds = {"F": stage.forward_s, "B": stage.backward_s, "update": found.update_s}
    assert seconds[slow] >= BUSY_S
    assert max(seconds, key=seconds.__getitem__) == slow
