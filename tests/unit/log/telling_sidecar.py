"""A sidecar that writes an event when it begins. Started in the place of `swift_ft.log.sidecar`."""

from typing import Any

from swift_ft import events
from swift_ft.log import sidecar

ring_writer = sidecar.RingWriter


def begin(*arguments: Any, **fields: Any) -> sidecar.RingWriter:
    events.emit("begun")
    return ring_writer(*arguments, **fields)


sidecar.RingWriter = begin  # type: ignore[assignment,misc]
sidecar.main()
