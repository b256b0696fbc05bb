"""The device object (`swift_ft.device`): copies to the host beside training, the step's one wait, generators.

On the simulated device here, on CUDA by tests/gpu.
"""

import torch

from swift_ft.device import Readings
from swift_ft.state.rng import Randomness
from tests.device.machine import accelerator, held, here, hold, never, no_waits

N = 1 << 14


def numbers() -> torch.Tensor:
    return torch.arange(float(N))


def there() -> torch.Tensor:
    tensor = numbers().to(here())
    for warm in (tensor.add_(0), tensor * 2, torch.zeros(N, device=here()), torch.rand(3, device=here())):
        del warm  # CUDA loads its kernels
    torch.accelerator.synchronize()
    return tensor


def test_a_copy_is_beside_training_and_keeps_its_memory() -> None:
    device = accelerator()
    tensor, side, host = there(), device.new_stream(), device.pinned(N, torch.float32).fill_(-1)
    with held(side):
        with no_waits():
            device.copy_out(host, tensor, side)
        address = tensor.data_ptr()
        del tensor
        assert torch.zeros(N, device=here()).data_ptr() != address
        device.wait(device.mark())  # training is through
        assert host.eq(-1).all()
    device.wait(device.mark(side))
    assert torch.equal(host, numbers())


def test_a_copy_is_behind_training() -> None:
    device = accelerator()
    tensor, side, host = there(), device.new_stream(), device.pinned(N, torch.float32).fill_(-1)
    with no_waits(), held():
        device.copy_out(host, tensor * 2, side)
        copied = device.mark(side)
        never(copied.query)
    device.wait(copied)
    assert torch.equal(host, numbers() * 2)


def test_readings_are_of_the_moment_they_are_asked_for_and_there_at_the_wait() -> None:
    tensor, readings = there(), Readings()
    read: list[torch.Tensor] = []
    release_soon = hold()
    with no_waits():
        for _ in range(3):
            tensor.mul_(2)
            readings.later(tensor, read.append)
        readings.then(lambda: read.append(torch.zeros(1)))
        tensor.fill_(0)
    assert not torch.accelerator.current_stream().query()
    release_soon()
    readings.read()
    assert all(torch.equal(read[turn], numbers() * 2 ** (1 + turn)) for turn in range(3))
    readings.later(tensor, read.append)
    readings.drop()
    with no_waits():
        readings.read()
    assert len(read) == 4


def test_a_microbatch_draws_its_own_numbers_however_far_the_host_is_ahead() -> None:
    there()
    randomness = Randomness(seed=3, dp_rank=0)

    def drawn(*microbatches: int) -> list[torch.Tensor]:
        made = []
        for microbatch in microbatches:
            randomness.forward(0, microbatch)
            made.append(torch.rand(N, device=here()))
        return made

    with no_waits(), held():
        together = drawn(0, 1, 2)
        randomness.outside()
    for microbatch, own in enumerate(together):
        torch.accelerator.synchronize()
        (alone,) = drawn(microbatch)
        assert torch.equal(own.cpu(), alone.cpu())
    assert not torch.equal(together[0].cpu(), together[1].cpu())


KERNEL = """
extern "C" __global__ void scaled(float* tensor, int n, double by) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) tensor[i] *= by;
}
"""


def test_a_compiled_kernel_runs_in_the_current_stream() -> None:
    tensor, kernel = there(), accelerator().compile(KERNEL, "scaled")
    assert kernel is not None
    with held(), no_waits():
        kernel(grid=(4, 1, 1), block=(32, 1, 1), args=[tensor, N, 3.0])
        after = tensor + 1
    assert torch.equal(after.cpu(), numbers() * 3 + 1)
    assert accelerator().compile("no C++", "scaled") is None
