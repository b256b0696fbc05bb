"""Records as a safetensors file: 8 bytes of length, a JSON header, the tensors' bytes one after the other.

Written here, not by the library: it takes whole tensors that are in memory at once, and numpy's element types,
which have no bfloat16 and no float8. The bytes are the log's own, so nothing can be rounded.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from swift.errors import UsageError
from swift.log.record import Record
from swift.log.unlogged import MARK_SLOT

# The log's element types, as safetensors calls them.
DTYPES: Mapping[str, str] = MappingProxyType(
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
        "float8_e8m0fnu": "F8_E8M0",
    }
)


def export(path: Path, records: Iterable[tuple[str, Record]], metadata: Mapping[str, str]) -> tuple[int, int]:
    """Writes (stream, record) pairs under names like ``s2.F/17/3/0`` (stream, step, microbatch, slot); gives their
    number and bytes. The file is there whole or not at all. UsageError: nothing to write, an element type that
    safetensors does not have, a place that cannot be written."""
    bodies = path.with_name(f".{path.name}.bodies")
    aside = path.with_name(f".{path.name}.new")
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    try:
        with open(bodies, "w+b") as data:
            for stream, record in records:
                if record.key.slot == MARK_SLOT:
                    continue  # no tensor
                name = f"{stream}/{record.key.step}/{record.key.microbatch}/{record.key.slot}"
                dtype = DTYPES.get(record.dtype)
                if dtype is None:
                    raise UsageError(
                        f"{name} is of {record.dtype}, which safetensors does not have: leave it out"
                    )
                end = at + record.body.nbytes
                header[name] = {"dtype": dtype, "shape": list(record.shape), "data_offsets": [at, end]}
                data.write(record.body)
                at = end
            if len(header) == 1:
                raise UsageError("no record is of that job, stream and step: nothing to export")
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            data.seek(0)
            with open(aside, "wb") as out:
                out.write(struct.pack("<Q", len(text)) + text)
                shutil.copyfileobj(data, out, 4 << 20)
                out.flush()
                os.fsync(out.fileno())
        os.replace(aside, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; give another place") from None
    finally:
        for left in (bodies, aside):
            left.unlink(missing_ok=True)
    return len(header) - 1, at
