"""From requests to commands: what was not said must not become a zero."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.planner import HeldSnapshot
from swift_ft_services.authorization import Gate, Visit
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.driver import Driver
from swift_ft_services.coordinator.job_record import State
from swift_ft_services.coordinator.log_calls import Unavailable
from swift_ft_services.coordinator.service import Context, Servicer
from swift_ft_services.coordinator.text import waiting_for
from swift_ft_services.coordinator.views import view_of
from tests.unit.coordinator.test_parts import row

ME: dict[str, Any] = {"job": "j", "rank": 2, "incarnation": "i"}
SENDER = m.Sender(rank=2, incarnation="i")


class Taker:
    """A driver that keeps what it is given."""

    def __init__(self) -> None:
        self.commands: list[m.Command] = []

    async def apply(self, _job: str, command: m.Command) -> None:
        self.commands.append(command)


@pytest.mark.parametrize(
    ("request_", "command"),
    [
        (
            pb.ReportRequest(**ME, generation=3),
            m.MemberReport(sender=SENDER, generation=3, version=None),
        ),
        (
            pb.ReportRequest(**ME, generation=3, has_state=True, undo_to=0, forward_to=0),
            m.MemberReport(sender=SENDER, generation=3, version=0, undo_to=0, forward_to=0),
        ),
        (
            pb.ReportRequest(
                **ME,
                generation=3,
                undo_to=6,
                undo_exact=True,
                forward_to=7,
                can_help=True,
                snapshots=[pb.HeldSnapshot(rank=1, version=4)],
            ),
            m.MemberReport(
                sender=SENDER,
                generation=3,
                version=None,
                undo_to=6,
                undo_exact=True,
                forward_to=7,
                can_help=True,
                snapshots=(HeldSnapshot(1, 4),),
            ),
        ),
        (
            pb.ReadyRequest(**ME, generation=3, version=7, stages=[4, 1], num_stages=8, shard=2),
            m.Ready(sender=SENDER, generation=3, version=7, stages=(1, 4), num_stages=8, shard=2),
        ),
    ],
)
def test_a_request_is_the_command_that_it_says(
    request_: pb.ReportRequest | pb.ReadyRequest, command: m.Command
) -> None:
    taker = Taker()
    servicer = Servicer(cast("Driver", taker))
    context = cast("Context", None)
    if isinstance(request_, pb.ReportRequest):
        asyncio.run(servicer.Report(request_, context))
    else:
        asyncio.run(servicer.Ready(request_, context))
    assert taker.commands == [command]


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


class Aborted(Exception):
    pass


class Caller:
    """A context."""

    async def abort(self, _code: object, words: str) -> None:
        raise Aborted(words)


def test_a_coordinator_that_stops_says_so_to_whoever_asks_for_its_jobs(
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
        asyncio.run(servicer.Jobs(pb.JobsRequest(), cast("Context", Caller())))


def test_a_reason_moves_no_cursor() -> None:
    taker = Taker()
    request = pb.FailRequest(**ME, reason="line 1\n\tline 2\x1b[2J\r\x9b1A\u202e größer")
    asyncio.run(Servicer(cast("Driver", taker)).Fail(request, cast("Context", None)))
    (command,) = taker.commands
    assert isinstance(command, m.Fail)
    assert command.reason == "line 1\n\tline 2 [2J  1A  größer"


def test_of_a_large_job_few_ranks_are_named() -> None:
    shown = row()
    shown.state, shown.world_size, shown.holders = State.FORMING, 1 << 16, {}
    words = waiting_for(shown)
    assert "; ranks 0, 1, 2, " in words
    assert words.endswith(f", 63 and {(1 << 16) - 64} more to join")
