"""Classifies errors that end a step: a failure's consequence, a step to repeat, or the end of the job.

An operator may allow retries of a trainer's own exceptions.

A rank accuses no other rank. It reports the broken connection and waits for a newer generation of the coordinator.
"""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from swift_ft import events
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.comm.backend import Misspeculated, advice_on, clear_frames, words_of
from swift_ft.comm.process_groups import Interrupted
from swift_ft.device import cause_on_device
from swift_ft.errors import (
    LogError,
    LogUnavailable,
    ReplayRefused,
    ServiceError,
    SwiftError,
    UsageError,
    is_difference,
)
from swift_ft.text import tell
from swift_ft.train.coordinator_session import RESAY_S
from swift_ft.train.participants import Site

# A trainer's own exception in a step ends the job, unless the operator allows the step to be repeated.
#
# `swift-ft run --retry-exceptions N` allows N retries per step. A step that raises the same exception twice would raise
# it a third time, so the second one ends the job.

ENV_RETRIES = "SWIFT_RETRY_EXCEPTIONS"


class Retries:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._allowed = int(os.environ.get(ENV_RETRIES) or 0)
        self._step = -1
        self._raised: list[str] = []  # by that step
        self._newest: BaseException | None = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Encloses the trainer's function: exceptions from it are the trainer's own."""
        if step > self._step:
            self._step, self._raised = step, []
        self._newest = None
        try:
            yield
        except Exception as error:
            self._newest = error
            raise

    def again(self, error: Exception) -> str:
        """Returns the reason to repeat the step, or "" if it is not repeated. Prints the error, which would otherwise
        be lost."""
        if not self._allowed or error is not self._newest or isinstance(error, SwiftError):
            return ""
        words = words_of(error)
        known, self._raised = words in self._raised, [*self._raised, words]
        if known or len(self._raised) > self._allowed:
            return ""
        with suppress(OSError, ValueError):
            traceback.print_exception(error)
            tell(
                f"rank {self._rank}: step {self._step} is done again "
                f"({len(self._raised)} of --retry-exceptions {self._allowed})"
            )
        return f"step {self._step} raised {words}, and is done again"


_NOTICE_POLL_S = 0.005
_FAIL_S = 5.0
"""Seconds for which a rank that ends with an error tries to report it to the coordinator."""


class Failures:
    def __init__(self, site: Site, retries: Retries) -> None:
        self._site = site
        self._retries = retries

    def handle(self, error: Exception, generation: int) -> None:
        """Returns if the error is a failure's consequence (a newer generation is published); otherwise raises it.

        `generation` in which it was raised.
        """
        self._leave_if_device_is_lost(error)
        clear_frames(error)
        if self._site.member.noticed:
            self.await_notice(error)
        elif isinstance(error, ReplayRefused | LogError):
            refuse = pb.RefuseRequest(generation=generation, reason=str(error), differs=is_difference(error))
            self._await_notice(error, lambda: self._site.member.client.call(refuse))
        elif (
            self._site.communicator.lost_peer(error)
            or isinstance(error, LogUnavailable)
            or self._site.communicator.broken is not None  # the trainer's error may be a consequence
        ):
            # The coordinator decides: it learns of a death from a launcher or from the lease. If there was none, all
            # ranks continue together in a new generation.
            self.await_notice(error, generation)
        elif isinstance(error, Misspeculated):
            self.await_notice(error, generation, str(error))
        elif again := self._retries.again(error):
            self.await_notice(error, generation, again)
        else:
            self._fail(error)

    def await_notice(self, error: Exception, suspected_in: int = 0, again: str = "") -> None:
        """Returns once a newer generation is published. Raises Fenced or JobFailed, or the error itself if none comes.

        `suspected_in`: generation whose connections broke; it is reported to the coordinator. `again`: reason to repeat
        the step if the error was not a broken connection but the trainer's own.
        """
        self._leave_if_device_is_lost(error)
        words = again or words_of(error)

        def suspect() -> None:
            request = pb.SuspectRequest(generation=suspected_in, reason=words, again=bool(again))
            self._site.member.client.call(request)

        self._await_notice(
            error,
            suspect if suspected_in else None,
        )

    def _leave_if_device_is_lost(self, error: Exception) -> None:
        """Ends this process if a device's error has caused this one: no later call on that device works, so this rank
        has nothing to offer in a recovery. At once: the launcher then checks the place and replaces the rank."""
        broken = self._site.communicator.broken
        if cause_on_device(error) is None and (broken is None or cause_on_device(broken) is None):
            return
        reason = words_of(error)
        events.emit("device_lost", rank=self._site.rank, reason=reason)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            tell(
                f"rank {self._site.rank} has lost its device, and ends so that another process takes its place: "
                f"{reason}"
            )
        os._exit(ServiceError.exit_code)

    def _await_notice(self, error: Exception, statement: Callable[[], None] | None) -> None:
        """Waits for a newer generation. `statement` is the report to the coordinator, repeated meanwhile."""
        deadline = time.monotonic() + self._site.config.suspicion_timeout_s
        said_at = -math.inf
        while not self._site.member.noticed:
            if time.monotonic() > deadline:
                self._fail(error)
            if statement is not None and time.monotonic() - said_at > RESAY_S:
                deadline = self._say(statement, deadline)
                said_at = time.monotonic()
            time.sleep(_NOTICE_POLL_S)
        try:
            self._site.member.check()
        except Interrupted:
            return

    def _say(self, statement: Callable[[], None], deadline: float) -> float:
        """Makes the report and returns the new deadline for a newer generation. Time in which the coordinator does not
        answer does not count, since it cannot publish one then."""
        began = time.monotonic()
        if not self._site.member.say(statement):
            return math.inf
        now = time.monotonic()
        return min(deadline + now - began, now + self._site.config.suspicion_timeout_s)

    def _fail(self, error: Exception) -> None:
        """Ends the job and raises the error. A UsageError is not reported: the launcher takes it from the exit code."""
        if not isinstance(error, UsageError):
            try:
                reason = words_of(error)[:400] + advice_on(error)
                self._site.member.client.call(pb.FailRequest(reason=reason), patience_s=_FAIL_S)
            except (
                SwiftError
            ) as untold:  # the launcher reports this exit; the author must see the error itself
                events.emit("failure_untold", rank=self._site.rank, reason=str(untold))
        raise error
