"""`tests.integration.group_members` with tensors on the simulated device, over the fake NCCL."""

import os

import torch

from swift_ft.comm import NCCL_ENVIRONMENT
from swift_ft.comm.nccl import NcclBackend
from tests.device import simulated
from tests.device.fake_nccl import FakeNccl
from tests.integration.group_members import serve

if __name__ == "__main__":
    simulated.load()
    os.environ.update(NCCL_ENVIRONMENT)
    torch.zeros(1, device=simulated.NAME)  # a rank that uses no device has no communicators
    serve(NcclBackend(tuple, FakeNccl()), simulated.NAME)
