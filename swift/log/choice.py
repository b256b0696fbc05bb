"""Which codec a stream gets, decided from samples of its own records. No I/O, no clock: times are arguments.

The trainer, the compressing thread and the link to the log server work at the same time, so the slowest of them
sets the pace. In raw bytes per second::

    pace(none)  = L               L  stored bytes that the server acknowledged per second while the link was busy
    pace(codec) = min(C, r L)     C  raw bytes that the codec takes in per second,  r  raw bytes / stored bytes
    gain(codec) = pace(codec) / pace(none)
    load        = b R             b  share of the time that the link was busy,  R  raw / stored bytes of what it took

``load`` is how busy the link would be without any codec. Below 1 the trainer is the slowest stage, nobody waits for
the link, and a codec would burn a core for nothing. So a codec is taken if ``gain >= TAKE_GAIN`` and
``load >= TAKE_LOAD``, the one with the highest pace; it is given up if either falls below its KEEP bound, or for one
whose pace is TAKE_GAIN times its own. All streams of a rank share the thread and the link: each is judged as if all
were like it, and all stages as if they had cores of their own. C and r are medians of the last SAMPLES_KEPT samples,
so one that was disturbed decides nothing.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

TAKE_GAIN, KEEP_GAIN = 1.15, 1.05
TAKE_LOAD, KEEP_LOAD = 0.8, 0.6
SAMPLES_KEPT = 5
SAMPLE_EVERY = 64
"""Records of a stream from one sample to the next; the first one is a sample."""
SAMPLE_BYTES_MIN = 4096
"""Smaller records are no samples: a call's own time would be taken for the codec's."""


@dataclass(frozen=True, slots=True)
class LinkRate:
    """How a link to a log server has done lately."""

    bytes_per_s: float
    """Stored bytes acknowledged per second while it was busy."""
    busy_share: float
    """Of the time, 0 to 1: something was not acknowledged yet."""
    raw_per_stored: float
    """Of what was acknowledged."""


class LinkMeter:
    """Adds up what a link is told about its work. Windows of WINDOW_S, the newest counts half."""

    WINDOW_S = 0.5
    _WEIGHT = 0.5

    def __init__(self) -> None:
        self._rate: LinkRate | None = None
        self._busy_since: float | None = None
        self._began: float | None = None
        self._busy_s = 0.0
        self._stored = self._raw = 0

    def busy(self, now_s: float) -> None:
        """Something waits for its acknowledgement from now on."""
        if self._began is None:
            self._began = now_s
        if self._busy_since is None:
            self._busy_since = now_s

    def acked(self, stored: int, raw: int, now_s: float, *, idle: bool) -> None:
        """So many bytes are acknowledged; ``idle``: nothing waits any more."""
        if self._busy_since is None or self._began is None:
            return
        self._stored += stored
        self._raw += raw
        self._busy_s += now_s - self._busy_since
        self._busy_since = None if idle else now_s
        elapsed_s = now_s - self._began
        if elapsed_s >= self.WINDOW_S and self._busy_s > 0 and self._stored:
            self._fold(elapsed_s)
            self._began, self._busy_s, self._stored, self._raw = now_s, 0.0, 0, 0

    def forget_window(self) -> None:
        """The link was cut: the time since is not its speed."""
        self._began = self._busy_since = None
        self._busy_s, self._stored, self._raw = 0.0, 0, 0

    def rate(self) -> LinkRate | None:
        """None before the first window is full."""
        return self._rate

    def _fold(self, elapsed_s: float) -> None:
        new = (self._stored / self._busy_s, min(1.0, self._busy_s / elapsed_s), self._raw / self._stored)
        old = self._rate
        if old is None:
            self._rate = LinkRate(*new)
        else:
            before = (old.bytes_per_s, old.busy_share, old.raw_per_stored)
            self._rate = LinkRate(
                *(self._WEIGHT * n + (1 - self._WEIGHT) * b for n, b in zip(new, before, strict=True))
            )


@dataclass(frozen=True, slots=True)
class Choice:
    codec: str
    reason: str


class CodecChooser:
    """One stream's choice.

    Call sequence::

        if chooser.wants_sample(raw_bytes):              for every record
            chooser.sampled(codec, raw, stored, seconds)     for every codec
            choice = chooser.decide(link.rate())
        chooser.choice.codec                             is used
    """

    def __init__(self, codecs: Sequence[str]) -> None:
        """``codecs``: those to choose from besides "none"."""
        self.choice = Choice("none", "no record has been sampled")
        self._samples: dict[str, deque[tuple[float, float]]] = {
            name: deque(maxlen=SAMPLES_KEPT) for name in codecs
        }
        self._until_sample = 0

    def wants_sample(self, raw_bytes: int) -> bool:
        if raw_bytes < SAMPLE_BYTES_MIN:
            return False
        self._until_sample -= 1
        if self._until_sample > 0:
            return False
        self._until_sample = SAMPLE_EVERY
        return True

    def sampled(self, codec: str, raw_bytes: int, stored_bytes: int, seconds: float) -> None:
        """``codec`` made ``stored_bytes`` out of ``raw_bytes`` in ``seconds``."""
        self._samples[codec].append((raw_bytes / stored_bytes, raw_bytes / max(seconds, 1e-9)))

    def decide(self, link: LinkRate | None) -> Choice:
        """The choice from here on. The same samples and rates give the same choices."""
        self.choice = self._decide(link)
        return self.choice

    def _decide(self, link: LinkRate | None) -> Choice:
        using = self.choice.codec
        if link is None:
            return Choice(using, "the link's bandwidth is not known yet")
        paces = {name: self._pace(name, link) for name, samples in self._samples.items() if samples}
        if not paces:
            return Choice(using, "no record has been sampled")
        best = max(paces, key=lambda name: (paces[name], name))
        if using in paces and paces[best] < TAKE_GAIN * paces[using]:
            best = using
        gain, load = paces[best] / link.bytes_per_s, link.busy_share * link.raw_per_stored
        gain_min, load_min = (TAKE_GAIN, TAKE_LOAD) if using == "none" else (KEEP_GAIN, KEEP_LOAD)
        ratio, speed = self._median(best)
        words = (
            f"{best} has ratio {ratio:.2f} at {speed / 1e6:.0f} MB/s, "
            f"the link takes {link.bytes_per_s / 1e6:.0f} MB/s: gain {gain:.2f}, load {load:.2f}"
        )
        if load < load_min:
            return Choice("none", f"nobody waits for the link (load below {load_min}): {words}")
        if gain < gain_min:
            return Choice("none", f"it does not pay (gain below {gain_min}): {words}")
        return Choice(best, f"it pays: {words}")

    def _pace(self, codec: str, link: LinkRate) -> float:
        ratio, speed = self._median(codec)
        return min(speed, ratio * link.bytes_per_s)

    def _median(self, codec: str) -> tuple[float, float]:
        samples = self._samples[codec]
        return statistics.median(s[0] for s in samples), statistics.median(s[1] for s in samples)
