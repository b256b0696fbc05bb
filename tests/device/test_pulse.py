"""A device that hangs is told from a host that is slow, and nobody waits for it."""

import os
import time

import torch

from swift_ft.device import Pulse
from tests.device.simulated import held, no_waits

DEVICE = "simulated"
BOUND_S = 0.05


def begun() -> Pulse:
    """A step has ended, so there is a bound."""
    pulse, x = Pulse(BOUND_S, 2.0), torch.ones(3, device=DEVICE)
    with pulse.step():
        (x * 2).cpu()
    assert not pulse.hangs()
    return pulse


def looks(pulse: Pulse) -> list[str]:
    return [pulse.hangs() for _ in range(Pulse.LOOKS)]


def test_a_device_that_hangs_is_named_after_the_bound() -> None:
    pulse, x = begun(), torch.ones(3, device=DEVICE)
    with pulse.step(), held():
        x * 2
        assert looks(pulse) == [""] * Pulse.LOOKS  # within the bound
        time.sleep(3 * BOUND_S)
        with no_waits():
            said = looks(pulse)
        assert said[:-1] == [""] * (Pulse.LOOKS - 1)
        assert "its device is never idle" in said[-1]
    assert not pulse.hangs()


def test_a_host_that_is_slow_is_not_taken_for_it() -> None:
    pulse, x = begun(), torch.ones(3, device=DEVICE)
    with pulse.step():
        time.sleep(3 * BOUND_S)
        for _ in range(2 * Pulse.LOOKS):
            with held():
                x * 2
                assert not pulse.hangs()
            torch.accelerator.synchronize()
            assert not pulse.hangs()


def test_a_first_step_has_no_bound() -> None:
    pulse, x = Pulse(BOUND_S), torch.ones(3, device=DEVICE)
    with pulse.step(), held():
        x * 2
        time.sleep(3 * BOUND_S)
        assert not any(looks(pulse))


def test_a_device_that_has_failed_meanwhile_is_named() -> None:
    pulse, x = begun(), torch.ones(3, device=DEVICE)
    try:
        with pulse.step():
            x.index_select(0, torch.full((1,), 7, device=DEVICE))
            time.sleep(3 * BOUND_S)
            assert "its device has failed: simulated device: an earlier kernel" in pulse.hangs()
            torch.accelerator.synchronize()
    except torch.AcceleratorError:
        os._exit(0)  # no later call works
    raise AssertionError
