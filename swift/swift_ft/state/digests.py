"""Digests of tensors' bits, 16 bytes each, computed where a tensor is.

In host memory: XXH3. On a device: two sums in torch's operations. One copy brings those of any number of tensors to the
host. The two kinds differ, so values are compared that are on the same kind of device: on all replicas of a rank, and
in a process that repeats its steps.

    words    w[i, j]: the bytes as signed 32-bit numbers, in rows of 1,024; zeros follow the last one
    digest   sum of M[i]·r[i] and sum of N[i]·r[i], mod 2^64, where r[i] is the sum of C[j]·w[i, j]

Integers that wrap around have one sum in any order, so the bits depend neither on the device nor on its kernels. C, M
and N are odd, so one word's change always shows. Words have 32 bits and constants 64: the top bit of a 64-bit word
would reach one bit of a sum, where two of them cancel (signs of zeros). For each byte, memory moves five: a word is
read (1), its product written (2) and read (2). The products take twice a block's size.
"""

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from swift_ft.device import accelerator_of
from swift_ft.state.tensors import byte_view, in_place
from swift_ft.state.tree import split

DIGEST_BYTES = 16
BLOCK_BYTES = 32 << 20
_ROW = 1024
_ROW_BYTES = 4 * _ROW
_BLOCK_FACTOR = 5
"""Its powers are odd, and no two of the first 2^31 cancel each other in the lowest 33 bits."""

Digest = bytes | torch.Tensor
"""16 bytes, or int64 [2] on a device."""


def digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Returns the digest of each tensor's bits, regardless of dtype and shape. Waits once if any is on a device."""
    return read([digest_there(tensor) for tensor in tensors])


def digest_there(tensor: torch.Tensor) -> Digest:
    """Returns the digest without a wait."""
    if tensor.device.type == "cpu":
        return xxhash.xxh3_128_digest(byte_view(tensor).data if tensor.numel() else b"")
    return sums(in_place(tensor))


def read(found: Sequence[Digest]) -> list[bytes]:
    """Returns digests as bytes. Waits once for the device, for one copy."""
    there = [each for each in found if not isinstance(each, bytes)]
    host = byte_view(torch.stack(there)).tobytes() if there else b""
    rest = iter(range(0, len(host), DIGEST_BYTES))
    return [
        each if isinstance(each, bytes) else host[(at := next(rest)) : at + DIGEST_BYTES] for each in found
    ]


def digests_of(values: Sequence[Any]) -> list[bytes]:
    """Returns the digests of values that `split` takes apart. Names, dtypes, shapes and strides count."""
    apart = [split(value) for value in values]
    of_tensors = iter(digests([tensor for tensors, _ in apart for tensor in tensors.values()]))
    return [
        xxhash.xxh3_128_digest(json.dumps(skeleton).encode() + b"".join(next(of_tensors) for _ in tensors))
        for tensors, skeleton in apart
    ]


def digest_of(value: Any) -> bytes:
    return digests_of([value])[0]


def sums(data: torch.Tensor) -> torch.Tensor:
    """Returns the digest int64 [2] of uint8 [bytes], on its device: the same on every kind."""
    columns, rows = _constants(data.device)
    total = torch.zeros(2, dtype=torch.int64, device=data.device) if not data.numel() else None
    for number, block in enumerate(torch.split(data, BLOCK_BYTES) if total is None else ()):
        width = min(_ROW, -(-block.numel() // 4))
        if missing := -block.numel() % (4 * width):
            block = torch.nn.functional.pad(block, (0, missing))
        elif block.storage_offset() % 4:
            block = block.clone()
        of_rows = (block.view(torch.int32).view(-1, width) * columns[:width]).sum(1)
        of_block = (of_rows * rows[:, : len(of_rows)]).sum(1)
        factor = pow(_BLOCK_FACTOR, number, 1 << 64)
        factor -= (factor >> 63) << 64  # signed
        total = of_block if total is None else total.add_(of_block, alpha=factor)
    assert total is not None
    return total


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns C and (M, N): int64 [columns] and int64 [2, rows of a block], the same in every process."""
    n = BLOCK_BYTES // _ROW_BYTES
    drawn = torch.from_numpy((np.random.PCG64(7).random_raw(_ROW + 2 * n) | 1).view(np.int64))
    if device.type != "cpu":
        drawn = accelerator_of(device).constant(drawn)
    return drawn[:_ROW], drawn[_ROW:].view(2, n)
