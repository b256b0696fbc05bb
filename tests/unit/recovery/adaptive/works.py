"""Works to try: all the shapes that a job may have, with losses of which every stage group keeps a peer."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from hypothesis import strategies as st

from swift_ft.planner import Assignment
from swift_ft.planner.schedule import Costs, Step, Work, needs, owners_of

Lost = Sequence[tuple[int, int]]


def shared(
    group_stages: Sequence[Sequence[int]], origins: int, microbatches: int, lost: Lost
) -> dict[tuple[int, int], tuple[int, ...]]:
    """The owners where (stage group, origin) of `lost` are lost; worker numbers are group * origins + origin."""
    stages = {g * origins + d: mine for g, mine in enumerate(group_stages) for d in range(origins)}
    members = {worker: worker for worker in stages if divmod(worker, origins) not in lost}
    job = Assignment.from_reports(num_stages=sum(map(len, group_stages)), stages=stages, members=members)
    return owners_of(job.rerouted(), microbatches)


def problems(work: Work, step: Step) -> list[str]:
    """What is wrong with a step; empty if every action is done once, by its owner, after its inputs, within memory."""
    at = {slot.action: (worker, slot) for worker, row in step.slots.items() for slot in row}
    if sorted((worker, slot.action) for worker, row in step.slots.items() for slot in row) != sorted(
        work.actions()
    ):
        return ["other actions are done, or by others"]
    found = []
    for worker, row in step.slots.items():
        if any(behind.begin < before.end - 1e-9 for before, behind in pairwise(row)):
            found.append(f"worker {worker} does two things at a time")
        held = accumulate((s.action.kind == "F") - (s.action.kind == work.adds()) for s in row)
        if work.cap is not None and max(held) > work.cap[worker]:
            found.append(f"worker {worker} holds too many activations")
    for action, (worker, slot) in at.items():
        if slot.end - slot.begin < work.costs.of(action.kind, action.stage) - 1e-9:
            found.append(f"{action} takes too little time")
        for source, given in map(at.__getitem__, needs(work, action)):
            if slot.begin < given.end + (work.costs.transfer if source != worker else 0.0) - 1e-9:
                found.append(f"{action} begins before {given.action} is there")
    return found


def one_each(
    origins: int,
    stages: int,
    microbatches: int,
    *,
    lost: Lost = (),
    split: bool = False,
    factor: float = 1.0,
) -> Work:
    """A stage on each worker, with `factor` times the activations of 1F1B. Each part takes 1, a transfer nothing."""
    owners = shared([[s] for s in range(stages)], origins, microbatches, lost)
    cap = {s * origins + d: max(1, int((stages - s) * factor)) for s in range(stages) for d in range(origins)}
    return Work(
        stages=stages,
        origins=origins,
        microbatches=microbatches,
        owners=owners,
        split=split,
        costs=Costs(),
        cap=cap,
    )


def one_f_one_b_length(work: Work) -> float:
    """Of the step of such a work that nobody has failed in; each part takes 1."""
    return 3.0 * (work.microbatches + work.stages - 1)


@st.composite
def losses(draw: st.DrawFn, groups: int, origins: int) -> list[tuple[int, int]]:
    """Of each stage group, all but one at most."""
    lost = []
    for group in range(groups):
        gone = draw(st.sets(st.integers(0, origins - 1), max_size=origins - 1))
        lost += [(group, origin) for origin in sorted(gone)]
    return lost


def times() -> st.SearchStrategy[float]:
    return st.sampled_from([0.0, 0.25, 0.3, 1.0, 1.7, 2.0])


@st.composite
def works(draw: st.DrawFn, *, lossless: bool = False) -> Work:
    """Any."""
    groups, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    origins, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    stages = groups * chunks
    group_stages = [list(range(group, stages, groups)) for group in range(groups)]
    lost = [] if lossless else draw(losses(groups, origins))
    owners = shared(group_stages, origins, microbatches, lost)

    def each(strategy: st.SearchStrategy[float]) -> tuple[float, ...]:
        size = draw(st.sampled_from([1, stages]))
        return tuple(draw(st.lists(strategy, min_size=size, max_size=size)))

    costs = Costs(
        forward=each(times()),
        backward_input=each(times()),
        backward_weight=each(times()),
        transfer=draw(st.sampled_from([0.0, 0.0, 0.1, 2.0])),
    )
    work = Work(
        stages=stages, origins=origins, microbatches=microbatches, owners=owners, split=draw(st.booleans())
    )
    work = replace(work, costs=costs)
    if draw(st.booleans()):
        cap = {worker: len(held) + draw(st.integers(0, 3)) for worker, held in work.stages_of().items()}
        work = replace(work, cap=cap)
    return work
