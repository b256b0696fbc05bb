"""The log is given up in any case: no plan reads it."""

from functools import partial

from swift_ft.planner import Plan, PlanConfig, Refusals, Report, plan, without_log
from tests.unit.recovery.test_helping import said
from tests.unit.recovery.test_plan import full_log, one_stage_each

AT_15 = (5, 15)


def planned(reports: list[Report]) -> Plan:
    assignment = one_stage_each(len(reports))
    log = full_log(range(assignment.num_stages), 0, 14)
    found, reason = without_log(
        partial(plan, reports, assignment, log, AT_15, PlanConfig(helpers=2)), Refusals()
    )
    assert found is not None, reason
    assert found.reason == reason
    return found


def strategies(found: Plan) -> list[str]:
    return [str(entry.strategy) for entry in found.ranks]


def test_all_keep_their_state() -> None:
    found = planned(said(15, 15, 15))
    assert strategies(found) == ["KEEP"] * 3
    assert (found.exact, found.gives_up_log) == (False, True)
    assert found.reason.endswith("the log does not lead to version 15, and begins anew")


def test_a_lost_rank_loads_the_checkpoint_of_that_version() -> None:
    found = planned(said(15, None, 15))
    assert strategies(found) == ["KEEP", "REPLAY", "KEEP"]
    assert not found.reads_log
    assert found.gives_up_log


def test_nothing_is_read_of_a_log_that_ends() -> None:
    found = planned(said(17, None, 17))
    assert strategies(found) == ["CHECKPOINT"] * 3
    assert found.target_version == 15
