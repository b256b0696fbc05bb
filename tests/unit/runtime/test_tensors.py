"""Bits survive the way to bytes and back, for every dtype and the values that are easy to lose."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from swift_ft.errors import ReplayRefused
from swift_ft.log.record import Record, RecordKey, digest_of
from swift_ft.state.checkpoint_file import elements
from swift_ft.state.tensors import byte_view, digest, fill, to_tensor
from swift_ft.train.step_digests import digest_of as xxhash_of
from tests.log_client import owned_bytes

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def as_record(tensor: torch.Tensor) -> Record:
    dtype, shape, body = owned_bytes(tensor)
    return Record(
        key=RecordKey(0, 0, 0),
        dtype=dtype,
        shape=shape,
        body=body,
        digest=digest_of(dtype, shape, body),
        generation=1,
        sequence=1,
    )


def bits(tensor: torch.Tensor) -> bytes:
    return byte_view(tensor.contiguous()).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,)], ids=str)
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    count = int(torch.tensor(shape).prod()) if shape else 1
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    back = to_tensor(as_record(tensor))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert bits(back) == bits(tensor)
    target = torch.empty(shape, dtype=dtype)
    fill(target, as_record(tensor), "x")
    assert bits(target) == bits(tensor)


def test_a_record_is_a_copy() -> None:
    tensor = torch.ones(4)
    record = as_record(tensor)
    tensor.zero_()
    assert torch.equal(to_tensor(record), torch.ones(4))


def test_non_contiguous_tensors_are_taken_in_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(to_tensor(as_record(tensor)), tensor)
    target = torch.empty(2, 3).t()
    fill(target, as_record(tensor), "x")
    assert torch.equal(target, tensor)


def test_a_buffer_that_is_a_leaf_with_grad_can_be_filled() -> None:
    buffer = torch.zeros(4, requires_grad=True)
    fill(buffer, as_record(torch.ones(4)), "x")
    assert torch.equal(buffer, torch.ones(4))


def test_another_shape_or_dtype_is_refused() -> None:
    with pytest.raises(ReplayRefused, match=r"float32\[4\]"):
        fill(torch.empty(5), as_record(torch.ones(4)), "s1.F@3")
    with pytest.raises(ReplayRefused):
        fill(torch.empty(4, dtype=torch.int32), as_record(torch.ones(4)), "s1.F@3")


def test_a_digest_sees_name_dtype_shape_and_every_bit() -> None:
    base = digest({"a": torch.zeros(4)})
    assert base == digest({"a": torch.zeros(4)})
    assert base != digest({"b": torch.zeros(4)})
    assert base != digest({"a": torch.zeros(4, dtype=torch.int32)})
    assert base != digest({"a": torch.zeros(2, 2)})
    assert base != digest({"a": torch.tensor([0.0, 0.0, -0.0, 0.0])})
    assert base != digest({"a": torch.zeros(4)}, "lr")


def test_a_storage_whose_bytes_were_looked_at_can_be_resized() -> None:
    """Tensor.numpy() would see to it that it cannot; torch's observers for quantization resize their buffers."""
    tensor = torch.zeros(4)
    digest({"x": tensor})
    xxhash_of(tensor)
    assert len(elements(tensor)) == byte_view(tensor).nbytes == 16
    tensor.resize_(1000)
    assert tensor.shape == (1000,)


def test_what_has_the_bytes_of_a_tensor_keeps_it() -> None:
    tensor = torch.arange(4)
    memory, view = StorageWeakRef(tensor.untyped_storage()), byte_view(tensor).data
    del tensor
    assert not memory.expired()  # type: ignore[no-untyped-call]
    assert view.tobytes() == torch.arange(4).numpy().tobytes()
    del view
    assert memory.expired()  # type: ignore[no-untyped-call]
