"""`swift-ft logs`: what it shows, and what it refuses."""

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import UsageError
from swift_ft.log.placement import parse_server
from swift_ft.tools import status as commands


def status() -> pb.StatusReply:
    view = pb.View(
        job="j",
        state=pb.RUNNING,
        generation=3,
        copies_wanted=2,
        log_places=[
            pb.LogServerPlace(address="a:1", host="m0", lost="has not answered for 31.0 s"),
            pb.LogServerPlace(address="b:1", host="m1"),
            pb.LogServerPlace(address="c:1", host=""),
        ],
        log_copies=[
            pb.LogCopies(rank=0, servers=["b:1", "c:1"]),
            pb.LogCopies(rank=1, servers=["c:1"]),
        ],
    )
    ages = [
        pb.LogServerStatus(address="b:1", silent_s=0.5),
        pb.LogServerStatus(address="c:1", silent_s=12.4),
    ]
    return pb.StatusReply(view=view, log_servers=ages)


def test_for_people() -> None:
    assert commands.log_lines(status()) == [
        "job j: RUNNING, generation 3",
        "1 of 2 copies are kept: add a log server",
        "a:1 on m0: lost: it has not answered for 31.0 s",
        "b:1 on m1: ranks 0",
        "c:1 on an unknown machine: ranks 0 (copy), 1; has not answered for 12 s",
    ]


def test_nobody_asks_the_log_servers_of_a_job_that_is_over() -> None:
    told = status()
    told.view.state = pb.FINISHED
    assert commands.log_lines(told)[-1] == "c:1 on an unknown machine: ranks 0 (copy), 1"


def test_recovery_groups() -> None:
    told = status()
    told.view.groups = "0-1,2-3"
    assert commands.log_lines(told)[1] == "recovery groups 0-1,2-3"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--lost", "h"], "--lost h: write HOST:PORT"),
        (["--add", "=h:1"], "--add =h:1: write HOST:PORT, or MACHINE=HOST:PORT"),
        (["--add", "h:70000"], "--add h:70000: write HOST:PORT"),
        (["--lost", "h:1", "--add", "m=h:1"], "--lost and --add both name h:1"),
        ([], "127.0.0.1:1"),
    ],
)
def test_refuses(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "PATIENCE_S", 0.2)
    code = commands.main(["--coordinator", "127.0.0.1:1", "--job", "j", *words], "logs")
    assert code == (2 if words else 3)
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == (1 if words else 2)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("node1:70", ("node1", "node1:70")),
        ("rack=10.0.0.1:70", ("rack", "10.0.0.1:70")),
        ("m=[::1]:7", ("m", "[::1]:7")),
        ("10.0.0.1:70", ("10.0.0.1", "10.0.0.1:70")),
    ],
)
def test_how_a_log_server_is_named(text: str, parsed: tuple[str, str]) -> None:
    assert parse_server(text, "--log-servers") == parsed


def test_loopback_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    for text in ("127.0.0.1:7", "localhost:7", "[::1]:7"):
        assert parse_server(text, "--add") == ("here", text)
    with pytest.raises(UsageError):
        parse_server("h:", "--add")
