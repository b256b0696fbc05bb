"""A trainer's own exception in a step: the end of the job, unless its operator lets the step be done again.

`swift-ft run --retry-exceptions N`: so often, at most, for one step. A step that raises the same exception twice would
do so a third time, so that ends the job at once.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from swift.errors import SwiftError
from swift.runtime.errors import words_of

ENV_RETRIES = "SWIFT_RETRY_EXCEPTIONS"


class Retries:
    """Of one process: what its steps have raised."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._allowed = int(os.environ.get(ENV_RETRIES) or 0)
        self._step = -1
        self._raised: list[str] = []  # by that step
        self._newest: BaseException | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around the trainer's function: what comes out of it is its own."""
        if step > self._step:
            self._step, self._raised = step, []
        self._newest = None
        try:
            yield
        except Exception as error:
            self._newest = error
            raise

    def again(self, error: Exception) -> str:
        """Why the step is done again; empty: it is not. The error is printed, as nobody else sees it."""
        if not self._allowed or error is not self._newest or isinstance(error, SwiftError):
            return ""
        words = words_of(error)
        known, self._raised = words in self._raised, [*self._raised, words]
        if known or len(self._raised) > self._allowed:
            return ""
        with suppress(OSError, ValueError):
            traceback.print_exception(error)
            print(
                f"swift: rank {self._rank}: step {self._step} is done again "
                f"({len(self._raised)} of --retry-exceptions {self._allowed})",
                file=sys.stderr,
            )
        return f"step {self._step} raised {words}, and is done again"
