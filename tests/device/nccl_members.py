"""`tests.integration.group_members` with tensors on the simulated device, over the fake NCCL."""

from swift_ft.comm.nccl import NcclBackend
from tests.device import simulated
from tests.device.fake_nccl import FakeNccl
from tests.integration.group_members import serve

if __name__ == "__main__":
    simulated.load()
    serve(NcclBackend(tuple, FakeNccl()), simulated.NAME)
