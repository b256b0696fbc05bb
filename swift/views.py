"""What a View says, in words for people: `swift-ft status`, and the launcher's lines."""

import re

from swift._pb import coordinator_pb2 as pb

_REFUSED = re.compile(r"(rank \d+) refused(?: ([A-Z_]+))?: (.*)", re.DOTALL)


def inexact_words(view: pb.View) -> str:
    """Empty: the bits are those of a run that never failed."""
    if not view.HasField("inexact_since"):
        return ""
    return f"not exact since version {view.inexact_since}: {view.inexact_reason}"


class Told:
    """What a launcher tells of recoveries: those in which everybody restores a checkpoint, or that are not exact.

    One line for each plan. Views may be skipped.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._inexact = False

    def of(self, view: pb.View) -> list[str]:
        lines = self._plan(view)
        if view.HasField("inexact_since") and not self._inexact:
            self._inexact = True
            if not (lines or (view.HasField("plan") and not view.plan.exact)):  # it was said with the plan
                lines = [*lines, inexact_words(view)]
        return lines

    def _plan(self, view: pb.View) -> list[str]:
        plan = view.plan
        if not plan.ranks or view.generation <= self._generation:
            return []
        self._generation = view.generation
        restores = all(entry.strategy == pb.CHECKPOINT for entry in plan.ranks)
        if plan.exact and not restores:
            return []
        exactly = "exact" if plan.exact else "not exact"
        if restores:
            return [f"{_cause(plan.ranks[0].reason)}; restored version {plan.target_version}; {exactly}"]
        return [f"{plan.reason}; {exactly}"]


def _cause(reason: str) -> str:
    """Why everybody restores: "replay refused: rank 2: ...", or the planner's own words."""
    refused = _REFUSED.fullmatch(reason)
    if refused is None:
        return reason
    rank, strategy, why = refused.groups(default="")
    what = {"CATCH_UP": "replay", "REPLICA": "copy"}.get(strategy, strategy.lower().replace("_", " "))
    return f"{what} refused: {rank}: {why}".lstrip()
