"""How a writer's records are stored: by the codec that was configured, or by the one that pays."""

import time
from collections.abc import Callable, Mapping

from swift import events
from swift.errors import UsageError
from swift.log import codec as codecs
from swift.log.choice import Choice, CodecChooser, LinkRate
from swift.log.record import DTYPE_BY_NAME

_SAMPLE_BYTES_MAX = 1 << 20


def check_codec(codec: str | Mapping[str, str]) -> None:
    """Raises UsageError for one that nobody knows, ServiceError for one that is not installed."""
    named = [codec] if isinstance(codec, str) else list(codec.values())
    for codec_name in named:
        if codec_name not in codecs.CHOICES:
            raise UsageError(f"codec {codec_name!r} is not known; give one of {', '.join(codecs.CHOICES)}")
    if any(name in ("bitshuffle", codecs.AUTO) for name in named):
        codecs.load()  # here, not in the middle of a record that is timed


class Packer:
    """One writer's codecs. Not thread-safe: the writer's one worker calls it."""

    def __init__(self, codec: str | Mapping[str, str], on_choice: Callable[[str, Choice], None]) -> None:
        """``codec``: for all streams, or by stream name ("none" where it is not named). ``on_choice`` is told what
        `auto` has chosen for a stream, whenever it has looked at it."""
        check_codec(codec)
        self._codec = codec
        self._candidates = [name for name in codecs.NAMES if name != "none"]
        self._on_choice = on_choice
        self._choosers: dict[str, CodecChooser] = {}
        self.choices: dict[str, Choice] = {}
        """What `auto` has chosen, by stream. Entries are replaced whole."""

    def pack(
        self, stream: str, dtype: str, body: memoryview, rate: Callable[[], LinkRate | None]
    ) -> tuple[str, codecs.Bytes]:
        """(codec used, stored body). ``rate`` is the stream's way to the log."""
        width = DTYPE_BY_NAME[dtype].width
        name = self._codec if isinstance(self._codec, str) else self._codec.get(stream, "none")
        if name == codecs.AUTO:
            name = self._chosen(stream, body, width, rate)
        return codecs.compress(name, body, width)

    def _chosen(self, stream: str, body: memoryview, width: int, rate: Callable[[], LinkRate | None]) -> str:
        chooser = self._choosers.get(stream)
        if chooser is None:
            chooser = self._choosers[stream] = CodecChooser(self._candidates)
        if chooser.wants_sample(body.nbytes):
            sample = body[:_SAMPLE_BYTES_MAX]
            for name in self._candidates:
                began = time.perf_counter()
                _, stored = codecs.compress(name, sample, width)
                chooser.sampled(name, sample.nbytes, len(stored), time.perf_counter() - began)
            self._say(stream, chooser.decide(rate()))
        return chooser.choice.codec

    def _say(self, stream: str, choice: Choice) -> None:
        before = self.choices.get(stream)
        self.choices[stream] = choice
        if before is None or before.codec != choice.codec:
            events.emit("codec", stream=stream, codec=choice.codec, reason=choice.reason)
        self._on_choice(stream, choice)
