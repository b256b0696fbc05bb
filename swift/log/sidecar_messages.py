"""What a trainer and its sidecar say to each other: lines of JSON, drawn in `swift.log.sidecar`."""

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

from swift import errors
from swift.errors import RecordCorrupt, ServiceError, SwiftError
from swift.log.record import RecordKey

_EXPECT_AT_ONCE = 500

Message = dict[str, Any]


def error_to_json(error: SwiftError | None) -> Message | None:
    return None if error is None else {"class": type(error).__name__, "message": str(error)}


def error_from_json(value: Message | None) -> SwiftError | None:
    """The same class with the same text."""
    if value is None:
        return None
    kind = getattr(errors, value["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, SwiftError)):
        kind = ServiceError
    return kind(value["message"])


def expectations(stream: str, server: str, digests: Mapping[RecordKey, bytes]) -> list[Message]:
    """Requests of bounded size."""
    out: list[Message] = []
    rest = iter(digests.items())
    while part := list(islice(rest, _EXPECT_AT_ONCE)):
        numbers = [[key.step, key.microbatch, key.slot, digest.hex()] for key, digest in part]
        out.append({"do": "expect", "stream": stream, "server": server, "digests": numbers})
    return out


class Expectations:
    """What the servers are known to hold: a sidecar's successor is told too. Its caller holds a lock."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[RecordKey, bytes]] = {}

    def add(self, stream: str, server: str, digests: Mapping[RecordKey, bytes]) -> None:
        """RecordCorrupt, as in `LogWriter.expect`: a successor could not even begin with that."""
        for (other_stream, other), known in self._known.items():
            for key in known.keys() & digests.keys() if other_stream == stream else ():
                if known[key] != digests[key]:
                    raise RecordCorrupt(
                        f"{stream} {key} differs between its copies (on {other} {known[key].hex()}; on {server} "
                        f"{digests[key].hex()})"
                    )
        self._known.setdefault((stream, server), {}).update(digests)

    def keep(self, servers: Collection[str]) -> None:
        """Of the others nothing is expected any more."""
        self._known = {where: known for where, known in self._known.items() if where[1] in servers}

    def forget_below(self, step: int) -> None:
        left = {
            where: {key: digest for key, digest in known.items() if key.step >= step}
            for where, known in self._known.items()
        }
        self._known = {where: known for where, known in left.items() if known}

    def clear(self) -> None:
        self._known.clear()

    def messages(self) -> list[Message]:
        return [
            message
            for (stream, server), known in self._known.items()
            for message in expectations(stream, server, known)
        ]
