"""A record: one tensor of one stream, as bytes; names of streams; and marks for records that were dropped."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from swift_ft.errors import SwiftError, UsageError
from swift_ft.text import NAME_PATTERN, check_name

# Names of streams.
#
# ``s2.F`` activations sent by stage 2, ``s2.B`` input gradients sent by it, ``s2.X`` its inputs from outside the
# pipeline, ``s2.T`` its targets. With data parallelism every data-parallel rank of a stage has its own batches:
# rank 1 of them writes ``s2c1.F``. ``r5.C`` are the results of collectives as rank 5 saw them.
#
# Streams of steps that rank 5 records for a rehearsal (`swift_ft.train.recording`): ``r5.W`` its observations, ``r5.R``
# results of collectives, ``r5.M`` tensors received within its recovery group, which are in no other stream.

KINDS = "FBXT"


def boundary(stage: int, kind: str, dp_rank: int = 0, dp_size: int = 1) -> str:
    """Returns the name of the stream that `stage` sends (F, B) or takes in (X, T), in the pipeline of `dp_rank`."""
    return f"s{stage}.{kind}" if dp_size == 1 else f"s{stage}c{dp_rank}.{kind}"


def collectives(rank: int) -> str:
    return f"r{rank}.C"


def transcripts(rank: int) -> str:
    return f"r{rank}.W"


def results(rank: int) -> str:
    return f"r{rank}.R"


def messages(rank: int) -> str:
    return f"r{rank}.M"


__all__ = ["NAME_PATTERN", "check_name"]  # names are part of what identifies a record

DIMS_MAX = 8
STEP_MAX = (1 << 62) - 1
"""Largest valid step. No run reaches it, and sums with it fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class DType:
    name: str
    code: int
    bytes: int
    safetensors: str = ""
    """Its name in safetensors, if it has one."""

    @property
    def width(self) -> int:
        """Bytes of one number: a complex element consists of two."""
        return self.bytes // 2 if self.name.startswith("complex") else self.bytes


# A code is never used twice and never changes its meaning.
_DTYPES = (
    DType("bool", 1, 1, "BOOL"),
    DType("uint8", 2, 1, "U8"),
    DType("int8", 3, 1, "I8"),
    DType("int16", 4, 2, "I16"),
    DType("int32", 5, 4, "I32"),
    DType("int64", 6, 8, "I64"),
    DType("float16", 7, 2, "F16"),
    DType("bfloat16", 8, 2, "BF16"),
    DType("float32", 9, 4, "F32"),
    DType("float64", 10, 8, "F64"),
    DType("complex64", 11, 8, "C64"),
    DType("complex128", 12, 16),
    DType("float8_e4m3fn", 13, 1, "F8_E4M3"),
    DType("float8_e5m2", 14, 1, "F8_E5M2"),
    DType("float8_e4m3fnuz", 15, 1, "F8_E4M3FNUZ"),
    DType("float8_e5m2fnuz", 16, 1, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 17, 1, "F8_E8M0"),
    DType("uint16", 18, 2, "U16"),
    DType("uint32", 19, 4, "U32"),
    DType("uint64", 20, 8, "U64"),
    DType("complex32", 21, 4),
)
DTYPE_BY_NAME: Mapping[str, DType] = MappingProxyType({dtype.name: dtype for dtype in _DTYPES})
DTYPE_BY_CODE: Mapping[int, DType] = MappingProxyType({dtype.code: dtype for dtype in _DTYPES})


@dataclass(frozen=True, slots=True, order=True)
class RecordKey:
    step: int
    microbatch: int
    slot: int

    def __str__(self) -> str:
        return f"step {self.step} microbatch {self.microbatch} slot {self.slot}"


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor read back from the log, its checksums verified."""

    key: RecordKey
    dtype: str
    shape: tuple[int, ...]
    body: memoryview
    digest: bytes
    generation: int
    sequence: int


def stream_tag(job: str, stream: str) -> int:
    """Returns the 64-bit identity of a stream that each of its frames carries."""
    return xxhash.xxh3_64_intdigest(f"{job}/{stream}".encode())


def as_bytes(body: "memoryview | bytes | bytearray") -> memoryview:
    """Returns the memory as a flat view of bytes, without a copy. Raises UsageError if it is not contiguous."""
    view = memoryview(body)
    if view.nbytes == 0:
        return memoryview(b"")
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    try:
        return view.cast("B")
    except TypeError as error:
        raise UsageError("the body of a record must be contiguous memory") from error


def digest_of(dtype: str, shape: tuple[int, ...], body: "memoryview | bytes | bytearray") -> bytes:
    """Returns a 16-byte hash of a tensor's element type, shape and raw bytes."""
    state = xxhash.xxh3_128(f"{dtype}{list(shape)}".encode())
    state.update(as_bytes(body))
    return state.digest()


