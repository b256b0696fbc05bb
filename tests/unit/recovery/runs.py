"""Random recovery groups, and which streams pass inside of one."""

import hypothesis.strategies as st

from swift_ft.planner import Assignment, RecoveryGroups


@st.composite
def recovery_groups(draw: st.DrawFn, assignment: Assignment) -> RecoveryGroups:
    """None, or runs of stages that no rank is parted by."""
    stages = range(1, assignment.num_stages)
    cuts = [stage for stage in stages if draw(st.booleans())] if draw(st.booleans()) else list(stages)
    run_of = [sum(cut <= stage for cut in cuts) for stage in range(assignment.num_stages)]
    if any(len({run_of[stage] for stage in mine}) > 1 for mine in assignment.stages.values()):
        return RecoveryGroups() if draw(st.booleans()) else RecoveryGroups((0,), assignment.num_stages)
    return draw(st.sampled_from([RecoveryGroups(), RecoveryGroups((0, *cuts), assignment.num_stages)]))


def is_inside(stream: str, assignment: Assignment, groups: RecoveryGroups) -> bool:
    """Only stages of the same recovery group receive it."""
    for stage in range(assignment.num_stages):
        for kind, to in (("F", stage + 1), ("B", stage - 1)):
            names = {name(stage, kind, c, dp_size) for dp_size in (1, 2, 3) for c in range(dp_size)}
            if stream in names and 0 <= to < assignment.num_stages:
                return to in groups.stages(stage)
    return False


def name(stage: int, kind: str, dp_rank: int, dp_size: int) -> str:
    return f"s{stage}.{kind}" if dp_size == 1 else f"s{stage}c{dp_rank}.{kind}"
