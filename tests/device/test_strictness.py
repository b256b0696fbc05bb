"""Each rule of the simulated device, broken once: what CUDA forbids or leaves to chance is refused, or gives wrong bits
every time. And the right way works. (Each test in a process of its own: conftest.py.)"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.device import simulated
from tests.device.simulated import engine_view, held, no_waits, waits

DEVICE = "simulated"
N = 1000
accelerator = torch.accelerator


def pinned(value: float = -1.0) -> torch.Tensor:
    return torch.full((N,), value).pin_memory()


def numbers() -> torch.Tensor:
    """On the device, and there already."""
    made = torch.arange(float(N)).to(DEVICE)
    accelerator.synchronize()
    return made


def in_fork(what: Callable[[], object]) -> int:
    """What `os.waitpid` says of a fork that does it: 0, or a signal, or that it has raised."""
    pid = os.fork()
    if pid == 0:
        try:
            what()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


# --- memory ---


def test_the_host_may_not_touch_memory_of_the_device() -> None:
    address = numbers().data_ptr()
    for touch in (lambda: ctypes.string_at(address, 4), lambda: ctypes.memset(address, 0, 4)):
        assert os.WTERMSIG(in_fork(touch)) == signal.SIGSEGV
    with pytest.raises(TypeError):
        numbers().numpy()
    assert numbers().cpu()[7] == 7


def test_fresh_memory_is_poison() -> None:
    assert torch.empty(N, device=DEVICE).isnan().all()
    assert (torch.empty(N, dtype=torch.int64, device=DEVICE) == -1).all()


def copied_while_freed(record: bool, reuse: bool) -> torch.Tensor:
    """What a side stream has copied of a tensor that its owner has freed meanwhile."""
    main, side, host = accelerator.current_stream(), torch.Stream(DEVICE), pinned()
    tensor = numbers()
    with held(side):
        side.wait_stream(main)
        with side:
            host.copy_(tensor, non_blocking=True)
        if record:
            tensor.record_stream(side)
        address = tensor.data_ptr()
        del tensor
        again = torch.zeros(N if reuse else 7 * N, device=DEVICE)
        assert (again.data_ptr() == address) is (reuse and not record)  # at once, unless it is in use
        main.synchronize()
    side.synchronize()
    return host


def test_freed_memory_belongs_to_somebody_else_at_once() -> None:
    assert copied_while_freed(record=False, reuse=True).eq(0).all()
    assert copied_while_freed(record=False, reuse=False).isnan().all()
    assert torch.equal(copied_while_freed(record=True, reuse=True), torch.arange(float(N)))


def test_memory_of_a_side_stream_is_free_for_that_stream_only() -> None:
    """As FSDP2 does it: the stream waits for the last use before it is asked for memory again."""
    main, side, host = accelerator.current_stream(), torch.Stream(DEVICE), pinned()
    with side:
        tensor = torch.ones(N, device=DEVICE)
    main.wait_stream(side)
    with held(main):
        host.copy_(tensor, non_blocking=True)
        used = main.record_event()
        del tensor
        with side:
            side.wait_event(used)
            torch.zeros(N, device=DEVICE)
    accelerator.synchronize()
    assert host.eq(1).all()


def test_more_memory_than_there_is() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(9 << 30, dtype=torch.uint8, device=DEVICE)
    before = accelerator.memory_allocated()
    kept = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    assert accelerator.memory_allocated() - before == kept.nbytes


# --- streams and events ---


def test_kernels_run_behind_the_host() -> None:
    x = numbers()
    with no_waits(), held():
        y = x * 2
        assert engine_view(y).isnan().all()
        assert not accelerator.current_stream().query()
    accelerator.synchronize()
    assert torch.equal(engine_view(y), torch.arange(float(N)) * 2)


def copied_beside(order: bool) -> torch.Tensor:
    x, side, host = numbers(), torch.Stream(DEVICE), pinned()
    with held():
        y = x * 2
        if order:
            side.wait_stream(accelerator.current_stream())
        with side:
            host.copy_(y, non_blocking=True)
        if not order:
            side.synchronize()
    side.synchronize()
    return host


def test_streams_run_in_no_order_but_what_they_are_told() -> None:
    assert copied_beside(order=False).isnan().all()
    assert torch.equal(copied_beside(order=True), torch.arange(float(N)) * 2)


def test_a_stream_that_stands_still_stops_no_other() -> None:
    side, host = torch.Stream(DEVICE), pinned()
    x = numbers()
    with held():
        x.add_(1)
        with side:
            host.copy_(numbers_of_side := torch.ones(N, device=DEVICE), non_blocking=True)
        side.synchronize()
        assert host.eq(1).all()
        del numbers_of_side


def test_bytes_are_there_when_the_event_has_passed_and_not_before() -> None:
    x, host, event = numbers(), pinned(), torch.Event(DEVICE)
    with held():
        host.copy_(x, non_blocking=True)
        event.record()
        assert not event.query()
        assert host.eq(-1).all()
    event.synchronize()
    assert torch.equal(host, torch.arange(float(N)))


def read_while_overwritten(hold: bool) -> torch.Tensor:
    x, side, host, event = numbers(), torch.Stream(DEVICE), pinned(), torch.Event(DEVICE)
    with held(side):
        with side:
            host.copy_(x, non_blocking=True)
            event.record()
        if hold:
            accelerator.current_stream().wait_event(event)
        x.fill_(3)
        if not hold:
            accelerator.current_stream().synchronize()
    accelerator.synchronize()
    return host


def test_what_another_stream_reads_may_not_be_overwritten() -> None:
    assert read_while_overwritten(hold=False).eq(3).all()
    assert torch.equal(read_while_overwritten(hold=True), torch.arange(float(N)))


def test_whoever_waits_for_an_event_waits_for_the_record_before() -> None:
    side, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    side.wait_event(event)  # never recorded: nothing to wait for
    event.record()
    side.wait_event(event)
    with held():
        event.record()
        side.synchronize()
        assert not event.query()


def test_events_keep_time_if_asked_and_belong_to_one_device() -> None:
    first, last = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    first.record()
    with held():
        last.record()
        with pytest.raises(RuntimeError, match="must be completed"):
            first.elapsed_time(last)
    last.synchronize()
    assert first.elapsed_time(last) > 0
    untimed = torch.Event(DEVICE)
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing"):
        first.elapsed_time(untimed)
    with pytest.raises(RuntimeError, match="another device"):
        untimed.record(torch.Stream(f"{DEVICE}:1"))


def test_to_wait_for_a_stream_that_stands_still_is_an_error() -> None:
    torch.ops.simulated.set_patience(0.2)
    with held(), pytest.raises(RuntimeError, match="has waited"):
        accelerator.synchronize()


def test_the_current_device_and_stream_are_those_of_a_thread() -> None:
    seen: list[tuple[int, int]] = []

    def look() -> None:
        seen.append((accelerator.current_device_index(), accelerator.current_stream().stream_id))

    def look_elsewhere() -> None:
        look()
        accelerator.set_device_index(1)
        look()

    accelerator.set_device_index(1)
    with torch.Stream(f"{DEVICE}:1"):
        look()
        thread = threading.Thread(target=look_elsewhere)
        thread.start()
        thread.join()
    assert seen == [(1, 1), (0, 0), (1, 0)]


# --- memory of the host ---


def test_a_copy_of_pageable_memory_makes_the_host_wait() -> None:
    x, pageable = numbers(), torch.zeros(N)
    waits()
    with pytest.raises(RuntimeError), no_waits():
        pageable.copy_(x, non_blocking=True)
    with pytest.raises(RuntimeError), no_waits():
        x.copy_(pageable, non_blocking=True)
    assert [what for what, _ in waits()] == [
        f"non_blocking copy to pageable memory, {x.nbytes} bytes",
        f"non_blocking copy from pageable memory, {x.nbytes} bytes",
    ]
    with no_waits():
        host = pinned()
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
    with pytest.raises(RuntimeError), no_waits():  # more than one run of bytes
        host[::2].copy_(x[::2], non_blocking=True)
    torch.get_device_module().pin(pageable.data_ptr(), pageable.nbytes)
    with no_waits():
        pageable.copy_(x, non_blocking=True)
    accelerator.synchronize()
    assert torch.equal(pageable, torch.arange(float(N)))
    torch.get_device_module().unpin(pageable.data_ptr())
    assert not pageable.is_pinned()


def test_pinned_memory_may_not_change_before_it_was_read() -> None:
    x, host = numbers(), pinned(1.0)
    with held():
        x.copy_(host, non_blocking=True)
        host.fill_(2)
    assert x.eq(2).all()


# --- random numbers ---


def test_random_numbers_are_drawn_at_the_launch() -> None:
    (generator, _) = torch.get_device_module().default_generators
    generator.manual_seed(5)
    state = generator.get_state()
    first = torch.rand(N, device=DEVICE)
    with no_waits(), held():
        generator.set_state(state)
        again = torch.rand(N, device=DEVICE)
        generator.manual_seed(6)  # too late for those
        assert generator.get_offset() == 0
        other = torch.rand(N, device=DEVICE)
        assert generator.get_offset() > 0
        assert generator.get_state().device.type == "cpu"
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(N, device=DEVICE, generator=torch.Generator())


def test_generators_of_the_host_are_left_alone() -> None:
    before = torch.get_rng_state()
    torch.nn.functional.dropout(torch.ones(N, device=DEVICE), 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert [g.initial_seed() for g in torch.get_device_module().default_generators] == [3, 3]


# --- what an operation gets ---


def test_tensors_of_two_devices_in_one_operation_are_refused() -> None:
    x, y = numbers(), torch.ones(N, device=f"{DEVICE}:1")
    for call in (lambda: x + y, lambda: x.dot(y), lambda: torch.cat([x, y])):
        with pytest.raises(RuntimeError, match="two devices"):
            call()
    assert (x + y.to(x.device)).device == x.device


def test_a_copy_between_devices_is_behind_both() -> None:
    x, y = numbers(), torch.zeros(N, device=f"{DEVICE}:1")
    ours, theirs = accelerator.current_stream(x.device), accelerator.current_stream(y.device)
    for first, other in ((ours, theirs), (theirs, ours)):
        with no_waits(), held(first):
            x.copy_(torch.arange(float(N)).pin_memory(), non_blocking=True)
            x.add_(1)
            y.fill_(5)
            y.copy_(x)
            y.mul_(2)
            x.fill_(0)
            time.sleep(0.05)  # for a device that does not wait
            assert not other.query()
        accelerator.synchronize(y.device)
        assert torch.equal(y.cpu(), (torch.arange(float(N)) + 1) * 2)


def test_tensors_of_the_host_are_refused() -> None:
    x = numbers()
    for call in (
        lambda: x + torch.ones(N),
        lambda: torch.cat([x, torch.ones(N)]),
        lambda: x.dot(torch.ones(N)),
    ):
        with pytest.raises(RuntimeError, match=r"two devices|a tensor of cpu"):
            call()
    with no_waits():
        y = x + torch.tensor(1.0) + 1
    assert torch.equal(y.cpu(), torch.arange(float(N)) + 2)
    waits()
    assert x[torch.tensor([3])].cpu() == 3
    assert [what for what, _ in waits()] == [
        "copy from pageable memory, 8 bytes",
        "copy to pageable memory, 4 bytes",
    ]


def test_results_have_their_form_before_they_are_there() -> None:
    x, out = numbers(), torch.empty(0, device=DEVICE)
    with no_waits(), held():
        torch.cat([x, x], out=out)
        assert out.shape == (2 * N,)
        values, indices = x.view(10, 100).max(dim=1)
        assert (values.shape, indices.dtype) == ((10,), torch.int64)
        with pytest.raises(RuntimeError, match="must match"):
            x.add_(torch.ones(3, device=DEVICE))
    assert out[N + 7] == 7
    assert indices.eq(99).all()


def test_complex_numbers_are_views_of_pairs() -> None:
    pairs = numbers().view(-1, 2)
    with no_waits(), held():
        turned = torch.view_as_real(torch.view_as_complex(pairs) * 1j)
        turned.add_(1)
    assert torch.equal(turned.cpu(), torch.stack([1 - pairs.cpu()[:, 1], 1 + pairs.cpu()[:, 0]], 1))


def test_a_result_may_have_another_form_in_between() -> None:
    """The CPU's `mse_loss` makes its scalar as large as its operands first."""
    x = numbers()
    with no_waits(), held():
        loss = torch.nn.functional.mse_loss(x, x + 2)
    assert loss.shape == ()
    assert loss == 4
    found = torch.nonzero(x > N - 3, out=torch.empty(0, 1, dtype=torch.int64, device=DEVICE))
    assert found.flatten().tolist() == [N - 2, N - 1]


