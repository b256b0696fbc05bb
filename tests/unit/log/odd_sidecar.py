"""A sidecar with a fault, if ``ODD_ONCE`` names a file, which it removes. Started in the place of
`swift_ft.log.sidecar`.

The file's words say what it is: ``stopped`` (SIGSTOP) before it reads anything, or ``threadless``: an error ends the
thread of its first connection. Each writes an event when it begins.
"""

import os
import signal
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.log import sidecar
from swift_ft.log.sender import Link

ring_writer = sidecar.RingWriter


def begin(*arguments: Any, **fields: Any) -> sidecar.RingWriter:
    events.emit("begun")
    return ring_writer(*arguments, **fields)


def fail(link: Link) -> None:
    raise RuntimeError("can't start new thread")


once = Path(os.environ.get("ODD_ONCE", os.devnull))
if once.is_file():
    words = once.read_text()
    once.unlink()
    if words == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        Link._run = fail  # type: ignore[method-assign]
sidecar.RingWriter = begin  # type: ignore[assignment,misc]
sidecar.main()
