"""Adaptive pipelines: the work of a lost rank's peers in its place, and the order of it (ReCycle, arXiv 2405.14009).

``Work`` is one step of all data-parallel ranks: the owner of every microbatch of every batch at every stage, the time
of each part, and how many activations a rank may hold. ``plan_step`` orders it. ``problems`` checks any order against
the work, by rules that the scheduler does not share. ``Plans`` plans ahead, once for all equivalent losses. ``period``
is the time of a step among others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swift_ft.planner.schedule import (
    ACTIONS_MAX,
    Action,
    Costs,
    Step,
    Timed,
    Work,
    plan_step,
    problems,
    shared,
)

# Plans ahead. Replicas of a stage are interchangeable, so a plan depends only on how many each stage group has lost.
#
# ``canonical`` counts them. A plan is computed for *roles*: role r of a stage group computes origin r's microbatches.
# The unfilled roles are the first ones, or those that give a shorter step. ``Planned.placed`` assigns the roles to the
# existing workers. A remaining worker keeps its own role, unless that one is unfilled.

_SLACK = 1e-9
Lost = Sequence[tuple[int, int]]
"""(stage group, origin) of each lost worker."""
Counts = tuple[int, ...]
"""The number of losses in each stage group."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """The job for which plans are computed."""

    group_stages: Sequence[Sequence[int]]
    origins: int
    microbatches: int
    split: bool = False
    costs: Costs = field(default_factory=Costs)
    cap: Sequence[int] | None = None
    """By stage group: the most activations that a worker may hold. None: any number."""

    def work(self, lost: Lost) -> Work:
        """Returns the work of a step with these losses. Raises ValueError if a stage group has no worker left."""
        owners = shared(
            group_stages=self.group_stages, origins=self.origins, microbatches=self.microbatches, lost=lost
        )
        cap = None
        if self.cap is not None:
            cap = {
                group * self.origins + origin: most
                for group, most in enumerate(self.cap)
                for origin in range(self.origins)
            }
        return Work(
            stages=sum(map(len, self.group_stages)),
            origins=self.origins,
            microbatches=self.microbatches,
            owners=owners,
            split=self.split,
            costs=self.costs,
            cap=cap,
        )


def one_f_one_b(stages: int, factor: float = 1.0) -> tuple[int, ...]:
    """Returns, by stage, the activations that 1F1B holds there, times `factor`, at least one."""
    return tuple(max(1, int((stages - stage) * factor + 1e-9)) for stage in range(stages))


def even(stages: int, factor: float = 1.0) -> tuple[int, ...]:
    """Returns, for every stage, the activations that 1F1B holds at the first one, which has most, times `factor`."""
    return (one_f_one_b(stages, factor)[0],) * stages


def canonical(lost: Lost, groups: int) -> Counts:
    """Returns the losses of each stage group: losses with the same counts have the same plan."""
    gone = set(lost)
    return tuple(sum(1 for at, _ in gone if at == group) for group in range(groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A step for given counts of losses."""

    counts: Counts
    lost: Lost
    """The unfilled roles: at least as many as the counts."""
    work: Work
    step: Step

    def placed(self, lost: Lost) -> tuple[Work, Step]:
        """Returns the plan with its roles assigned to the remaining workers. Its length is the same.

        Raises ValueError for other counts.
        """
        origins = self.work.origins
        if canonical(lost, len(self.counts)) != self.counts:
            raise ValueError(f"a plan for losses of {self.counts} is not one for {sorted(lost)}")
        number: dict[int, int] = {}
        for group in range(len(self.counts)):
            there = [origin for origin in range(origins) if (group, origin) not in lost]
            roles = [role for role in range(origins) if (group, role) not in self.lost]
            free = [origin for origin in there if origin not in roles]
            for role in roles:
                number[group * origins + role] = group * origins + (role if role in there else free.pop(0))
        owners = {at: tuple(number[worker] for worker in workers) for at, workers in self.work.owners.items()}
        slots = {number[worker]: row for worker, row in self.step.slots.items()}
        cap = self.work.cap
        if cap is not None:
            cap = {number.get(worker, worker): most for worker, most in cap.items() if worker in number}
        work = replace(self.work, owners=owners, cap=cap)
        return work, Step(slots={worker: slots[worker] for worker in sorted(slots)})


