"""A device that hangs is told from a host that is slow, and nobody waits for it.

On the simulated device here, on CUDA by tests/gpu.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from swift_ft import device
from swift_ft.device import Pulse
from tests.device.machine import held, here, no_waits

BOUND_S = 30.0


class Clock:
    """The test's own: a loaded machine is no slow host."""

    now_s = 0.0

    def pass_bound(self) -> None:
        self.now_s += 3 * BOUND_S


@contextmanager
def clock() -> Iterator[Clock]:
    made = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "time", SimpleNamespace(monotonic=lambda: made.now_s))
        yield made


def begun() -> Pulse:
    """A step has ended, so there is a bound."""
    pulse, x = Pulse(BOUND_S, 2.0), torch.ones(3, device=here())
    with pulse.step():
        (x * 2).cpu()
    assert not pulse.hangs()
    return pulse


def looks(pulse: Pulse) -> list[str]:
    return [pulse.hangs() for _ in range(Pulse.LOOKS)]


def test_a_device_that_hangs_is_named_after_the_bound() -> None:
    with clock() as time:
        pulse, x = begun(), torch.ones(3, device=here())
        with pulse.step(), held():
            x * 2
            assert looks(pulse) == [""] * Pulse.LOOKS  # within the bound
            time.pass_bound()
            with no_waits():
                said = looks(pulse)
            assert said[:-1] == [""] * (Pulse.LOOKS - 1)
            assert "its device is never idle" in said[-1]
        assert not pulse.hangs()


def test_a_host_that_is_slow_is_not_taken_for_it() -> None:
    with clock() as time:
        pulse, x = begun(), torch.ones(3, device=here())
        with pulse.step():
            time.pass_bound()
            for _ in range(2 * Pulse.LOOKS):
                with held():
                    x * 2
                    assert not pulse.hangs()
                torch.accelerator.synchronize()
                assert not pulse.hangs()


def test_a_first_step_has_no_bound() -> None:
    with clock() as time:
        pulse, x = Pulse(BOUND_S), torch.ones(3, device=here())
        with pulse.step(), held():
            x * 2
            time.pass_bound()
            assert not any(looks(pulse))


def test_a_device_that_has_failed_meanwhile_is_named() -> None:
    with clock() as time:
        pulse, x = begun(), torch.ones(3, device=here())
        try:
            with pulse.step():
                x.index_select(0, torch.full((1,), 7, device=here()))
                time.pass_bound()
                while "has failed" not in (said := pulse.hangs()):
                    pass  # the kernel is under way
                assert "its device has failed: simulated device: an earlier kernel" in said
                torch.accelerator.synchronize()
        except torch.AcceleratorError:
            os._exit(0)  # no later call works
        raise AssertionError
