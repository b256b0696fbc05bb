"""The tests of `tests/device` that are not of the simulated device itself: on CUDA, or on the accelerator that is here.
In this process: nothing of them changes torch."""

import pytest
import torch

from tests.device import (
    test_accelerator,
    test_capture,
    test_profile,
    test_pulse,
    test_staging,
    test_training,
    test_undo,
)

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="no accelerator: what is here stays unproven"
)

OF_THE_SIMULATED = {
    "test_a_device_that_has_failed_meanwhile_is_named",  # it ends its process
    "test_fsdp2_trains_on_its_side_streams",  # makes a process group
}

MODULES = (
    *(test_accelerator, test_capture, test_profile, test_pulse),
    *(test_staging, test_training, test_undo),
)
for _module in MODULES:
    globals().update(
        {
            name: test
            for name, test in vars(_module).items()
            if name.startswith("test_") and name not in OF_THE_SIMULATED
        }
    )
