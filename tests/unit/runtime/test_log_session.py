"""What a rank's settings make of the log that it writes."""

from types import SimpleNamespace
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.log.protocol import Fsync
from swift_ft.log.record import RecordKey
from swift_ft.train.config import SessionConfig
from swift_ft.train.log_session import OwnLog
from tests.unit.log.memory_storage import MemoryStorage
from tests.unit.log.service import JOB, InProcess
from tests.unit.runtime.wired import Still, site_of

TIMEOUT_S = 60.0


@pytest.mark.parametrize(("log_fsync", "is_synced"), [("", True), (Fsync.NEVER, False)])
def test_its_records_are_durable_when_its_settings_say(log_fsync: str, is_synced: bool) -> None:
    """The server's own setting is "always"."""
    member: Any = SimpleNamespace(lease=None)
    log = OwnLog(site_of(1, SessionConfig(log_fsync=log_fsync), member=member, channel=Still(1)))
    with InProcess(storage := MemoryStorage()) as server:
        place = pb.LogServerPlace(address=server.address)
        copies = pb.LogCopies(rank=1, servers=[server.address])
        log.open(pb.View(job=JOB, generation=1, log_places=[place], log_copies=[copies]))
        try:
            log.writer.append_at("s1.F", RecordKey(0, 0, 0), "uint8", (0,), log.writer._memory.address, 0)
            log.writer.flush(TIMEOUT_S)
        finally:
            log.close()
        assert storage.commits == [(1, is_synced)]
