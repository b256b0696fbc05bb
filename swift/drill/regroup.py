"""Other recovery groups while the drill's job runs: what is asked for, and what the trace says came of it. Pure.

::

    step=8,groups=0-1,2-3                training stands before step 8 until an operator's command has said so
    step=8,by=12,groups=0-1,2-3          and before step 12 until they are in force
    step=8,storage-cap=800kB             from step 8 on, while training goes on: the groups that `swift-ft plan`
                                         chooses for what the job has measured by then
    step=8,until=50,storage-cap=800kB    and before step 50 training waits for that
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift.drill.timeline import Event
from swift.drill.verdict_checks import Check
from swift.errors import UsageError
from swift.recovery.groups import RecoveryGroups

_SPEC = re.compile(
    r"step=(\d{1,9})(?:,until=(\d{1,9}))?(?:,by=(\d{1,9}))?,(?:groups=(.+)|storage-cap=([^,]+))"
)
_SHOWN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Regroup:
    """One `--regroup`."""

    step: int
    until: int | None = None
    """The step before which training waits until the command is done."""
    by: int | None = None
    """The step before which training waits until the groups are in force."""
    groups: RecoveryGroups | None = None
    """None: by plan."""
    storage_cap: str = ""

    def __str__(self) -> str:
        until = "" if self.until in (None, self.step) else f"until={self.until},"
        by = "" if self.by is None else f"by={self.by},"
        what = f"storage-cap={self.storage_cap}" if self.groups is None else f"groups={self.groups.name}"
        return f"step={self.step},{until}{by}{what}"

    def words(self) -> list[str]:
        """For `swift-ft plan --coordinator … --job … --apply`."""
        if self.groups is not None:
            return ["--groups", self.groups.name]
        return ["--machine-per-rank", "--storage-cap", self.storage_cap]


def parse(spec: str) -> Regroup:
    """UsageError, in one line, for what is none."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"--regroup {spec!r}: write step=8,groups=0-1,2-3 or step=8,storage-cap=800kB")
    try:
        groups = None if match[4] is None else RecoveryGroups.parse(match[4])
    except ValueError as error:
        raise UsageError(f"--regroup {spec!r}: {error}") from None
    step, until, by = (None if word is None else int(word) for word in match.group(1, 2, 3))
    assert step is not None
    if until is None and groups is not None:
        until = step
    return Regroup(step=step, until=until, by=by, groups=groups, storage_cap=match[5] or "")


def check(regroups: Sequence[Regroup], first: RecoveryGroups, stages: int, steps: int) -> None:
    """UsageError: a pipeline with a stage on each rank cannot have them. `first`: the groups that it begins with."""
    if regroups and not first.starts:
        raise UsageError("--regroup needs --groups: what the job begins with")
    for groups in [first, *(regroup.groups for regroup in regroups)] if regroups else []:
        if groups is None:
            continue
        if problem := groups.problem(stages, {stage: [stage] for stage in range(stages)}):
            raise UsageError(f"--regroup: {problem}")
        if not groups.logs:
            raise UsageError(
                f"--regroup: nothing is logged within one group of all ({groups}); give two or more"
            )
    for regroup in regroups:
        points = [step for step in (regroup.step, regroup.until, regroup.by) if step is not None]
        if points != sorted(points) or points[-1] >= steps:
            raise UsageError(f"--regroup {regroup}: its steps must ascend and be below --steps {steps}")
    if any(a.step >= b.step for a, b in itertools.pairwise(regroups)):
        raise UsageError("--regroup: give them in the order of their steps, no two in one step")


def id_of(index: int) -> str:
    return f"regroup{index}"


def pauses(regroups: Sequence[Regroup]) -> dict[str, int]:
    """id -> the step before which training stands still until the drill has made its `.go`."""
    until = {id_of(n): regroup.until for n, regroup in enumerate(regroups) if regroup.until is not None}
    return until | {
        f"{id_of(n)}.by": regroup.by for n, regroup in enumerate(regroups) if regroup.by is not None
    }


# --- what came of it ---


@dataclass(frozen=True, kw_only=True, slots=True)
class InForce:
    groups: str
    since: int
    """The version from which on a replay may begin by these."""