def test_what_it_does_not_know_is_refused_by_the_call() -> None:
    with pytest.raises(NotImplementedError, match="the CPU has no kernel"):
        torch.nn.LSTM(4, 4).to(DEVICE)(torch.ones(2, 1, 4, device=DEVICE))


def test_an_error_in_a_kernel_shows_late_and_for_good() -> None:
    def fail() -> None:
        x = numbers()
        with held():
            x[torch.tensor([N]).pin_memory().to(DEVICE, non_blocking=True)]
        for call in (accelerator.synchronize, lambda: x + 1, x.cpu, accelerator.current_stream().query):
            with pytest.raises(torch.AcceleratorError, match="out of bounds"):
                call()

    assert in_fork(fail) == 0


def test_no_use_in_a_fork() -> None:
    x = numbers()
    assert in_fork(lambda: x + 1) == 1 << 8
    assert in_fork(lambda: torch.empty(1, device=DEVICE)) == 1 << 8
    assert in_fork(lambda: torch.manual_seed(1)) == 0


def test_a_fork_before_the_first_use_may_use_it() -> None:
    assert not torch.get_device_module().is_initialized()
    assert in_fork(numbers) == 0


# --- autocast ---


def test_autocast() -> None:
    x, layer = torch.ones(4, 4, device=DEVICE), torch.nn.Linear(4, 4).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert y.softmax(-1).dtype == torch.float32
        with torch.autocast(DEVICE, enabled=False):
            assert layer(x).dtype == torch.float32
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


