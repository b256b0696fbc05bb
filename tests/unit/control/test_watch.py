"""The live page: what it shows, what it escapes, whom it answers."""

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from swift_ft import cli
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import ServiceError
from swift_ft.tools import watch

HOSTILE = "<script>alert(1)</script>"


def status() -> pb.StatusReply:
    view = pb.View(
        job="run", generation=2, state=pb.RECOVERING, world_size=2, reason=HOSTILE, checkpoints=[5]
    )
    view.members.add(rank=0, pid=11, host="a01")
    view.members.add(rank=1, pid=12, host="a02")
    view.plan.target_version = 8
    view.plan.reason = "rank 1 replays"
    view.log_places.add(address="10.0.0.1:7300", host="a01")
    view.log_places.add(address="10.0.0.2:7300", host="a02", lost="has not answered for 30.1 s")
    view.log_copies.add(rank=0, servers=["10.0.0.1:7300"])
    reply = pb.StatusReply(view=view)
    reply.ranks.add(rank=0, version=8, lease_age_s=0.2, stages=[0, 2])
    replay = pb.ReplayProgress(version=6, target=8, seconds_left=1.5)
    reply.ranks.add(rank=1, version=6, lease_age_s=0.1, replay=replay)
    reply.log_servers.add(address="10.0.0.1:7300", silent_s=0.5)
    reply.suspicions.add(rank=1, reason="slow", age_s=3, told=True)
    first = reply.history.add(number=2, plan="rank 1 replays")
    first.entries.add(state=pb.FENCING, at=1e9, reason="rank 1 was killed by signal 9")
    first.entries.add(state=pb.RUNNING, at=1e9 + 0.5)
    return reply


class Coordinator:
    """In the place of a client."""

    error: ServiceError | None = None

    def __init__(self, _address: str, job: str, **_options: Any) -> None:
        self.job = job

    def jobs(self) -> pb.JobsReply:
        if self.error is not None:
            raise self.error
        name = "team/run"
        return pb.JobsReply(jobs=[pb.JobSummary(job=name, state=pb.RUNNING, world_size=2, live_ranks=1)])

    def status(self, *, history: bool) -> pb.StatusReply:
        reply = status()
        reply.view.job = self.job
        return reply

    def close(self) -> None:
        pass


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(watch, "CoordinatorClient", Coordinator)
    server = watch.serve(watch.parser().parse_args(["--coordinator", "meta:1"]))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def get(port: int, path: str, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_a_job_is_shown_whole_and_text_of_others_is_escaped() -> None:
    page = watch.job_page(status())
    for words in (
        "job run: RECOVERING, generation 2",
        "because &lt;script&gt;alert(1)&lt;/script&gt;",
        "newest checkpoint: version 5; goes on at step 8",
        "rank 1: process 12 on a02, version 6, heard 0.1 s ago; replays: version 6 of 8, about 1.5 s left",
        "10.0.0.2:7300 on a02: lost: it has not answered for 30.1 s",
        "10.0.0.1:7300 on a01: ranks 0",
        "rank 1 said 3 s ago: slow",
        "rank 1 was killed by signal 9",
        "FENCING, RUNNING after 0.5 s",
    ):
        assert words in page
    assert HOSTILE not in page


def test_the_list_leads_to_each_job(port: int) -> None:
    code, page = get(port, "/")
    assert code == 200
    (line,) = (line for line in page.splitlines() if line.startswith('<a href="/job/team%2Frun">team/run  '))
    assert "1/2" in line
    assert "job team/run: " in get(port, "/job/team%2Frun")[1]


def test_a_coordinator_that_does_not_answer_is_said_and_asked_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Coordinator, "error", ServiceError(f"meta:1 does not answer {HOSTILE}"))
    code, page = get(port, "/")
    assert code == 200
    assert "meta:1 does not answer &lt;script&gt;" in page
    assert 'http-equiv="refresh"' in page


def test_another_sites_name_for_this_machine_gets_nothing(port: int) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "[evil"):
        assert get(port, "/", host)[0] == 403
    assert get(port, "/", f"localhost:{port}")[0] == 200
    assert get(port, "/favicon.ico")[0] == 404


def test_it_listens_on_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", "--coordinator", "127.0.0.1:1", "--listen", "0.0.0.0:0"]) == 2
    assert "the page asks nobody for a token: give a loopback address" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.2", "[::1]"])
def test_it_says_where_it_listens(host: str) -> None:
    given = watch.parser().parse_args(["--coordinator", "127.0.0.1:1", "--listen", f"{host}:0"])
    with watch.serve(given) as server:
        assert server.url == f"http://{host}:{server.server_port}/"


def test_a_browser_that_leaves_early_is_no_error(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.close()  # with a reset
    assert get(port, "/")[0] == 200
    assert capfd.readouterr().err == ""
