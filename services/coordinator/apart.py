"""Jobs whose rows in the store are damaged: nothing is done for them, and others are served."""

from collections.abc import Callable, Mapping

from services.coordinator.parts import decode
from services.coordinator.row import JobRow
from swift import events
from swift._pb import coordinator_pb2 as pb


class JobApart(Exception):
    """Nothing is done for this job: what is stored of it is damaged."""


class Apart:
    """Those that were found at the start."""

    def __init__(self) -> None:
        self._why: dict[str, str] = {}

    def row_of(self, name: str, parts: Mapping[str, str]) -> JobRow | None:
        """None: what these parts say cannot be believed, and the job is set apart."""
        try:
            row = decode(name, parts)
            if row.job == name:
                return row
            why = f"it is of job {row.job}, and stands for {name}"
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it cannot be read: {error!r}"
        self._why[name] = (
            f"job {name} is set apart, others are served: the coordinator's row of it is damaged ({why}); put a copy "
            "of coordinator.sqlite back, or start the job under another name with --from-job"
        )
        events.emit("job_set_apart", job=name, reason=why)
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
