"""The pace of a link: transcripts of acknowledgements in, bytes per second out."""

import pytest

from swift_ft.log.sender_core import LinkMeter

MB = 1e6


def test_the_pace_is_that_of_the_busy_time() -> None:
    meter = LinkMeter()
    for start in range(10):  # 10 MB in 20 ms, then 80 ms of nothing
        meter.busy(start / 10)
        meter.acked(10_000_000, start / 10 + 0.02, idle=True)
        if start == 4:
            assert meter.pace() is None  # 0.42 s: the window is not full
    assert meter.pace() == pytest.approx(500 * MB)


def test_a_link_that_is_never_idle() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    for ack in range(1, 11):
        meter.busy(ack / 10 - 0.05)  # more comes before the last one is acknowledged
        meter.acked(30_000_000, ack / 10, idle=False)
    assert meter.pace() == pytest.approx(300 * MB)


def test_the_newest_window_counts_half() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 1.0, idle=False)
    meter.acked(200_000_000, 2.0, idle=False)
    assert meter.pace() == pytest.approx(150 * MB)


def test_the_time_of_a_cut_link_is_not_its_speed() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 0.4, idle=False)
    meter.forget_window()
    meter.acked(1, 50.0, idle=False)  # a late acknowledgement of the old connection
    meter.busy(60.0)
    meter.acked(100_000_000, 61.0, idle=True)
    assert meter.pace() == pytest.approx(100 * MB)
