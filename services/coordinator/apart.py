"""Jobs whose rows in the store are damaged: nothing is done for them, and others are served."""

from collections.abc import Callable, Set

from services.coordinator.row import JobRow
from swift import events
from swift._pb import coordinator_pb2 as pb


class JobApart(Exception):
    """Nothing is done for this job: what is stored of it is damaged."""


class Apart:
    """Those that were found at the start."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def row_of(
        self, name: str, revision: int, text: str, names_there: Set[str] = frozenset()
    ) -> JobRow | None:
        """None: it is damaged, and its job set apart; so is the one that it says to be of, if it has no other row."""
        names = {name}
        try:
            row = JobRow.from_json(text)
            if (row.job, row.revision) == (name, revision):
                return row
            names |= {row.job} - names_there
            why = f"it is revision {row.revision} of job {row.job}, and stands for {revision} of {name}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it cannot be read: {error!r}"
        for one in sorted(names):
            self._why[one] = (
                f"job {one} is set apart, others are served: the coordinator's row of it is damaged ({why}); put a "
                "copy of coordinator.sqlite back, or start the job under another name with --from-job"
            )
            events.emit("job_set_apart", job=one, reason=why)
        return None

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
