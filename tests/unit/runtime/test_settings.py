"""Settings of torch that a step changes: a new process takes them over, and a step that is cut short leaves none."""

from collections.abc import Callable, Iterator

import pytest
import torch

from swift_ft.errors import ServiceError
from swift_ft.state.torch_settings import _SETTINGS, Settings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    settings = Settings()
    settings.remember()
    yield
    settings.begin_step()


CHANGES: dict[str, Callable[[], object]] = {
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "grad_enabled": lambda: torch._C._set_grad_enabled(False),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn_conv": lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
    "mkldnn_rnn": lambda: setattr(torch.backends.mkldnn.rnn, "fp32_precision", "bf16"),
    "mkldnn_matmul": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "flash_attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "efficient_attention": lambda: torch.backends.cuda.enable_mem_efficient_sdp(False),
    "plain_attention": lambda: torch.backends.cuda.enable_math_sdp(False),
}


def test_each_is_tried() -> None:
    assert set(CHANGES) == set(_SETTINGS)


@pytest.mark.parametrize("name", CHANGES)
def test_a_process_that_takes_over_has_what_a_step_has_set(name: str) -> None:
    old, new = Settings(), Settings()
    for each in (old, new):
        each.remember()
        each.begin_step()
    assert old.state() == {}
    first = _SETTINGS[name].get()
    CHANGES[name]()
    old.end_step()
    state = old.state()
    assert name in state
    _SETTINGS[name].put(first)
    new.load(state)
    new.begin_step()
    assert _SETTINGS[name].get() == state[name] != first
    new.load({})  # back to a version before that step
    new.begin_step()
    assert _SETTINGS[name].get() == first


def test_a_step_that_is_cut_short_leaves_none_changed() -> None:
    settings = Settings()
    settings.remember()
    settings.begin_step()
    torch.set_default_dtype(torch.float64)
    settings.begin_step()  # it is done again
    assert torch.get_default_dtype() == torch.float32


def test_one_that_this_version_does_not_know_is_refused() -> None:
    settings = Settings()
    settings.remember()
    with pytest.raises(ServiceError, match="does not know: odd"):
        settings.load({"odd": 1})
