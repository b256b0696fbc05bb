"""Two copies by a SidecarWriter: what `test_copies` asks of a LogWriter, with the work done in another process."""

import pytest

from swift_ft.log.ring import ALIGN, HEADER_BYTES
from swift_ft.log.sidecar_client import SidecarWriter
from tests.unit.log import test_copies as inside
from tests.unit.log.test_copies import TestMoving, TestReplaying, TestWriting, one, two

__all__ = ["TestMoving", "TestReplaying", "TestWriting", "one", "two"]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "LogWriter", SidecarWriter)
    monkeypatch.setattr(inside, "RECORD_BYTES", HEADER_BYTES + ALIGN)
    # Its records count when they are acknowledged, and stay in the ring until then.
    monkeypatch.setattr(inside, "until_sent", lambda writer, records: writer.wait_copied())
