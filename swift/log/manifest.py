"""A job's manifest: what must survive besides records (docs/format.md). Bytes in and out; no files."""

import json
from dataclasses import asdict, dataclass, field

import crc32c

MANIFEST = ".manifest"
_MAGIC = "swift-log-manifest 1"


class ManifestDamaged(ValueError):
    """These bytes are no manifest. The message says why."""


@dataclass(slots=True)
class StreamMeta:
    """What the manifest knows of a stream."""

    first: int = 0
    """Sequences below are dropped."""
    next_at_least: int = 0
    """So many sequences were durable when this was written; fewer on disk means that some are gone."""
    quarantined: str = ""


@dataclass(slots=True)
class JobMeta:
    """What must survive with a job besides its records."""

    generation: int = 0
    trimmed_below_step: int = 0
    streams: dict[str, StreamMeta] = field(default_factory=dict)
    reset_generation: int = 0
    reset_number: int = 0
    """The last reset that was carried out: of which generation, and which of its resets."""


def encode_manifest(meta: JobMeta) -> bytes:
    body = json.dumps(asdict(meta), sort_keys=True, indent=1).encode() + b"\n"
    return f"{_MAGIC} {crc32c.crc32c(body):08x}\n".encode() + body


def decode_manifest(data: bytes) -> JobMeta:
    """Raises ManifestDamaged. Zeros behind it are what a kill left of a block."""
    head, _, body = data.rstrip(b"\0").partition(b"\n")
    if not head.startswith(b"swift-log-manifest "):
        raise ManifestDamaged("it does not begin as a manifest does")
    if head.decode(errors="replace") != f"{_MAGIC} {crc32c.crc32c(body):08x}":
        raise ManifestDamaged("its checksum does not match, or it is of another version")
    fields = json.loads(body)
    streams = {name: StreamMeta(**stream) for name, stream in fields.pop("streams").items()}
    return JobMeta(streams=streams, **fields)
