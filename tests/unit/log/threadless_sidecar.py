"""A sidecar in which an error ends the thread of a connection, if ``FAIL_ONCE`` names a file; it removes that.

Started in the place of `swift_ft.log.sidecar`.
"""

import os
from pathlib import Path

from swift_ft.log import sidecar
from swift_ft.log.sender import Link


def fail(link: Link) -> None:
    raise RuntimeError("can't start new thread")


once = Path(os.environ["FAIL_ONCE"])
if once.exists():
    once.unlink()
    Link._run = fail  # type: ignore[method-assign]
sidecar.main()
