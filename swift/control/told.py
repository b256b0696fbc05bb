"""What a launcher tells people of its job, from the Views that it sees."""

import math
import re

from swift._pb import coordinator_pb2 as pb
from swift.control.plans import of_view
from swift.views import STARTED_AGAIN, inexact_words

LATE_S = 20.0
"""After which a launcher says what the job waits for: longer than it takes to miss a rank and to start another one."""
_REFUSED = re.compile(r"(rank \d+) refused(?: ([A-Z_]+))?: (.*)", re.DOTALL)


class Told:
    """What a launcher tells of recoveries: those in which everybody restores a checkpoint, or that are not exact; and
    what one waits for that does not come to a plan.

    One line for each plan. Views may be skipped.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._inexact = False
        self._waits_for = ""
        self._late_at = math.inf

    def of(self, view: pb.View) -> list[str]:
        lines = self._plan(view)
        if view.HasField("inexact_since") and not self._inexact:
            self._inexact = True
            if not (lines or (view.HasField("plan") and not view.plan.exact)):  # it was said with the plan
                lines = [*lines, inexact_words(view)]
        return lines

    def late(self, view: pb.View | None, now: float) -> str:
        """What the job has waited for since `LATE_S`, once; empty: nothing, or that is not so long ago."""
        waits = view is not None and view.state in (pb.FORMING, pb.FENCING, pb.PLANNING)
        waits_for = view.waiting_for if view is not None and waits else ""
        if waits_for != self._waits_for:
            self._waits_for, self._late_at = waits_for, now + LATE_S
        if not waits_for or now < self._late_at:
            return ""
        self._late_at = math.inf
        return f"the job has waited for {LATE_S:g} s for {waits_for}{_way_on(waits_for)}"

    def _plan(self, view: pb.View) -> list[str]:
        if view.generation <= self._generation or (published := of_view(view)) is None:
            return []
        self._generation, plan = view.generation, published.plan
        if plan.exact and not plan.restores:
            return []
        exactly = "exact" if plan.exact else "not exact"
        if plan.restores and view.reason.startswith(STARTED_AGAIN):
            return [f"{view.reason}; {exactly}"]
        if plan.restores:
            return [f"{_cause(plan.ranks[0].reason)}; restored version {plan.target_version}; {exactly}"]
        return [f"{plan.reason}; {exactly}"]


def _way_on(waits_for: str) -> str:
    ways = []
    if "to join" in waits_for:
        ways.append("if a machine is lost, start the same command on another one")
    if waits_for.startswith("log server "):
        ways.append("if a log server is lost for good, swift-ft logs --lost names it, and --add another one")
    return f" ({'; '.join(ways)})" if ways else ""


def _cause(reason: str) -> str:
    """Why everybody restores: "replay refused: rank 2: ...", or the planner's own words."""
    refused = _REFUSED.fullmatch(reason)
    if refused is None:
        return reason
    rank, strategy, why = refused.groups(default="")
    what = {"CATCH_UP": "replay", "REPLICA": "copy"}.get(strategy, strategy.lower().replace("_", " "))
    return f"{what} refused: {rank}: {why}".lstrip()
