"""Random situations of pipelines with recovery groups of several stages."""

import hypothesis.strategies as st

from swift_ft.planner import Assignment, PlanConfig, RecoveryGroups, Refusals
from tests.unit.recovery.runs import is_inside
from tests.unit.recovery.situations import NEWEST, Situation, inventories, partial_reports


@st.composite
def grouped_situations(draw: st.DrawFn) -> Situation:
    """Four to six stages, some of them in recovery groups of several, of which ranks are lost or behind."""
    places, dp_size = draw(st.integers(4, 6)), draw(st.sampled_from([1, 1, 2]))
    assignment = Assignment.from_reports(
        num_stages=places, stages={rank: (rank // dp_size,) for rank in range(places * dp_size)}
    )
    cuts = sorted(draw(st.sets(st.integers(1, places - 1), min_size=1, max_size=places - 2)))
    groups = RecoveryGroups((0, *cuts), places)
    log = draw(inventories(assignment))
    step = draw(st.integers(2, NEWEST - 2))
    fates = [draw(st.sampled_from(["whole"] * 4 + ["lost", "behind", "half"])) for _ in range(places)]
    return Situation(
        reports=tuple(
            draw(partial_reports(rank, step, fates[rank // dp_size])) for rank in assignment.stages
        ),
        assignment=assignment,
        log={stream: summary for stream, summary in log.items() if not is_inside(stream, assignment, groups)},
        checkpoints=(0,) if draw(st.booleans()) else (step - 1,),
        config=PlanConfig(groups=groups, inexact_undo=draw(st.booleans())),
        refused=Refusals(),
    )