# --- waits of the host ---

WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to the device": lambda x: torch.ones(3).to(x.device),
    "tensor": lambda x: torch.tensor([1.0], device=x.device),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 1],
    "assigned by mask": lambda x: x.__setitem__(x > 1, x[:998]),
    "print": lambda x: f"{x}",
    "synchronize": lambda x: accelerator.synchronize(),
    "Stream.synchronize": lambda x: accelerator.current_stream().synchronize(),
    "Event.synchronize": lambda x: accelerator.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_of_the_host_is_counted_and_can_be_refused(name: str) -> None:
    x = numbers()
    waits()
    WAITS[name](x)
    seen = waits()
    assert seen
    line = f"tests/device/test_strictness.py:{WAITS[name].__code__.co_firstlineno}"
    assert {where.partition(" < ")[0] for _, where in seen} == {line}
    with pytest.raises(RuntimeError, match=r"refused|was about to wait"), no_waits():
        WAITS[name](x)


def test_waits_in_a_backward_are_refused_too() -> None:
    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * gradient.sum().item()

    x = numbers().requires_grad_()
    with pytest.raises(RuntimeError), no_waits():
        Waits.apply(x).sum().backward()
    assert any(what == "item" and line.startswith("tests/device") for what, line in waits()), waits()


def test_a_wait_in_a_thread_of_torchs_own_is_counted_too() -> None:
    x = numbers().requires_grad_()
    chosen = x[x > 1]
    waits()
    chosen.sum().backward()
    assert {where for _, where in waits()} == {"a thread of torch's own"}
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), (x > 1).float().cpu())


def test_no_wait_is_needed_where_a_form_is_known() -> None:
    x = numbers()
    with no_waits(), held():
        torch.where(x > 1, x, 0.0)
        x.masked_fill_(x < 0, 1.0)
        x.sort()
        x.cumsum(0)
        x.isfinite().all()
        torch.linalg.vector_norm(x)
        x.index_select(0, torch.zeros(3, dtype=torch.int64, device=DEVICE))
        x.clone().view(torch.int32)
        torch._foreach_norm([x, x])


def test_the_library_is_made_once() -> None:
    assert simulated.library() == simulated.library()
