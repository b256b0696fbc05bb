"""Tensors as bytes and back, bit for bit, for every dtype."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from swift_ft.device import Event, accelerator_of
from swift_ft.errors import Divergence
from swift_ft.log.record import Record
from swift_ft.state.checkpoint_file import bytes_of, on_host

_HOST = torch.device("cpu")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as uint8 [bytes] on the CPU: shared memory if it is contiguous there, else a copy."""
    return in_place(plain(tensor))


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes as uint8 [bytes] on its device: shared memory if it is contiguous, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element is contiguous with any stride, and keeps that stride.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same bits, contiguous on the CPU: the tensor's own memory if that already is, else a copy.

    With its own memory it also has its own version counter, which shows changes in place.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor if tensor.device.type == "cpu" else pinned_copy(tensor)


def pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a device's contiguous tensor in pinned memory. The host waits for it."""
    device = accelerator_of(tensor.device)
    host = device.pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
    host.copy_(tensor, non_blocking=True)
    device.wait(device.mark())
    return host


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one dtype and shape have the same bits: NaN equals itself, 0.0 is not -0.0."""
    return not differ([(one, other)])[0]


def differ(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
    """Returns whether the bits of each two tensors differ, which are of one dtype and shape. A device compares its own,
    and the host waits once for all results."""
    there = {
        index: torch.ne(in_place(one), in_place(other)).any()
        for index, (one, other) in enumerate(pairs)
        if one.device == other.device and one.device.type != "cpu"
    }
    found = dict(
        zip(there, pinned_copy(torch.stack([*there.values()])).tolist() if there else (), strict=True)
    )
    return [
        found[index] if index in found else not torch.equal(as_bytes(one), as_bytes(other))
        for index, (one, other) in enumerate(pairs)
    ]


def byte_view(tensor: torch.Tensor) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return bytes_of(plain(tensor))


def overlapping(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Returns the paths of tensors whose memory, from first to last element, overlaps another one's."""
    spans = []
    for path, tensor in tensors.items():
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize, path))
    overlapping: set[str] = set()
    end, longest = 0, ""
    for begin, end_of_this, path in sorted(spans):
        if begin < end:
            overlapping |= {path, longest}
        if end_of_this > end:
            end, longest = end_of_this, path
    return overlapping


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of `parts`, added in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def laid_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns `value` with the strides that a sum of such tensors has: records have none, and kernels need them."""
    laid = torch.empty_like(like, dtype=value.dtype)
    return value if value.stride() == laid.stride() else laid.copy_(value)


def fill(tensor: torch.Tensor, record: Record, what: str, reusable: Event | None = None) -> None:
    """Copies a record's bytes into `tensor`. The host does not wait. `reusable`: `Accelerator.copy_in`; None: behind
    all work of the current stream. Raises Divergence if dtype or shape differ."""
    if (record.dtype, tuple(record.shape)) != (dtype_name(tensor), tuple(tensor.shape)):
        raise Divergence(
            f"{what}: the log holds {record.dtype}{list(record.shape)}, "
            f"the stage expects {dtype_name(tensor)}{list(tensor.shape)}"
        )
    if reusable is not None:
        accelerator_of(tensor.device).copy_in(tensor.detach(), _on_host(record, pinned=True), reusable)
    elif tensor.is_contiguous() and tensor.device.type == "cpu":
        byte_view(tensor)[:] = np.frombuffer(record.body, dtype=np.uint8)
    else:
        with torch.no_grad():
            tensor.copy_(_on_host(record, pinned=tensor.device.type != "cpu"), non_blocking=True)


def to_tensor(record: Record, device: torch.device = _HOST) -> torch.Tensor:
    """Returns the record's tensor on `device`. The host does not wait for the copy."""
    return _on_host(record, pinned=device.type != "cpu").to(device, non_blocking=True)


def _on_host(record: Record, *, pinned: bool) -> torch.Tensor:
    tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype), pin_memory=pinned)
    byte_view(tensor)[:] = np.frombuffer(record.body, dtype=np.uint8)
    return tensor


def digest(tensors: dict[str, torch.Tensor], rest: str = "") -> str:
    """SHA-256 over names, dtypes, shapes and bytes, by name, and over `rest`."""
    sha = hashlib.sha256()
    tensors = on_host(tensors)
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        sha.update(f"{name}|{dtype_name(tensor)}|{tuple(tensor.shape)}|".encode())
        sha.update(byte_view(tensor).data)
    sha.update(rest.encode())
    return sha.hexdigest()