class Plans:
    """The plans of one job, each computed once. Up to `losses`, an additional worker never makes a step longer: if the
    plan with one more loss is shorter, it is used, and one worker stays idle."""

    def __init__(self, job: JobShape, losses: int) -> None:
        self.job = job
        self.losses = losses
        self._made: dict[Counts, Planned] = {}

    def of(self, counts: Counts) -> Planned:
        """Returns the plan for these counts. Raises ValueError if a stage group has no worker left, or for counts of
        other stage groups."""
        groups = len(self.job.group_stages)
        if len(counts) != groups or not all(0 <= count < self.job.origins for count in counts):
            raise ValueError(
                f"losses of {counts}: {groups} stage groups lose 0 to {self.job.origins - 1} each"
            )
        if counts not in self._made:
            best = self._direct(counts)
            if sum(counts) < self.losses and best.step.length > best.work.bound():
                for more in _one_more(counts, self.job.origins):
                    other = self.of(more)
                    if other.step.length < best.step.length:
                        best = replace(other, counts=counts)
            self._made[counts] = best
        return self._made[counts]

    def _direct(self, counts: Counts) -> Planned:
        """Returns the shortest plan among several choices of unfilled roles, whose number bounds the time."""
        best: Planned | None = None
        job = self.job
        actions = sum(map(len, job.group_stages)) * job.origins * job.microbatches * (3 if job.split else 2)
        choices = list(_choices(counts, job.origins))[: 1 + ACTIONS_MAX // actions]
        for lost in choices:
            work = job.work(lost)
            step = plan_step(work, actions_max=ACTIONS_MAX // len(choices))
            if best is None or step.length < best.step.length - _SLACK:
                best = Planned(counts=counts, lost=lost, work=work, step=step)
            if best.lost == lost and step.length <= work.bound() + _SLACK and len(lost) == sum(counts):
                break
        assert best is not None
        return best

    def ahead(self) -> None:
        """Computes the plans for all combinations of at most `losses` losses."""
        for total in reversed(range(self.losses + 1)):
            for counts in all_counts(len(self.job.group_stages), total, self.job.origins - 1):
                self.of(counts)

    def document(self) -> list[dict[str, Any]]:
        """Returns all plans in a form that JSON can encode."""
        return [
            {
                "counts": list(counts),
                "lost": [list(at) for at in planned.lost],
                "slots": {
                    str(worker): [[slot.begin, slot.end, *slot.action] for slot in row]
                    for worker, row in planned.step.slots.items()
                },
            }
            for counts, planned in sorted(self._made.items())
        ]

    def load(self, document: Sequence[Mapping[str, Any]]) -> None:
        """Loads plans computed before. Raises ValueError for one that does not do this job's work."""
        for entry in document:
            lost = [(int(group), int(role)) for group, role in entry["lost"]]
            counts = tuple(map(int, entry["counts"]))
            slots = {
                int(worker): [
                    Timed(float(begin), float(end), Action(str(kind), int(stage), int(origin), int(mb)))
                    for begin, end, kind, stage, origin, mb in row
                ]
                for worker, row in entry["slots"].items()
            }
            work, step = self.job.work(lost), Step(slots=slots)
            gone = canonical(lost, len(self.job.group_stages))
            if len(counts) != len(gone) or any(
                more < count for more, count in zip(gone, counts, strict=True)
            ):
                raise ValueError(f"a plan for losses of {counts} lacks the workers of {gone}")
            if wrong := problems(work, step):
                raise ValueError(f"a plan for losses of {counts} is of another job: {wrong[0]}")
            self._made[counts] = Planned(counts=counts, lost=lost, work=work, step=step)


def _choices(counts: Counts, origins: int) -> Iterator[Lost]:
    """Yields choices of the unfilled roles: the first ones of each stage group. Or equally many first ones in all stage
    groups: then the microbatches of some origins are redistributed as a whole, and some remaining workers stay idle. Or
    that only in the stage groups from the first loss on, or up to the last one. Or different roles in each."""
    most, groups = max(counts, default=0), range(len(counts))
    lossy = [group for group in groups if counts[group]] or [0]
    spans = [groups, range(lossy[0], len(counts)), range(lossy[-1] + 1)]
    shapes = [counts, *(tuple(most if g in span else counts[g] for g in groups) for span in spans)]
    for shape in dict.fromkeys(shapes):
        yield [(group, role) for group in groups for role in range(shape[group])]
    apart, taken = [], 0
    for group in groups:
        apart += [(group, (taken + n) % origins) for n in range(counts[group])]
        taken += counts[group]
    if len(lossy) > 1:
        yield apart


def _one_more(counts: Counts, origins: int) -> Iterator[Counts]:
    for group, count in enumerate(counts):
        if count + 1 < origins:
            yield (*counts[:group], count + 1, *counts[group + 1 :])


def all_counts(groups: int, total: int, most: int) -> Iterator[Counts]:
    """Yields all counts with this total, at most `most` in a stage group; losses in the first groups come first."""
    if groups == 0:
        if total == 0:
            yield ()
        return
    for count in range(min(total, most), -1, -1):
        for rest in all_counts(groups - 1, total - count, most):
            yield (count, *rest)
