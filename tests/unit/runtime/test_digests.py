"""The sums that a device computes; `tests/device/test_state.py` compares them with the host's."""

from collections.abc import Iterator

import pytest
import torch

from swift_ft.state import digests
from swift_ft.state.digests import digest_of, digests_of, sums


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of two rows, so that a short tensor has several."""
    monkeypatch.setattr(digests, "BLOCK_BYTES", 8192)
    digests._constants.cache_clear()
    yield
    digests._constants.cache_clear()


def of(data: torch.Tensor) -> tuple[int, ...]:
    return tuple(sums(data).tolist())


def random(size: int) -> torch.Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, 3, 4, 4097, 8192, 3 * 8192 + 5])
def test_every_bit_counts(size: int) -> None:
    data = random(size)
    seen = {of(data)}
    places = range(0, size, max(size // 50, 1))
    for place in places:
        changed = data.clone()
        changed[place] ^= 1 << place % 8
        seen.add(of(changed))
    assert len(seen) == 1 + len(places)


def test_two_changes_do_not_cancel() -> None:
    """Signs of zeros are the top bits of words, which reach the fewest bits of a product."""
    zeros = torch.zeros(10 * 1024)
    seen = {of(zeros.view(torch.uint8))}
    pairs = [(0, place) for place in (1, 2, 1023, 1024, 1025, 2048, 2049, 4096, 10239)]
    pairs += [(place, place + 2048) for place in (1, 2048, 5000)]
    for one, other in pairs:
        changed = zeros.clone()
        changed[[one, other]] = -0.0
        seen.add(of(changed.view(torch.uint8)))
    assert len(seen) == 1 + len(pairs)


def test_what_changes_places_counts() -> None:
    data = random(5 * 8192)
    blocks = data.view(5, 2, 4096)
    for moved in (blocks.roll(1, 0), blocks.roll(1, 1), blocks.roll(4, 2)):
        assert of(moved.reshape(-1)) != of(data)


def test_constants_are_odd_and_no_two_cancel_in_the_low_bits() -> None:
    digests._constants.cache_clear()
    digests.BLOCK_BYTES = 32 << 20  # the fixture puts it back
    low = (1 << 33) - 1
    for constants in digests._constants(torch.device("cpu")):
        numbers = [int(number) for number in constants.flatten()]
        assert all(number % 2 for number in numbers)
        assert len({min(number & low, -number & low) for number in numbers}) == len(numbers)


def test_bytes_that_begin_anywhere() -> None:
    data = random(5000)
    for begin in (1, 2, 3, 4):
        for size in (4096, 77):
            assert of(data[begin : begin + size]) == of(data[begin : begin + size].clone())
    assert of(data[:0]) == (0, 0)


def test_names_forms_and_strides_count() -> None:
    values = [
        {"a": torch.zeros(2, 3)},
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(3, 2).T},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.zeros(2, 3), "b": 1.0},
    ]
    assert len(set(digests_of(values))) == len(values)
    assert [digest_of(value) for value in values] == digests_of(values)
