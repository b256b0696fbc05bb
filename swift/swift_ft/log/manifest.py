"""A job's manifest, and its entry in the server's registry: durable state in addition to records (docs/format.md).

The manifest is in the job's directory and may be replaced together with it. The registry entry is in the server's own
directory. So a manifest of another job, of another server, or of an older generation is detected. This module converts
bytes only and accesses no files.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import crc32c

from swift_ft.text import NAME_PATTERN, unique_keys

MANIFEST = ".manifest"
MANIFEST_BYTES_MAX = 64 << 20
GRANTED = ".granted-"
"""Prefix of the file name of a job's registry entry."""
GRANTED_BYTES_MAX = 4096
UID_BYTES = 16
NO_UID = "0" * 2 * UID_BYTES

_MANIFEST_MAGIC = "swift-log-manifest"
_GRANTED_MAGIC = "swift-log-granted"
_VERSIONS = {_MANIFEST_MAGIC: 2, _GRANTED_MAGIC: 1}
_NUMBER_MAX = (1 << 64) - 1


class ManifestDamaged(ValueError):
    """Error for bytes that are not a valid manifest. The message gives the reason."""


@dataclass(slots=True)
class StreamMeta:
    first: int = 0
    """Lowest sequence kept; those below are dropped."""
    next_at_least: int = 0
    """End of the sequences that were durable when this was written. Fewer on disk means that records are lost."""
    quarantined: str = ""


@dataclass(slots=True)
class JobMeta:
    """Durable state of a job in addition to its records."""

    generation: int = 0
    trimmed_below_step: int = 0
    streams: dict[str, StreamMeta] = field(default_factory=dict)
    reset_generation: int = 0
    reset_number: int = 0
    """Number, within `reset_generation`, of the last reset that was carried out."""
    job: str = ""
    uid: str = NO_UID
    """Random id, created with the job. A later job of that name has another one. Each of the job's files carries it."""


@dataclass(frozen=True, slots=True)
class Granted:
    """Registry entry: the uid of the job of that name, and the last generation granted to it."""

    job: str
    uid: str
    generation: int
    """Last granted generation. 0: the job is new, and its manifest may not exist yet."""


def encode_manifest(meta: JobMeta) -> bytes:
    # Not by `asdict`, which is slow: a job has thousands of streams, and each new segment file rewrites the manifest.
    streams = {name: _fields(of) for name, of in meta.streams.items()}
    return _encode(_MANIFEST_MAGIC, {**_fields(meta), "streams": streams})


def decode_manifest(data: bytes) -> JobMeta:
    """Decodes a manifest. Raises ManifestDamaged. Ignores trailing zeros, the rest of a block after a kill."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise ManifestDamaged("it is larger than any manifest")
    fields = _decode(_MANIFEST_MAGIC, data)
    streams = fields.pop("streams", None)
    if not isinstance(streams, dict):
        raise ManifestDamaged("its field streams is missing, or no list of streams")
    numbers = {
        name: _number(fields, name)
        for name in ("generation", "trimmed_below_step", "reset_generation", "reset_number")
    }
    job, uid = _name(fields), _uid(fields)
    _nothing_else(fields)
    return JobMeta(
        streams={_checked_name(name): _stream(of) for name, of in streams.items()},
        job=job,
        uid=uid,
        **numbers,
    )


def encode_granted(granted: Granted) -> bytes:
    return _encode(_GRANTED_MAGIC, _fields(granted))


def decode_granted(data: bytes) -> Granted:
    fields = _decode(_GRANTED_MAGIC, data)
    granted = Granted(_name(fields), _uid(fields), _number(fields, "generation"))
    _nothing_else(fields)
    return granted


def problem_of(job: str, meta: JobMeta, granted: Granted | None) -> str:
    """Returns why this is not the manifest that the server wrote last; empty if it is, or is newer."""
    if meta.job != job:
        return f"it is of job {meta.job}"
    if granted is None or granted.job != job:
        return "this server never had the job: it is another server's"
    if meta.uid != granted.uid:
        return "it is of another job that had this name"
    if meta.generation < granted.generation:
        return f"it is older: of generation {meta.generation}, and {granted.generation} was granted"
    return ""


def _fields(of: JobMeta | StreamMeta | Granted) -> dict[str, object]:
    return {name: getattr(of, name) for name in of.__slots__}


def _encode(magic: str, fields: Mapping[str, object]) -> bytes:
    body = json.dumps(fields, sort_keys=True).encode() + b"\n"  # an indent would make this ten times slower
    return f"{magic} {_VERSIONS[magic]} {crc32c.crc32c(body):08x}\n".encode() + body


def _decode(magic: str, data: bytes) -> dict[str, object]:
    head, _, body = data.rstrip(b"\0").partition(b"\n")
    words = head.decode(errors="replace").split(" ")
    if words[0] != magic or len(words) != 3 or not words[1].isdecimal() or len(words[1]) > 9:
        raise ManifestDamaged("it does not begin as it should")
    if words[2] != f"{crc32c.crc32c(body):08x}":
        raise ManifestDamaged("its checksum does not match")
    if words[1] != str(_VERSIONS[magic]):
        raise ManifestDamaged(f"it is of version {words[1]}, this program reads version {_VERSIONS[magic]}")
    try:
        fields = json.loads(body, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ManifestDamaged(f"what it says is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ManifestDamaged("what it says is not a list of fields")
    return fields


def _number(fields: dict[str, object], name: str) -> int:
    value = fields.pop(name, None)
    if type(value) is not int or not 0 <= value <= _NUMBER_MAX:
        raise ManifestDamaged(f"its field {name} is missing, or no number that it can be")
    return value


def _text(fields: dict[str, object], name: str) -> str:
    value = fields.pop(name, None)
    if not isinstance(value, str):
        raise ManifestDamaged(f"its field {name} is missing, or no text")
    return value


def _name(fields: dict[str, object]) -> str:
    return _checked_name(_text(fields, "job"))


def _checked_name(name: str) -> str:
    if not NAME_PATTERN.fullmatch(name):
        raise ManifestDamaged("a name in it is none of a job or a stream")
    return name


def _uid(fields: dict[str, object]) -> str:
    uid = _text(fields, "uid")
    if len(uid) != 2 * UID_BYTES or not set(uid) <= set("0123456789abcdef"):
        raise ManifestDamaged("its field uid is not 32 hexadecimal digits")
    return uid


def _stream(value: object) -> StreamMeta:
    if not isinstance(value, dict):
        raise ManifestDamaged("a stream in it is not a list of fields")
    fields = dict(value)
    meta = StreamMeta(
        _number(fields, "first"), _number(fields, "next_at_least"), _text(fields, "quarantined")
    )
    _nothing_else(fields)
    if max(meta.first, meta.next_at_least) > _NUMBER_MAX >> 1:
        raise ManifestDamaged("a stream in it has more records than there can be")
    return meta


def _nothing_else(fields: dict[str, object]) -> None:
    if fields:
        raise ManifestDamaged(f"it has a field {min(fields)[:40]!r}, which this program does not know")
