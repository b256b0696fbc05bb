"""Which tensors the channel lends to the ring, which it has copied at once, and what it does about changes in place."""

from typing import Any, cast

import pytest
import torch

from swift_ft.errors import UsageError
from swift_ft.log.record import RecordKey
from swift_ft.train.boundary_log import Captures, Channel
from swift_ft.train.profiling import BACKWARD, FORWARD
from tests.unit.runtime.wired import channel_of


class Ring:
    """A writer whose copier stands still until it is told."""

    def __init__(self) -> None:
        self.copied = 0
        self.end = 0
        self.taken: list[tuple[str, RecordKey, int, int, bool]] = []

    def append_at(
        self,
        stream: str,
        key: RecordKey,
        dtype: str,
        shape: tuple[int, ...],
        address: int,
        size: int,
        now: bool,
        keep: bool,
    ) -> int:
        self.taken.append((stream, key, address, size, now))
        self.end += 100
        if now and self.copied == self.end - 100:
            self.copied = self.end
        return self.end

    def wait_copied(self) -> None:
        self.copied = self.end


def lent(channel: Channel) -> list[Any]:
    return list(cast(Any, channel).capture._chosen.lent)


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def channel(ring: Ring) -> Channel:
    channel = channel_of(1)
    channel.capture = Captures(cast(Any, ring), channel.readings.wholeness)
    channel.witness = None
    channel.begin_step(7)
    return channel


def test_sends_are_lent_and_the_rest_is_copied_at_once(channel: Channel, ring: Ring) -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    channel.sent(1, FORWARD, 2, 3, tensor)
    channel.sent(1, BACKWARD, 2, 3, tensor.t())
    channel.entered(1, 4, [tensor])
    channel.targeted(1, tensor)
    result = channel.collective("x", lambda: tensor, tensor.device)
    assert result is tensor
    assert [(stream, key, size, now) for stream, key, _, size, now in ring.taken] == [
        ("s1.F", RecordKey(7, 2, 3), 24, False),
        ("s1.B", RecordKey(7, 2, 3), 24, False),
        ("s1.X", RecordKey(7, 4, 0), 24, True),
        ("s1.T", RecordKey(7, 4, 0), 24, True),
        ("r1.C", RecordKey(7, 0, 0), 24, True),
    ]
    addresses = [address for _, _, address, _, _ in ring.taken]
    assert addresses[0] == tensor.data_ptr()
    assert addresses[1] != tensor.data_ptr()  # contiguous only as a copy
    with torch.inference_mode():
        unversioned = torch.ones(3)
    channel.sent(1, FORWARD, 3, 3, unversioned)
    assert ring.taken[-1][-1] is True


def test_a_tensor_is_recorded_once_its_message_is_launched(channel: Channel, ring: Ring) -> None:
    channel.sent(1, FORWARD, 0, 0, torch.ones(4), launched=False)
    channel.sent(1, BACKWARD, 0, 0, torch.ones(4), launched=False)
    assert not ring.taken
    channel.launched()
    assert [stream for stream, *_ in ring.taken] == ["s1.F", "s1.B"]
    channel.sent(1, FORWARD, 1, 0, torch.ones(4), launched=False)
    channel.wait_copied()  # at the latest: what follows may overwrite it
    assert [key.microbatch for _, key, *_ in ring.taken] == [0, 0, 1]
    channel.sent(1, FORWARD, 2, 0, torch.ones(4), launched=False)
    channel.drop_step()
    channel.launched()
    assert len(ring.taken) == 3


def test_a_lent_tensor_is_kept_until_it_is_copied(channel: Channel, ring: Ring) -> None:
    channel.sent(1, FORWARD, 0, 0, torch.ones(4))
    channel.sent(1, FORWARD, 1, 0, torch.ones(4))
    assert [one.key.microbatch for one in lent(channel)] == [0, 1]
    ring.copied = 100
    channel.sent(1, FORWARD, 2, 0, torch.ones(4))
    assert [one.key.microbatch for one in lent(channel)] == [1, 2]
    channel.wait_copied()
    assert not lent(channel)
    assert ring.copied == ring.end


def test_a_change_in_place_is_said_in_one_line(channel: Channel) -> None:
    tensor = torch.ones(4)
    view = tensor[:]
    channel.sent(1, FORWARD, 5, 256, tensor)
    view += 1
    with pytest.raises(
        UsageError, match=r"^s1\.F step 7 microbatch 5 slot 256: .* changed in place .*clone\(\)\)$"
    ):
        channel.wait_copied()


def test_a_step_that_is_dropped_is_waited_for_and_not_judged(channel: Channel, ring: Ring) -> None:
    tensor = torch.ones(4)
    channel.sent(1, FORWARD, 5, 256, tensor)
    tensor += 1
    channel.drop_step()
    assert ring.copied == ring.end
    channel.wait_copied()
