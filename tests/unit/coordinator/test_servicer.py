"""From requests to what the core keeps: what was not said must not become a zero."""

from dataclasses import replace
from typing import Any, cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import HeldSnapshot, Report
from swift_ft_services.authorization import Gate, Visit
from swift_ft_services.coordinator.checks import check_stages
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.job import report_of
from swift_ft_services.coordinator.job_record import State
from swift_ft_services.coordinator.log_calls import Unavailable
from swift_ft_services.coordinator.service import Context, Servicer
from swift_ft_services.coordinator.views import view_of, waiting_for
from tests.unit.coordinator.driver_world import Aborted, Caller, Taker
from tests.unit.coordinator.test_parts import row

ME: dict[str, Any] = {"job": "j", "rank": 2, "incarnation": "i"}


@pytest.mark.parametrize(
    ("request_", "report"),
    [
        (pb.ReportRequest(generation=3), Report(rank=1, version=None)),
        (
            pb.ReportRequest(generation=3, has_state=True, undo_to=0, forward_to=0),
            Report(rank=1, version=0, undo_to=0, forward_to=0),
        ),
        (
            pb.ReportRequest(
                generation=3,
                undo_to=6,
                undo_exact=True,
                forward_to=7,
                can_help=True,
                snapshots=[pb.HeldSnapshot(rank=1, version=4)],
            ),
            Report(
                rank=1,
                version=None,
                undo_to=6,
                undo_exact=True,
                forward_to=7,
                can_help=True,
                snapshots=(HeldSnapshot(1, 4),),
            ),
        ),
    ],
)
def test_a_report_is_what_the_request_says(request_: pb.ReportRequest, report: Report) -> None:
    holder = row().holders[1]
    assert report_of(request_, holder) == replace(report, since_generation=2, host="h")


def test_a_rank_may_name_its_stages_in_any_order() -> None:
    known = row()
    known.stages[1] = [1, 4]
    check_stages(known, pb.ReadyRequest(rank=1, stages=[4, 1], num_stages=8, shard=2))
    with pytest.raises(Refusal, match=r"runs stages \[2, 4\], its predecessor ran \[1, 4\]"):
        check_stages(known, pb.ReadyRequest(rank=1, stages=[4, 2], num_stages=8, shard=2))


def test_a_number_of_stages_that_no_job_has_is_refused() -> None:
    """Tables of all stages are made of it."""
    with pytest.raises(Refusal, match="rank 1 says there are 2000000000 stages: at most 65536"):
        check_stages(row(), pb.ReadyRequest(rank=1, stages=[0], num_stages=2_000_000_000, shard=0))


def test_a_plan_is_shown_whole() -> None:
    shown = row()
    plan = view_of(shown).plan
    assert (plan.generation, plan.target_version, plan.collective_source) == (3, 5, 1)
    assert not plan.exact
    assert [(r.strategy, r.from_version, list(r.sources)) for r in plan.ranks] == [
        (pb.REPLAY, 0, []),
        (pb.KEEP, 5, []),
        (pb.REPLICA, 5, [1, 0]),
    ]
    assert shown.plan is not None
    shown.plan = replace(shown.plan, exact=True)
    assert view_of(shown).plan.exact


async def test_a_coordinator_that_stops_says_so_to_whoever_asks_for_its_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "swift_ft_services.coordinator.service.visit_of", lambda: Visit(cast("Gate", None), "Jobs", "")
    )

    class Stopping:
        async def jobs(self, _may_see: object) -> None:
            raise Unavailable("the coordinator is shutting down")

    servicer = Servicer(cast("Driver", Stopping()))
    with pytest.raises(Aborted, match="shutting down"):
        await servicer.Jobs(pb.JobsRequest(), cast("Context", Caller()))


async def test_a_reason_moves_no_cursor() -> None:
    taker = Taker()
    request = pb.FailRequest(**ME, reason="line 1\n\tline 2\x1b[2J\r\x9b1A\u202e größer")
    await Servicer(cast("Driver", taker)).Fail(request, cast("Context", None))
    (command,) = taker.commands
    assert isinstance(command, pb.FailRequest)
    assert command.reason == "line 1\n\tline 2 [2J  1A  größer"


async def test_what_a_request_has_beside_its_fields_is_not_kept() -> None:
    taker = Taker()
    known = pb.RankMeasured(steps=1, step_s=0.5)
    measured = pb.RankMeasured.FromString(known.SerializeToString() + b"\xfa\x01\x04more")  # field 31
    assert measured.ByteSize() == known.ByteSize() + 7
    request = pb.MeasureRequest(**ME, measured=measured)
    await Servicer(cast("Driver", taker)).Measure(request, cast("Context", None))
    (command,) = taker.commands
    assert isinstance(command, pb.MeasureRequest)
    assert command.measured.ByteSize() == known.ByteSize()


def test_of_a_large_job_few_ranks_are_named() -> None:
    shown = row()
    shown.state, shown.world_size, shown.holders = State.FORMING, 1 << 16, {}
    words = waiting_for(shown)
    assert "; ranks 0, 1, 2, " in words
    assert words.endswith(f", 63 and {(1 << 16) - 64} more to join")
