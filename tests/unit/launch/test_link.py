"""The launcher's link to the coordinator."""

import functools
import sys
import time

import pytest

from swift_ft import coordinator_client as client
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.launch import link as launcher_link
from swift_ft.launch.link import CoordinatorLink
from swift_ft.launch.standalone import free_port
from tests.patience import eventually
from tests.unit.control.test_client import Served


class Heard:
    """A stderr that other threads may write."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_coordinator_that_does_not_answer_is_said_before_anybody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    address = f"127.0.0.1:{free_port()}"
    link = CoordinatorLink(address, "j", lambda: None)
    try:
        eventually(lambda: "\n" in heard.text)
    finally:
        link.close()
    assert heard.text.startswith(f"swift: the coordinator at {address} does not answer (Connection refused")


PATIENCE_S = 0.2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call is given up soon."""
    made = functools.partial(client.CoordinatorClient, patience_s=PATIENCE_S)
    monkeypatch.setattr(client, "CoordinatorClient", made)


def test_a_death_is_told_until_the_coordinator_answers(impatient: None) -> None:
    served = Served()
    served.stop()
    link = CoordinatorLink(served.address, "j", lambda: None)

    def told() -> list[tuple[int, bool]]:
        """In their order; one whose answer came too late is told again."""
        exits = [request for request in served.scripted.requests if isinstance(request, pb.ExitRequest)]
        return list(dict.fromkeys((request.rank, request.given_up) for request in exits))

    try:
        link.notify(pb.ExitRequest(rank=1, pid=7, exit_code=-9, incarnation="a"))
        link.notify(pb.ExitRequest(rank=2, given_up=True))
        time.sleep(3 * PATIENCE_S)
        served.start()
        eventually(lambda: len(told()) == 2)
    finally:
        link.close()
        served.stop()
    assert told() == [(1, False), (2, True)]


def test_what_nobody_has_heard_holds_no_end_up(impatient: None) -> None:
    link = CoordinatorLink(f"127.0.0.1:{free_port()}", "j", lambda: None)
    link.notify(pb.ExitRequest(rank=1, pid=7, exit_code=-9, incarnation="a"))
    link.close()
    eventually(lambda: not link._thread.is_alive())


def test_a_last_checkpoint_is_asked_for_once(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_link, "ASK_S", PATIENCE_S)
    served = Served()
    served.stop()
    link = CoordinatorLink(served.address, "j", lambda: None)
    try:
        link.ask_checkpoint("a launcher was told to stop")
        eventually(lambda: link.not_asked)
        link.notify(pb.ExitRequest(rank=1, pid=7, incarnation="a"))
        served.start()
        eventually(lambda: served.scripted.requests)
    finally:
        link.close()
        served.stop()
    assert [type(request) for request in served.scripted.requests] == [pb.ExitRequest]


def test_a_line_that_cannot_be_made_is_said_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    link = CoordinatorLink("127.0.0.1:99999", "j", lambda: None)
    link.ask_checkpoint("a launcher was told to stop")
    eventually(lambda: link.not_asked and not link._thread.is_alive())
    link.close()
    assert heard.text == "swift: '127.0.0.1:99999' is not HOST:PORT, such as 10.0.0.5:7301\n"
