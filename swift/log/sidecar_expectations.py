"""What a stream is known to hold, as messages to the sidecar."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from swift.log.record import RecordKey

_AT_ONCE = 500


def expectations(known: Mapping[str, Mapping[RecordKey, bytes]]) -> list[dict[str, Any]]:
    """Requests of bounded size, for `SidecarWriter.expect` and for a sidecar that takes over."""
    out = []
    for stream, digests in known.items():
        rest = iter(digests.items())
        while part := list(islice(rest, _AT_ONCE)):
            out.append(
                {
                    "do": "expect",
                    "stream": stream,
                    "digests": [[key.step, key.microbatch, key.slot, digest.hex()] for key, digest in part],
                }
            )
    return out
