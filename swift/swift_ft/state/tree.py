"""State dicts as named tensors plus JSON, so that a checkpoint carries no pickled values.

`split` takes apart any nesting of containers, numbers, strings, tensors and arrays. `join` restores it with the same
types, bits and strides, and puts what was on an accelerator onto this process's. Floats survive bit for bit (JSON
carries their shortest round-trip form), NaN and infinity included.
"""

import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from swift_ft.device import accelerator_in_use
from swift_ft.errors import UsageError

_LISTED: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
}
_NAMED: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
_FACTORIES: dict[str, Any] = {
    "none": None,
    "int": int,
    "float": float,
    "str": str,
    "list": list,
    "dict": dict,
    "set": set,
}
_PLAIN = (type(None), bool, int, float, str)


class Inexpressible(UsageError):
    """A value that is neither tensor nor plain."""


def split(state: Any, prefix: str = "") -> tuple[dict[str, torch.Tensor], Any]:
    """Returns (tensors by path, JSON value) of a state dict. Raises UsageError for a value that is neither."""
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _split(state, prefix or "state", tensors)


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        _name(value, path, tensors)
        return {
            "tensor": path,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            **({"stride": stride} if (stride := stride_told(value)) else {}),
            **({"accelerator": True} if value.device.type != "cpu" else {}),
        }
    if isinstance(value, np.ndarray | np.generic):
        return _split_array(value, path, tensors)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        pairs = [
            [_key(key, path), _split(item, f"{path}.{_word(key)}", tensors)] for key, item in value.items()
        ]
        if isinstance(value, defaultdict) and value.default_factory in _FACTORIES.values():
            word = next(word for word, made in _FACTORIES.items() if made is value.default_factory)
            return {"default": [word, pairs]}
        kind = (
            "ordered"
            if isinstance(value, OrderedDict)
            else "counter"
            if isinstance(value, Counter)
            else "dict"
        )
        return {kind: pairs}
    if isinstance(value, deque):
        items = [_split(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return {"deque": [items, value.maxlen]}
    if isinstance(value, set | frozenset):
        # Two processes may iterate over a set in different orders.
        kind = "set" if isinstance(value, set) else "frozenset"
        return {kind: sorted((_hashable(item, path) for item in value), key=repr)}
    if isinstance(value, list | tuple):
        kind = "size" if isinstance(value, torch.Size) else "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_split(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise Inexpressible(
        f"the state at {path} holds a {type(value).__name__}; keep it to tensors, arrays, numbers, strings and "
        "lists, tuples, sets and dicts of them"
    )


def _name(tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> None:
    if path in tensors:
        raise UsageError(f"the state holds two tensors that are both called {path}; rename one")
    tensors[path] = tensor


def stride_told(tensor: torch.Tensor) -> list[int]:
    """Returns the strides, or none if they are contiguous. Strides of dimensions of size 1 count: kernels use them.

    Elements that share memory (`expand`) are saved as separate ones.
    """
    if tensor.layout != torch.strided or tensor.stride() == contiguous_strides(tensor.shape):
        return []
    reach = sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    behind = 0  # offset of the last element of the dimensions so far
    for stride, size in reach:
        if stride <= behind:
            return []
        behind += (size - 1) * stride
    return list(tensor.stride())


def contiguous_strides(shape: Any) -> tuple[int, ...]:
    """Returns the strides that torch gives to a new tensor."""
    strides, step = [], 1
    for size in reversed(tuple(shape)):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _split_array(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if value.dtype.hasobject:
        raise Inexpressible(f"the state at {path} holds an array of objects; keep it to numbers")
    array = np.asarray(value)
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    data = np.frombuffer(array.tobytes(order), dtype=np.uint8).copy()  # type: ignore[arg-type]
    kind = "scalar" if isinstance(value, np.generic) else "array"
    dtype = _dtype_in_json(array.dtype, path)
    described = {kind: path, "dtype": dtype, "shape": list(array.shape), "order": order, "bytes": data.size}
    if kind == "scalar":
        return {**described, "scalar": data.tobytes().hex()}
    _name(torch.from_numpy(data), path, tensors)
    return described


def _dtype_in_json(dtype: Any, path: str) -> Any:
    """Returns the dtype for JSON; `_numpy_type` reads it. Raises UsageError."""
    try:
        if _numpy_type(dtype.str) == dtype:
            return dtype.str
    except (TypeError, ValueError):
        pass
    raise Inexpressible(f"the state at {path} holds an array of {dtype}; keep it to plain numbers")


def _key(key: Any, path: str) -> Any:
    if isinstance(key, str | int) and not isinstance(key, np.generic):
        return key
    return _hashable(key, path)


def _hashable(value: Any, path: str) -> Any:
    """Returns the JSON value of a key or of a set's element. Raises UsageError if it contains a tensor."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = _split(value, path, tensors)
    if tensors:
        raise Inexpressible(f"the state at {path} has a tensor as a key, or in a set; use str or int")
    return skeleton


def _word(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def join(skeleton: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the state dict that `split` took apart. Raises ValueError for a skeleton that `split` cannot return."""
    if isinstance(skeleton, str):
        return sys.intern(skeleton)  # one object per name, as before: pickle's output depends on it
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        tensor = tensors[skeleton["tensor"]]
        return placed(tensor) if "accelerator" in skeleton else tensor
    if "array" in skeleton:
        return _array(tensors[skeleton["array"]].numpy().tobytes(), skeleton)
    if "scalar" in skeleton:
        return _array(bytes.fromhex(skeleton["scalar"]), skeleton)[()]
    kind, items = next(iter(skeleton.items()))
    if kind == "default":
        return defaultdict(_FACTORIES[items[0]], join({"dict": items[1]}, tensors))
    if kind in _NAMED:
        return _NAMED[kind]([(join(key, tensors), join(value, tensors)) for key, value in items])
    if kind == "deque":
        return deque((join(item, tensors) for item in items[0]), items[1])
    if kind in _LISTED:
        return _LISTED[kind]([join(item, tensors) for item in items])
    if kind in ("bytes", "bytearray"):
        data = bytes.fromhex(items)
        return data if kind == "bytes" else bytearray(data)
    if kind == "complex":
        return complex(*items)
    if kind == "dtype":
        return dtype_of(items)
    if kind == "device":
        return torch.device(items)
    raise ValueError(f"a state with a {kind!r} in it")


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the accelerator that this process uses, for one that was on an accelerator when it was
    saved. The host does not wait for the copy. Without one it stays on the CPU: a tool may read states of other
    machines."""
    accelerator = accelerator_in_use()
    if accelerator is None or tensor.device.type != "cpu":
        return tensor
    return tensor.pin_memory().to(accelerator.torch, non_blocking=True)


def _array(data: bytes, skeleton: dict[str, Any]) -> Any:
    flat = np.frombuffer(data, dtype=_numpy_type(skeleton["dtype"]), count=math.prod(skeleton["shape"]))
    return flat.reshape(skeleton["shape"], order=skeleton["order"]).copy(order="K")


_NUMPY_TYPE = re.compile(r"[<>|=][a-zA-Z][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


def _numpy_type(told: str) -> "np.dtype[Any]":
    """Parses a dtype as numpy writes it; numpy would evaluate other texts as Python. Raises TypeError, ValueError."""
    if not _NUMPY_TYPE.fullmatch(told):
        raise ValueError(f"no element type {told[:40]!r}")
    return np.dtype(told)


_TORCH_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype. (No lookup by attribute: torch imports submodules on access.)"""
    dtype = _TORCH_TYPES.get(name)
    if dtype is None:
        raise ValueError(f"no dtype {name!r}")
    return dtype
