"""Errors that end a step: what each means, and a trainer's own, which an operator may let be tried again.

What an error that ends a step means: a failure's consequence, a step to be done again, or the end of the job.

A rank accuses nobody. It says what broke, and waits for the coordinator's notice of a newer generation.
"""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from swift_ft import events
from swift_ft.comm.backend import Misspeculated, advice_on, let_go, words_of
from swift_ft.comm.process_groups import Interrupted, ProcessGroups
from swift_ft.errors import LogError, LogUnavailable, ReplayRefused, SwiftError, UsageError, is_difference
from swift_ft.train.coordinator_session import RESAY_S, Member

# A trainer's own exception in a step: the end of the job, unless its operator lets the step be done again.
#
# `swift-ft run --retry-exceptions N`: so often, at most, for one step. A step that raises the same exception twice
# would do so a third time, so that ends the job at once.

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


_NOTICE_POLL_S = 0.005
_FAIL_S = 5.0
"""How long a rank that ends with an error tries to tell the coordinator."""


class Failures:
    """One rank's. Trainer's thread."""

    def __init__(
        self,
        rank: int,
        member: Member,
        communicator: ProcessGroups,
        retries: Retries,
        suspicion_timeout_s: float,
    ) -> None:
        """`suspicion_timeout_s`: an error after which no newer generation has come for so long ends the job, if the
        coordinator answers."""
        self._rank = rank
        self._member = member
        self._communicator = communicator
        self._retries = retries
        self._suspicion_timeout_s = suspicion_timeout_s

    def handle(self, error: Exception, generation: int) -> None:
        """Returns if the error is a failure's consequence (a newer generation is there); else raises it.

        `generation`: in which it was raised.
        """
        let_go(error)
        if self._member.noticed:
            self.await_notice(error)
        elif isinstance(error, ReplayRefused | LogError):
            words, differs = str(error), is_difference(error)
            self._await_notice(error, lambda: self._member.client.refuse(generation, words, differs=differs))
        elif (
            self._communicator.lost_peer(error)
            or isinstance(error, LogUnavailable)
            or self._communicator.broken is not None  # the trainer may have stumbled over what came of it
        ):
            # Not ours to decide: the coordinator hears of a death from a launcher or from the lease, and if there is
            # none, all go on together in another generation.
            self.await_notice(error, generation)
        elif isinstance(error, Misspeculated):
            self.await_notice(error, generation, str(error))
        elif again := self._retries.again(error):
            self.await_notice(error, generation, again)
        else:
            self._fail(error)

    def await_notice(self, error: Exception, suspected_in: int = 0, again: str = "") -> None:
        """Returns once a newer generation is there. Raises Fenced or JobFailed; the error itself if none comes.

        `suspected_in`: the generation whose connections broke, which the coordinator is to know. `again`: it was not
        that, but the trainer's own error, after which the step is to be done again.
        """
        words = again or words_of(error)
        self._await_notice(
            error,
            (lambda: self._member.client.suspect(suspected_in, words, again=bool(again)))
            if suspected_in
            else None,
        )

    def _await_notice(self, error: Exception, statement: Callable[[], None] | None) -> None:
        """`statement`: what the coordinator is to know; it is said again and again."""
        deadline = time.monotonic() + self._suspicion_timeout_s
        said_at = -math.inf
        while not self._member.noticed:
            if time.monotonic() > deadline:
                self._fail(error)
            if statement is not None and time.monotonic() - said_at > RESAY_S:
                deadline = self._say(statement, deadline)
                said_at = time.monotonic()
            time.sleep(_NOTICE_POLL_S)
        try:
            self._member.check()
        except Interrupted:
            return

    def _say(self, statement: Callable[[], None], deadline: float) -> float:
        """Until when a notice may come then. A coordinator that is away cannot send one: a loss waits for it, and the
        time in which it has not answered does not count."""
        began = time.monotonic()
        if not self._member.say(statement):
            return math.inf
        now = time.monotonic()
        return min(deadline + now - began, now + self._suspicion_timeout_s)

    def _fail(self, error: Exception) -> None:
        """The job ends. Bad input is told by the exit code: the launcher stops the job with the same one."""
        if not isinstance(error, UsageError):
            try:
                self._member.client.fail(words_of(error)[:400] + advice_on(error), patience_s=_FAIL_S)
            except (
                SwiftError
            ) as untold:  # the launcher tells of our end, and its author is to see the error itself
                events.emit("failure_untold", rank=self._rank, reason=str(untold))
        raise error
