"""The element types that a checkpoint may hold. A name that is not here is refused, never looked up in torch."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

# Where safetensors has a word for it. The others lie in the file as bytes (U8); the index has their real type.
_SAFETENSORS: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "int16": "I16",
        "uint16": "U16",
        "int32": "I32",
        "uint32": "U32",
        "int64": "I64",
        "uint64": "U64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }
)
_OTHERS = (
    "complex32",
    "complex128",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
)

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {name: getattr(torch, name) for name in (*_SAFETENSORS, *_OTHERS)}
)


def as_safetensors(dtype: str, shape: list[int], size: int) -> tuple[str, list[int]]:
    """(element type, shape) of a tensor of `size` bytes in a safetensors header."""
    word = _SAFETENSORS.get(dtype)
    return (word, shape) if word is not None else ("U8", [size])
