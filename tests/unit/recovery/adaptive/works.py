"""Works to try: all the shapes that a job may have, with losses of which every stage group keeps a peer."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from swift_ft.planner.schedule import Costs, Work, shared

UNIT = Costs()
"""Each part takes 1, a transfer nothing."""
Lost = Sequence[tuple[int, int]]


def one_each(
    origins: int,
    stages: int,
    microbatches: int,
    *,
    lost: Lost = (),
    split: bool = False,
    factor: float = 1.0,
    costs: Costs = UNIT,
) -> Work:
    """A stage on each worker, with `factor` times the activations of 1F1B."""
    owners = shared(
        group_stages=[[s] for s in range(stages)], origins=origins, microbatches=microbatches, lost=lost
    )
    cap = {s * origins + d: max(1, int((stages - s) * factor)) for s in range(stages) for d in range(origins)}
    return Work(
        stages=stages,
        origins=origins,
        microbatches=microbatches,
        owners=owners,
        split=split,
        costs=costs,
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
    owners = shared(group_stages=group_stages, origins=origins, microbatches=microbatches, lost=lost)

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
