"""An operator replaces log servers of a job, by real processes: coordinator, log servers, `swift-ft logs`."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log import admin
from swift_ft.log.reader import never
from swift_ft.log.record import RecordKey
from swift_ft.tools import status
from tests.integration.coordinator_world import Coordinator, FakeMember, finish, recovered
from tests.integration.coordinator_world import Job as Members
from tests.integration.logserver_world import JOB, TIMEOUT_S, LogServer
from tests.integration.scraping import scrape
from tests.log_client import Writer
from tests.unit.log.clients import rank_writing, reading

STREAM = "s0.F"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LogServer]]:
    found = [LogServer(tmp_path / f"log{number}") for number in range(3)]
    with found[0], found[1], found[2]:
        yield found


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    members = Members(tmp_path)
    yield members
    members.close()


def kept_by(view: pb.View, rank: int) -> list[str]:
    return next(list(logs.servers) for logs in view.log_copies if logs.rank == rank)


def put(writer: Writer, steps: range) -> None:
    for step in steps:
        writer.append(STREAM, RecordKey(step, 0, 0), "uint8", (3,), bytes([step] * 3))


def steps_of(server: LogServer) -> list[int]:
    with reading(server.address) as reader:
        return sorted(key.step for key in reader.digests(STREAM, 0, cancelled=never))


def told(coordinator: Coordinator, *words: str) -> int:
    return status.main(["--coordinator", coordinator.address, "--job", JOB, *words], "logs")


def test_a_log_server_that_comes_back_empty_is_used_anew(servers: list[LogServer], members: Members) -> None:
    """Nobody dies, and nobody says a word: else the writers would wait for a generation that it never grants."""
    one, two, _ = servers
    members.coordinator("--log-servers", f"m0={one.address},m1={two.address}", "--copies", "2")
    ranks = members.form(JOB)
    both = kept_by(members.wait(ranks[0], recovered(1)), 0)
    with rank_writing(*both) as writer:
        put(writer, range(5))
        writer.flush(TIMEOUT_S)
        one.kill()
        shutil.rmtree(one.directory)
        one.start()
        view = members.wait(ranks[0], recovered(2))
        assert view.reason == f"log server {one.address} is lost: it has come back without this job's records"
        assert sorted(kept_by(view, 0)) == sorted(both)
        assert {rank.strategy for rank in view.plan.ranks} <= {pb.KEEP, pb.CATCH_UP}
        writer.set_generation(2, kept_by(view, 0), [one.address])
        put(writer, range(4, 8))
        writer.flush(TIMEOUT_S)
        assert steps_of(two) == list(range(8))
        assert steps_of(one) == list(range(4, 8))
        finish(members, ranks)


def test_a_log_server_is_replaced_by_another_and_comes_back(
    servers: list[LogServer], members: Members, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, new = servers
    # It has records of a job of that name, from long ago.
    new.fence(1)
    old = Writer([new.address], JOB, 1)
    put(old, range(40, 50))
    old.close()
    named = f"m0={one.address},m1={two.address}"
    coordinator = members.coordinator("--log-servers", named, "--copies", "2")
    ranks = members.form(JOB)
    view = members.wait(ranks[0], recovered(1))
    with rank_writing(*kept_by(view, 0)) as writer:
        assert sorted(kept_by(view, 0)) == sorted([one.address, two.address])
        put(writer, range(5))
        writer.flush(TIMEOUT_S)
        one.kill()
        put(writer, range(5, 8))

        assert told(coordinator, "--lost", "127.0.0.1:1") == 2
        assert "127.0.0.1:1 is none of the log servers" in capsys.readouterr().err
        assert told(coordinator, "--lost", one.address, "--add", f"m2={new.address}") == 0
        view = members.wait(ranks[0], recovered(2))
        assert "was given up by an operator" in view.reason
        assert list(view.log_servers) == [two.address, new.address]
        assert kept_by(view, 0) == [two.address, new.address]
        assert {rank.strategy for rank in view.plan.ranks} <= {pb.KEEP, pb.CATCH_UP}
        assert steps_of(new) == [], "it was emptied before anybody could read it"
        writer.set_generation(2, kept_by(view, 0))
        put(writer, range(7, 12))
        writer.flush(TIMEOUT_S)
        assert steps_of(two) == list(range(12))
        assert set(range(7, 12)) <= set(steps_of(new)) <= set(range(5, 12))

        one.start()
        capsys.readouterr()
        assert told(coordinator, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        assert [server["lost"] for server in shown["view"]["log_places"]] == [
            "was given up by an operator",
            "",
            "",
        ]
        assert {"rank": 0, "servers": [two.address, new.address]} in shown["view"]["log_copies"]
        assert admin.inventory(one.address, JOB, TIMEOUT_S), "nobody has asked it anything"
        # Once more, the other way round; and said twice, as by somebody who did not see the answer.
        for _ in range(2):
            assert told(coordinator, "--lost", two.address, "--add", f"m0={one.address}") == 0
        view = members.wait(ranks[0], recovered(3))
        assert steps_of(one) == []
        assert kept_by(view, 0) == [new.address, one.address]
        writer.set_generation(3, kept_by(view, 0))
        put(writer, range(12, 15))
        writer.flush(TIMEOUT_S)
        assert steps_of(one) == list(range(12, 15))
        assert set(range(7, 15)) <= set(steps_of(new))
        finish(members, ranks)


def test_a_loss_shows_until_another_server_has_come_in_its_place(
    servers: list[LogServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the metrics, which the alert looks at, and as lines of the JSON log."""
    one, two, new = servers
    shown = tmp_path / "shown"
    flags = ["--metrics-listen", "127.0.0.1:0", "--metrics-address-file", str(shown), "--log-format", "json"]
    coordinator = Coordinator(
        tmp_path / "meta", "--log-servers", f"{one.address},{two.address}", "--log-lost-s", "6", *flags
    ).start()
    assert coordinator.process is not None
    member = FakeMember(coordinator.address, JOB, 0, 1).start()

    def missing() -> float:
        return scrape(shown.read_text().strip()).value("swift_coordinator_lost_log_servers", job=JOB)

    try:
        member.watcher.wait_for(recovered(1), TIMEOUT_S)
        assert missing() == 0
        assert told(coordinator, "--add", "10.255.255.1:7301") == 2
        assert "the coordinator does not connect there" in capsys.readouterr().err
        one.kill()
        member.watcher.wait_for(recovered(2), TIMEOUT_S)
        assert missing() == 1
        assert told(coordinator, "--add", new.address) == 0
        member.watcher.wait_for(recovered(3), TIMEOUT_S)
        assert missing() == 0
    finally:
        member.kill()
        coordinator.process.terminate()
        said = coordinator.process.communicate(timeout=TIMEOUT_S)[1]
    lines = [json.loads(line) for line in said.splitlines()]
    (lost,) = [line for line in lines if line["event"] == "log_server_lost"]
    (came,) = [line for line in lines if line["event"] == "log_server_added"]
    assert lost["level"] == "warning"
    assert lost["fields"].items() >= {"job": JOB, "server": 0, "address": one.address}.items()
    assert "has not answered for" in lost["fields"]["reason"]
    wanted = {"job": JOB, "server": 2, "address": new.address}
    assert came["fields"].items() >= wanted.items()
