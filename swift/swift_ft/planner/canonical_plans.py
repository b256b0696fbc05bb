"""Adaptive pipelines: what the peers of a lost rank compute for it, and in which order (ReCycle, arXiv 2405.14009).

``Work`` is one step of all data-parallel ranks: who computes which microbatch of whose batch at which stage, what each
part takes, and how many activations a rank may hold. ``plan_step`` puts it in an order. ``problems`` checks any order
against the work, by rules that the scheduler does not share. ``Plans`` makes plans ahead, one for all losses that are
alike; ``move`` says where losses had better be. ``period`` is what a step takes between others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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

# Plans ahead. Replicas of a stage are alike, so a plan depends only on how many each stage group has lost.
#
# ``canonical`` counts them. A plan is made for *roles*: role r of a stage group computes origin r's microbatches. The
# first roles are nobody's, or those that make a shorter step. ``Planned.placed`` gives the roles to the workers that
# there are. A worker that is left keeps its own role, unless that is nobody's.
#
# A loss may be moved to another stage group: a worker there takes over the state of the lost one, which costs a copy.
# ``move`` says whether that pays.

_SLACK = 1e-9
Lost = Sequence[tuple[int, int]]
"""(stage group, origin)."""
Counts = tuple[int, ...]
"""How many each stage group has lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """Of which plans are made."""

    group_stages: Sequence[Sequence[int]]
    origins: int
    microbatches: int
    split: bool = False
    costs: Costs = field(default_factory=Costs)
    cap: Sequence[int] | None = None
    """Of each stage group: the activations that a worker may hold. None: any number."""

    def work(self, lost: Lost) -> Work:
        """Raises ValueError if a stage group has nobody left."""
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
    """By stage: the activations that 1F1B holds there, times `factor`, one at least."""
    return tuple(max(1, int((stages - stage) * factor + 1e-9)) for stage in range(stages))


def even(stages: int, factor: float = 1.0) -> tuple[int, ...]:
    """By stage: the activations that 1F1B holds at the first one, which has most, times `factor`."""
    return (one_f_one_b(stages, factor)[0],) * stages


def canonical(lost: Lost, groups: int) -> Counts:
    """The form that all losses with the same plan have."""
    gone = set(lost)
    return tuple(sum(1 for at, _ in gone if at == group) for group in range(groups))


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A step for so many losses."""

    counts: Counts
    lost: Lost
    """Roles that are nobody's: at least so many."""
    work: Work
    step: Step

    def placed(self, lost: Lost) -> tuple[Work, Step]:
        """The same, by the workers that there are. It is as long.

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
    """Of one job, each made once. Up to `losses` of them, one worker more never makes a step longer: if the plan with
    one loss more is shorter, the worker that is there has nothing to do."""

    def __init__(self, job: JobShape, losses: int) -> None:
        self.job = job
        self.losses = losses
        self._made: dict[Counts, Planned] = {}

    def of(self, counts: Counts) -> Planned:
        """Raises ValueError if a stage group has nobody left, or for counts of other stage groups."""
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
        """The shortest of several choices of roles that are nobody's; so many that the time is bounded."""
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
        """Makes the plans for all losses, up to `losses` of them."""
        for total in reversed(range(self.losses + 1)):
            for counts in all_counts(len(self.job.group_stages), total, self.job.origins - 1):
                self.of(counts)

    def document(self) -> list[dict[str, Any]]:
        """As JSON has it."""
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
        """Plans that were made before. Raises ValueError for one that does not do this job's work."""
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
    """Which roles are nobody's: the first ones of each stage group. Or the first ones in all stage groups: then the
    microbatches of some origins are handed out as a whole, and workers that are there have nothing to do. Or that
    only in the stage groups from the first loss on, or up to the last one. Or other roles in each."""
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
    """All counts with so many losses, at most `most` in a stage group; those in the first ones come first."""
    if groups == 0:
        if total == 0:
            yield ()
        return
    for count in range(min(total, most), -1, -1):
        for rest in all_counts(groups - 1, total - count, most):
            yield (count, *rest)


def move(
    counts: Counts, length: Callable[[Counts], float], *, origins: int, move_cost: float, steps: float
) -> Counts:
    """Where the losses had better be. A move costs `move_cost`, in the unit of `length`. It pays if what each step
    saves, times the `steps` until a repair is expected, exceeds that. One loss after the other is moved, to where it
    saves most."""
    while True:
        best, gain = counts, 0.0
        now = length(counts)
        for source, lost in enumerate(counts):
            for to, there in enumerate(counts):
                if source == to or not lost or there + 1 >= origins:
                    continue
                changed = list(counts)
                changed[source] -= 1
                changed[to] += 1
                saved = (now - length(tuple(changed))) * steps - move_cost
                if saved > gain + 1e-9:
                    best, gain = tuple(changed), saved
        if best == counts:
            return counts
        counts = best
