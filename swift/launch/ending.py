"""How a rank's process ends if a thread of its is left behind in a backend.

Such a thread waits in C++ for a message of a peer that is gone. If it comes back while the interpreter ends, it cannot
have the interpreter's lock any more, and C++ ends the whole process by SIGABRT. So the interpreter does not end then:
what it would do that a script can rely on is done here, and the process is left.
"""

import atexit
import gc
import io
import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

_RUNNER = "swift.runtime.backends.runner"


def leave_if_threads_are_lost() -> None:
    """(the script has ended; its exception, if it has raised one, is being handled)"""
    runner = sys.modules.get(_RUNNER)  # this module is in processes that have no torch
    if runner is not None and runner.lost():
        leave(sys.exc_info()[1])


def leave(error: BaseException | None) -> NoReturn:
    """With the exit code that the interpreter would have. Exit handlers run, and files are flushed."""
    code = _code_of(error)
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for each in [*gc.get_objects(), sys.stdout, sys.stderr]:
        with suppress(Exception):
            if isinstance(each, io.IOBase) and not each.closed and each.writable():
                each.flush()
    os._exit(code)


def _code_of(error: BaseException | None) -> int:
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1
