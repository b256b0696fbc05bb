"""A job that is over, started again with other recovery groups."""

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator.job_record import LogServer, State
from swift_ft_services.coordinator.restarts import begin_again, first_row
from swift_ft_services.coordinator.views import view_of
from tests.unit.coordinator import driver_world

SERVERS = [LogServer(address="l0")]


def join(run: str, groups: str) -> pb.JoinRequest:
    return driver_world.join(incarnation=run, world_size=2, config={"groups": groups}, run=run)


def test_a_job_that_is_started_again_has_the_groups_of_that_start() -> None:
    row = first_row("j", SERVERS, join("a", "0,1"), 1)
    assert view_of(row).groups == "0,1"
    row.state, row.checkpoints = State.STOPPED, [0, 5]
    words = begin_again(row, join("b", "0-1"), SERVERS)
    assert "at version 5" in words
    assert view_of(row).groups == row.config["groups"] == "0-1"
    assert row.inexact_since is None, "groups decide what is logged, and no bit of what is computed"
    assert [server.fresh for server in row.log_servers] == [True], (
        "what is in the log is of the groups before"
    )
