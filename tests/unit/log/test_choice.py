"""The choice of a codec: transcripts of samples and bandwidths in, choices out."""

import pytest

from swift.log import choice
from swift.log.choice import CodecChooser, LinkMeter, LinkRate

MB = 1e6


def link(mb_s: float, busy: float = 1.0, ratio: float = 1.0) -> LinkRate:
    return LinkRate(mb_s * MB, busy, ratio)


def sampled(chooser: CodecChooser, codec: str, ratio: float, mb_s: float) -> None:
    chooser.sampled(codec, 1_000_000, round(1_000_000 / ratio), 1.0 / mb_s)


def with_samples(ratio: float = 1.35, mb_s: float = 2000) -> CodecChooser:
    chooser = CodecChooser(["lz4", "bitshuffle"])
    sampled(chooser, "lz4", 1.0, 3600)
    sampled(chooser, "bitshuffle", ratio, mb_s)
    return chooser


@pytest.mark.parametrize(
    ("ratio", "mb_s", "link_mb_s", "busy", "codec", "reason"),
    [
        (1.35, 2000, 500, 1.0, "bitshuffle", "gain 1.35"),  # the link is slow: all of the ratio is gained
        (1.35, 2000, 1600, 1.0, "bitshuffle", "gain 1.25"),  # the codec is the slowest stage now
        (1.35, 2000, 1800, 1.0, "none", "does not pay"),  # 2000 / 1800
        (1.35, 2000, 4000, 1.0, "none", "gain 0.90"),  # a fast network: even the faster codec is in the way
        (1.14, 2300, 500, 1.0, "none", "does not pay"),
        (1.35, 2000, 500, 0.79, "none", "nobody waits for the link"),
        (1.35, 2000, 500, 0.8, "bitshuffle", "load 0.80"),
    ],
)
def test_the_slowest_stage_decides(
    ratio: float, mb_s: float, link_mb_s: float, busy: float, codec: str, reason: str
) -> None:
    found = with_samples(ratio, mb_s).decide(link(link_mb_s, busy))
    assert found.codec == codec
    assert reason in found.reason


def test_nothing_is_chosen_before_anything_is_known() -> None:
    chooser = CodecChooser(["lz4"])
    assert chooser.choice.codec == "none"
    assert "no record" in chooser.decide(link(100)).reason
    assert "not known yet" in with_samples().decide(None).reason


def test_the_faster_of_two_codecs() -> None:
    chooser = CodecChooser(["lz4", "bitshuffle"])
    sampled(chooser, "lz4", 1.5, 3600)
    sampled(chooser, "bitshuffle", 1.4, 2000)
    assert chooser.decide(link(500)).codec == "lz4"
    slow = CodecChooser(["lz4", "bitshuffle"])
    sampled(slow, "lz4", 1.5, 300)  # as after ReLU: shrinks most, but slowly
    sampled(slow, "bitshuffle", 1.4, 2000)
    assert slow.decide(link(500)).codec == "bitshuffle"


def test_a_choice_stays_between_its_bounds() -> None:
    chooser = with_samples()
    # gain: 1.11 is not enough to begin with, enough to go on with; 1.03 is not
    assert [chooser.decide(link(mb_s)).codec for mb_s in (1800, 1000, 1800, 1950, 1800)] == [
        "none",
        "bitshuffle",
        "bitshuffle",
        "none",
        "none",
    ]
    # load, of what the link would carry without the codec: half busy with 1.35 of 1 is 0.675
    chooser = with_samples()
    loads = [(0.7, 1.0), (0.9, 1.0), (0.5, 1.35), (0.44, 1.35), (0.7, 1.0)]
    found = [chooser.decide(link(500, busy, ratio)).codec for busy, ratio in loads]
    assert found == ["none", "bitshuffle", "bitshuffle", "none", "none"]


def test_another_codec_must_be_better_by_more_than_noise() -> None:
    chooser = with_samples(1.35)
    assert chooser.decide(link(500)).codec == "bitshuffle"
    for _ in range(choice.SAMPLES_KEPT):
        sampled(chooser, "lz4", 1.5, 3600)
    assert chooser.decide(link(500)).codec == "bitshuffle"  # 1.5 / 1.35 is below the bound
    for _ in range(choice.SAMPLES_KEPT):
        sampled(chooser, "lz4", 1.6, 3600)
    assert chooser.decide(link(500)).codec == "lz4"


def test_one_disturbed_sample_changes_nothing() -> None:
    chooser = with_samples()
    for _ in range(4):
        sampled(chooser, "bitshuffle", 1.35, 2000)
    assert chooser.decide(link(500)).codec == "bitshuffle"
    sampled(chooser, "bitshuffle", 1.35, 5)
    assert chooser.decide(link(500)).codec == "bitshuffle"
    for _ in range(2):
        sampled(chooser, "bitshuffle", 1.35, 5)
    assert chooser.decide(link(500)).codec == "none"


def test_the_first_and_then_every_nth_record_is_a_sample() -> None:
    chooser = CodecChooser(["lz4"])
    records = range(2 * choice.SAMPLE_EVERY + 1)
    assert [n for n in records if chooser.wants_sample(1 << 20)] == [
        0,
        choice.SAMPLE_EVERY,
        2 * choice.SAMPLE_EVERY,
    ]
    assert not CodecChooser(["lz4"]).wants_sample(choice.SAMPLE_BYTES_MIN - 1)


# -- the link's meter ---------------------------------------------------------------------------------


def test_bandwidth_is_that_of_the_busy_time() -> None:
    meter = LinkMeter()
    for start in range(10):  # 10 MB in 20 ms, then 80 ms of nothing
        meter.busy(start / 10)
        meter.acked(10_000_000, 10_000_000, start / 10 + 0.02, idle=True)
        if start == 4:
            assert meter.rate() is None  # 0.42 s: the window is not full
    rate = meter.rate()
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(500 * MB)
    assert rate.busy_share == pytest.approx(6 * 0.02 / 0.52)
    assert rate.raw_per_stored == 1.0


def test_a_link_that_is_never_idle() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    for ack in range(1, 11):
        meter.busy(ack / 10 - 0.05)  # more comes before the last one is acknowledged
        meter.acked(20_000_000, 30_000_000, ack / 10, idle=False)
    rate = meter.rate()
    assert rate is not None
    assert (rate.bytes_per_s, rate.busy_share, rate.raw_per_stored) == pytest.approx((200 * MB, 1.0, 1.5))


def test_the_newest_window_counts_half() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 100_000_000, 1.0, idle=False)
    meter.acked(200_000_000, 200_000_000, 2.0, idle=False)
    rate = meter.rate()
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(150 * MB)


def test_the_time_of_a_cut_link_is_not_its_speed() -> None:
    meter = LinkMeter()
    meter.busy(0.0)
    meter.acked(100_000_000, 100_000_000, 0.4, idle=False)
    meter.forget_window()
    meter.acked(1, 1, 50.0, idle=False)  # a late acknowledgement of the old connection
    meter.busy(60.0)
    meter.acked(100_000_000, 100_000_000, 61.0, idle=True)
    rate = meter.rate()
    assert rate is not None
    assert rate.bytes_per_s == pytest.approx(100 * MB)
