"""The launcher's link to the coordinator."""

import sys

import pytest

from swift.launch.link import CoordinatorLink
from tests.integration.logserver_world import free_port
from tests.unit.log.service import eventually


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
