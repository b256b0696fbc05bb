"""Jobs that are a trouble of their own: others are served all the same.

A row in the store may be damaged. Or the coordinator makes an error with a job: then its memory of it may be half-way,
and it goes back to what is durable (`Driver`). If that comes again and again, the job is set apart: nothing is done for
it until the coordinator is started again.
"""

from collections import deque
from collections.abc import Callable, Mapping

from services.coordinator.parts import decode
from services.coordinator.row import JobRow
from swift import events
from swift._pb import coordinator_pb2 as pb

ERRORS_MAX = 3
"""Errors with one job within `WITHIN_S`. The last of them sets it apart."""
WITHIN_S = 60.0


class JobApart(Exception):
    """Nothing is done for this job."""


class Apart:
    """Those that were found."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}
        self._errors: dict[str, deque[float]] = {}
        """When, of the last ones."""

    def row_of(self, name: str, parts: Mapping[str, str]) -> JobRow | None:
        """None: what these parts say cannot be believed, and the job is set apart."""
        try:
            row = decode(name, parts)
            if row.job == name:
                return row
            why = f"it is of job {row.job}, and stands for {name}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it cannot be read: {error!r}"
        words = f"the coordinator's row of it is damaged ({why}); put a copy of coordinator.sqlite back"
        self._set(name, f"{words}, or start the job under another name", why)
        return None

    def is_repeated(self, name: str, error: str, now: float) -> bool:
        """The coordinator has made an error with it. True: once too often, and the job is set apart."""
        times = self._errors.setdefault(name, deque(maxlen=ERRORS_MAX))
        times.append(now)
        if len(times) < ERRORS_MAX or now - times[0] > WITHIN_S:
            return False
        self.put(name, error)
        return True

    def put(self, name: str, error: str) -> None:
        """Sets it apart for an error that would come again."""
        words = (
            f"the coordinator makes an error with it ({error}), which is a bug; its state is kept, report it"
        )
        self._set(name, f"{words}, and start the coordinator again, or the job under another name", error)

    def _set(self, name: str, words: str, why: str) -> None:
        self._why[name] = f"job {name} is set apart, others are served: {words}"
        events.emit("job_set_apart", job=name, reason=why)

    def __contains__(self, name: str) -> bool:
        return name in self._why

    def check(self, name: str) -> None:
        """Raises JobApart."""
        if name in self._why:
            raise JobApart(self._why[name])

    def summaries(self, may_see: Callable[[str], bool]) -> list[pb.JobSummary]:
        return [
            pb.JobSummary(job=name, state=pb.FAILED, reason=why)
            for name, why in sorted(self._why.items())
            if may_see(name)
        ]
