"""Messages and collectives of a device's tensors over gloo (`swift_ft.comm.staging`): two members, both in this
process, over real sockets.

On the simulated device here, on CUDA by tests/gpu.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
import torch

from swift_ft.comm.backend import Collectives
from swift_ft.comm.gloo import GlooBackend
from swift_ft.comm.message_collectives import operation
from swift_ft.comm.worker_thread import Broken
from tests.device.machine import connected, held, here, never, no_waits
from tests.patience import eventually

N = 1 << 14
PATIENCE_S = 20.0
SUM = operation(None)


def numbers(first: int = 0) -> torch.Tensor:
    return torch.arange(float(N)) + first


def there(first: int = 0, index: int = 0) -> torch.Tensor:
    tensor = numbers(first).to(here(index))
    for warm in (tensor.add_(0), tensor * 2, torch.zeros(N, device=tensor.device)):  # CUDA loads its kernels
        del warm
    torch.accelerator.synchronize()
    return tensor


class Pair:
    """Two members of one group."""

    def __init__(self) -> None:
        self.fabrics = [GlooBackend().open() for _ in range(2)]
        self.first, self.second = connected(self.fabrics)

    def all_reduce(self, tensors: list[torch.Tensor]) -> None:
        tasks = [
            circuit.submit(lambda collectives, own=own: collectives.all_reduce(own, SUM))  # type: ignore[misc]
            for circuit, own in zip((self.first, self.second), tensors, strict=True)
        ]
        for task in tasks:
            eventually(lambda task=task: task.done, PATIENCE_S)  # type: ignore[misc]
            task.wait()


@contextlib.contextmanager
def pair() -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        made = Pair()
        try:
            yield made
        finally:
            for fabric in made.fabrics:
                fabric.abort()
            for fabric in made.fabrics:
                fabric.close()


def test_a_message_leaves_when_the_device_has_its_bytes_and_not_before() -> None:
    with pair() as p:
        tensor, room, arrived = there(), there(), threading.Event()
        with held():
            with no_waits():
                sent = p.first.send([tensor * 2], 1, 7)
                message = p.second._wire.recv([room], 0, 7)
            waiting = threading.Thread(target=lambda: (message.wait(), arrived.set()))  # type: ignore[func-returns-value]
            waiting.start()
            never(arrived.is_set)
        assert arrived.wait(PATIENCE_S)
        with no_waits(), held():
            room.fill_(-1)
            message.finish()  # behind what its caller has queued
            room.add_(1)
        sent.wait()
        assert torch.equal(room.cpu(), numbers() * 2 + 1)


def test_what_is_sent_may_be_freed_and_overwritten() -> None:
    with pair() as p:
        room = there()
        got, sent = p.second.recv([room], 0, 0), p.first.send([room.clone()], 1, 0)
        got.wait(), sent.wait()  # now there is the wire's stream
        for tag in (1, 2):
            tensor = there(tag)
            with held(p.first._wire._side):  # type: ignore[attr-defined]
                sent = p.first.send([tensor], 1, tag)
                address = tensor.data_ptr()
                del tensor
                again = torch.zeros(N, device=here())
                assert again.data_ptr() != address
                torch.accelerator.current_stream().synchronize()  # it does not wait for the copy
            p.second.recv([room], 0, tag).wait()
            sent.wait()
            assert torch.equal(room.cpu(), numbers(tag))


def test_a_sum_is_behind_what_its_caller_has_queued_and_before_what_it_queues() -> None:
    with pair() as p:
        tensors = [there(place) for place in range(2)]
        with held():
            doubled = [tensor * 2 for tensor in tensors]
            tasks = [
                circuit.submit(lambda collectives, own=own: collectives.all_reduce(own, SUM))  # type: ignore[misc]
                for circuit, own in zip((p.first, p.second), doubled, strict=True)
            ]
            never(lambda: any(task.done for task in tasks))
        for task, own in zip(tasks, doubled, strict=True):
            task.wait()
            own.add_(1)
        for own in doubled:
            assert torch.equal(own.cpu(), (numbers() + numbers(1)) * 2 + 1)


def test_a_runner_works_on_the_device_of_its_caller_and_on_a_stream_of_its_own() -> None:
    index = torch.accelerator.device_count() - 1
    with torch.accelerator.device_index(index):
        default, seen = torch.accelerator.current_stream(), list[tuple[int, bool]]()

        def look(_: Collectives) -> None:
            stream = torch.accelerator.current_stream()
            seen.append((torch.accelerator.current_device_index(), stream in (default, trainers)))

        trainers = torch.Stream(device=here(index))
        with pair() as p, trainers:
            tensors = [there(place, index) for place in range(2)]
            p.first.submit(look).wait()
            with held(default):  # it is the one of whoever has not said which is his
                p.all_reduce(tensors)
            for own in tensors:
                assert torch.equal(own.cpu(), numbers() + numbers(1))
            assert seen == [(index, False)]


def test_what_an_aborted_collective_still_writes_to_is_nobody_elses() -> None:
    """Its caller is freed at once, closes the generation and drops the tensor, when kernels of the runner's stream have
    yet to write to it."""
    with pair() as p, contextlib.ExitStack() as until:
        tensor, far, freed = there(), threading.Event(), threading.Event()

        def run(collectives: Collectives, own: torch.Tensor) -> None:
            until.enter_context(held())
            own.add_(1)
            far.set()
            try:
                collectives.barrier()  # the other member does not come
            finally:
                freed.wait(PATIENCE_S)

        task = p.first.submit(lambda collectives, own=tensor: run(collectives, own))  # type: ignore[misc]
        assert far.wait(PATIENCE_S)
        stream, thread = p.first._stream, p.first._runner._thread
        p.fabrics[0].abort()
        with pytest.raises(Broken):
            task.wait()
        freed.set()
        p.fabrics[0].close()
        address = tensor.data_ptr()
        del tensor, task, p.first
        never(lambda: not thread.is_alive())
        gc.collect()
        again = torch.zeros(N, device=here())
        assert again.data_ptr() != address
        torch.accelerator.current_stream().synchronize()
        until.close()
        stream.synchronize()
        assert again.eq(0).all()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