def history(first: RecoveryGroups, events: Sequence[Event]) -> list[InForce]:
    """The groups in force, one after the other, as the coordinator says."""
    in_force = [InForce(groups=str(first), since=0)]
    for event in events:
        if event["event"] == "groups" and event["in_force"] != in_force[-1].groups:
            in_force.append(InForce(groups=event["in_force"], since=int(event["since"])))
    return in_force


def section(
    regroups: Sequence[Regroup], first: RecoveryGroups, events: Sequence[Event]
) -> tuple[dict[str, Any] | None, list[Check]]:
    """`regroups` of the report's prediction; (None, []) without any."""
    if not regroups:
        return None, []
    had = history(first, events)
    asked = {event["id"]: event for event in events if event["event"] == "regroup"}
    told = [asked.get(id_of(n)) for n in range(len(regroups))]
    wanted = [groups for event in events for groups in _wanted(event)]
    refused = [str(event["said"]) for event in told if event is not None and event["exit_code"] != 0]
    came = [entry.groups for entry in had[1:]]
    answer: bool | None = None if None in told else not refused and came == wanted
    detail = "; ".join(refused) or f"wanted {wanted}, in force one after the other {came}"
    wrong = list(_wrongly_logged(had, events))
    if len(wrong) > _SHOWN:
        wrong[_SHOWN:] = [f"and {len(wrong) - _SHOWN} more"]
    shown = {
        "asked": [
            {"spec": str(regroup), "said": None if event is None else event["said"]}
            for regroup, event in zip(regroups, told, strict=True)
        ],
        "in_force": [{"groups": entry.groups, "since": entry.since} for entry in had],
        "logged_from": {entry.groups: _logged_from(entry.groups, events) for entry in had[1:]},
    }
    return shown, [
        Check("the job took the other groups", answer, detail),
        Check("every step is logged by the groups in force", not wrong, "; ".join(wrong)),
    ]


def logged_by(event: Event, first: RecoveryGroups) -> tuple[str, ...]:
    """The groups by which a rank logged a step."""
    return tuple(event.get("logged_by") or [str(first)])


def _wrongly_logged(had: Sequence[InForce], events: Sequence[Event]) -> Iterator[str]:
    """From the version on since when groups are in force, every step of every rank is logged by them, replayed ones
    too, until the next ones are; a replayed step by no others than were in force or wanted since its plan was made; and
    the last step by nothing else."""
    bounds = [*(entry.since for entry in had[1:]), None]
    last: dict[int, Event] = {}
    known = {entry.groups for entry in had}
    known |= {groups for event in events for groups in _wanted(event)}
    now = {had[0].groups}
    since_plan = set(now)
    for event in events:
        if event["event"] == "groups":
            now = {event["in_force"], *_wanted(event)}
            since_plan |= now
        elif event["event"] == "plan":
            since_plan = set(now)
        if event["event"] != "profiled":
            continue
        step, by = int(event["step"]), event["logged_by"]
        last[event["rank"]] = event
        if event["replay"] and (others := set(by) - since_plan):
            yield f"step {step} of rank {event['rank']}, replayed, by {sorted(others)} as well"
        for entry, until in zip(had, bounds, strict=True):
            if entry.since <= step and (until is None or step < until) and entry.groups not in by:
                yield f"step {step} of rank {event['rank']} by {by}, not {entry.groups}"
        if unknown := set(by) - known:
            yield f"step {step} of rank {event['rank']} by {sorted(unknown)}, which nobody wanted"
    for rank, event in sorted(last.items()):
        if event["logged_by"] != [had[-1].groups]:
            yield f"the last step of rank {rank} by {event['logged_by']}, not by {had[-1].groups} alone"


def _wanted(event: Event) -> list[str]:
    """The other groups that it says are to come."""
    if event["event"] != "groups" or not event["wanted"]:
        return []
    return [str(RecoveryGroups.parse(event["wanted"]))]


def _logged_from(groups: str, events: Sequence[Event]) -> Mapping[str, int]:
    """rank -> the first step that it logged by these."""
    steps: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        if event["event"] == "profiled" and groups in event["logged_by"]:
            steps[str(event["rank"])].append(int(event["step"]))
    return {rank: min(of) for rank, of in sorted(steps.items())}
