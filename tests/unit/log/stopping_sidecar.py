"""A sidecar that is stopped (SIGSTOP) before it reads anything, if ``STOP_ONCE`` names a file; it removes that.

Started in the place of `swift_ft.log.sidecar`.
"""

import os
import signal
from pathlib import Path

from swift_ft.log import sidecar

once = Path(os.environ["STOP_ONCE"])
if once.exists():
    once.unlink()
    os.kill(os.getpid(), signal.SIGSTOP)
sidecar.main()
