"""The tests of the device object, of capture, of profiles, of staged gloo and of undo that run on the simulated device
(`tests/device`), on CUDA. In this process: nothing of them changes torch."""

import pytest
import torch

from tests.device import test_accelerator, test_capture, test_profile, test_staging, test_undo

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: what is here stays unproven"
)

for _module in (test_accelerator, test_capture, test_profile, test_staging, test_undo):
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})