# Records that a writer drops because the log cannot keep up: policy "drop". No I/O, no clock.
#
#     queue full            the record is dropped; so is the rest of its step in that stream
#     a later step          is dropped too, unless the queue is at most half full when the step's first record arrives
#     then, or at a flush   a *mark* goes into the stream, before any later record
#
# A mark is a record with an empty tensor, whose key says which steps are incomplete: ``step`` is the last of them,
# ``microbatch`` the number of steps before that one, ``slot`` is `MARK_SLOT`. It has a sequence like any other record,
# so no record after a gap can be in the log without the mark. A trim drops the mark together with the last step that it
# declares. A stream may end before its mark (the writer was killed); it is then simply a shorter stream. Records
# missing at the end of a dead rank's streams are regenerated by its own replay, or declared by its successor
# (`swift_ft.train.replay`).

WHEN_FULL = ("block", "drop")
MARK_SLOT = (1 << 32) - 1
"""Slot number reserved for marks."""
MARK_DTYPE, MARK_SHAPE = "uint8", (0,)
_STEPS_MAX = 1 << 32


class Steps(NamedTuple):
    """Incomplete steps of a stream, both ends included."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def mark(steps: Steps) -> RecordKey:
    """Returns the key of the mark that declares these steps."""
    return RecordKey(steps.last, min(steps.last - steps.first, _STEPS_MAX - 1), MARK_SLOT)


def declared(key: RecordKey) -> Steps | None:
    """Returns the steps that a record's key declares unlogged; None for a tensor's key."""
    return Steps(key.step - key.microbatch, key.step) if key.slot == MARK_SLOT else None


def spanned(several: Iterable[Steps | None]) -> Steps | None:
    """Returns the range from the first to the last of these steps; None if there are none."""
    known = [steps for steps in several if steps is not None]
    return Steps(min(s.first for s in known), max(s.last for s in known)) if known else None


def hull(keys: Iterable[RecordKey]) -> Steps | None:
    """Returns the range from the first to the last step that the marks among `keys` declare; None without marks."""
    return spanned(map(declared, keys))


@dataclass(frozen=True, slots=True)
class Dropped:
    """Summary of the records dropped since the last call of `Unlogged.news`."""

    steps: Steps
    records: int
    bytes: int
    streams: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{', '.join(self.streams)} in {self.steps}"
        return f"{self.records} records ({self.bytes} bytes) of {where} were dropped"


class Unlogged:
    """Unlogged steps of one writer, whose lock it shares.

    (holding the lock)
    (every record)       ``refuses`` before it is tried, ``drop`` if there was no room
    (before a record)    ``due(stream)``: the mark that must precede it; ``marked`` once the mark is in the queue
    (a flush)            ``due`` and ``marked`` for each of ``streams``
    (the log is emptied) ``forget``

    (without the lock)
    (a refused record)   ``refuse``, by the thread that detects it
    (the writer's owner) ``news``, ``refusal``, ``lacks``
    """

    def __init__(self, lock: AbstractContextManager[Any]) -> None:
        self.records = self.bytes = 0
        """Totals of dropped records and bytes."""
        self._lock = lock
        self._open: dict[str, Steps] = {}  # unlogged steps that no mark in the queue declares yet
        self._news: Dropped | None = None
        self._refused: SwiftError | None = None

    def refuses(self, stream: str, step: int, queued_bytes: int, queue_bytes: int) -> bool:
        """Returns whether a record must be dropped even if there is room."""
        steps = self._open.get(stream)
        return steps is not None and (step <= steps.last or 2 * queued_bytes > queue_bytes)

    def drop(self, stream: str, step: int, size: int) -> None:
        self.records += 1
        self.bytes += size
        self._lack(stream, Steps(step, step))
        steps = Steps(step, step)
        news = self._news or Dropped(steps, 0, 0, ())
        self._news = Dropped(
            spanned((news.steps, steps)) or steps,
            news.records + 1,
            news.bytes + size,
            tuple(sorted({*news.streams, stream})),
        )

    def _lack(self, stream: str, steps: Steps) -> None:
        self._open[stream] = spanned((self._open.get(stream), steps)) or steps

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(self._open)

    def due(self, stream: str) -> RecordKey | None:
        """Returns the mark that must be queued before the stream's next record; None if none is due."""
        steps = self._open.get(stream)
        return None if steps is None else mark(steps)

    def marked(self, stream: str) -> None:
        del self._open[stream]

    def forget(self) -> None:
        """Clears the unlogged steps, because the job's streams are empty now. Keeps the totals."""
        self._open.clear()
        self._news = None

    # -- without the lock -------------------------------------------------------------------------------

    def lacks(self, stream: str, steps: Steps) -> None:
        """Records that the stream may lack some of these steps, because the rank's predecessor may not have sent them.
        The next mark declares them."""
        check_name("stream", stream)
        with self._lock:
            self._lack(stream, steps)

    def news(self) -> Dropped | None:
        """Returns a summary of the records dropped since the last call; None if there are none."""
        with self._lock:
            news, self._news = self._news, None
            return news

    def refuse(self, error: SwiftError) -> None:
        """Records the error of a record that was refused for another reason than a full queue."""
        self._refused = self._refused or error

    def refusal(self) -> SwiftError | None:
        """Returns the first error of `refuse` since the last call, or None. A new generation clears the writer's error,
        but the record is not appended again."""
        refused = self._refused
        if refused is not None:
            self._refused = None
        return refused
