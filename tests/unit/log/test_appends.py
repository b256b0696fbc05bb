"""A writer's call, decided without I/O."""

import pytest

from swift_ft._pb import log_pb2
from swift_ft.log.frame import Assembler
from swift_ft.log.protocol import Reason
from swift_ft_services.logserver.append_session import Appends
from swift_ft_services.logserver.core import Refused
from swift_ft_services.logserver.state import AppendCall
from tests.unit.log.frames import frame_of


class Nowhere:
    def put(self, item: log_pb2.AppendReply | None, /) -> None: ...


def test_no_frame_is_begun_before_a_stream_is_open() -> None:
    session = AppendCall(Nowhere(), Assembler(1 << 20))
    with pytest.raises(Refused) as caught:
        Appends.parse(session, memoryview(frame_of(0)[1])[:-1])
    assert caught.value.refusal.reason is Reason.NOT_OPEN
