"""What `scripts/soak` runs in processes of their own: the writer and the reader of one stream.

Lines come in and go out as JSON. A writer appends steps without an end, flushes after `FLUSH_STEPS` of them and
says which steps are durable then; a reader is told which steps to read, and compares every body with what must
have been written. Bodies are windows into bytes made from the seed, so that nothing has to be kept to compare.
"""

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from swift_ft.errors import LogInterrupted, LogUnavailable, RecordTrimmed, SwiftError
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.reader import LogReader, never
from swift_ft.log.record import RecordKey
from tests.log_client import LogWriter

JOB = "soak"
RECORD_BYTES = (4 << 20, 1 << 20, 256 << 10, 64 << 10, 0)
"""Of a step's records, one for each microbatch."""
STEP_BYTES = sum(RECORD_BYTES)
FLUSH_STEPS = 16
PATIENCE_S = 60.0
DTYPE = "uint8"
_WINDOWS, _WORD_BYTES = 1 << 20, 8
_RECORDS_MAX = 60


def open_writer(address: str, generation: int, name: str) -> LogWriter:
    """The one place that says how a soaked writer reaches the log."""
    return LogWriter(
        [address],
        JOB,
        generation,
        records_max=_RECORDS_MAX,
        queue_bytes=1 << 27,
        patience_s=PATIENCE_S,
        name=name,
    )


def sequence_of(step: int, microbatch: int) -> int:
    """Where a record must be in its stream: nothing is missing before it, nothing there twice."""
    return step * len(RECORD_BYTES) + microbatch


class Bodies:
    """What every record of a stream must hold: a window, of which 2^20 records in a row have different ones."""

    def __init__(self, seed: int, stream: str) -> None:
        size = max(RECORD_BYTES) + _WINDOWS * _WORD_BYTES
        self._bytes = memoryview(random.Random(f"{seed}/{stream}").randbytes(size))

    def of(self, key: RecordKey) -> memoryview:
        window = sequence_of(key.step, key.microbatch) * 40503 % _WINDOWS  # odd: each of them comes once
        at = window * _WORD_BYTES
        return self._bytes[at : at + RECORD_BYTES[key.microbatch]]


def same(read: memoryview, wanted: memoryview) -> bool:
    """Bit for bit. Through numpy: comparing memoryviews takes a nanosecond for every byte."""
    import numpy as np

    if read.nbytes != wanted.nbytes:
        return False
    return read.nbytes == 0 or np.array_equal(
        np.frombuffer(read, np.uint64), np.frombuffer(wanted, np.uint64)
    )


def _say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def _listen(take: Callable[[dict[str, Any]], None]) -> None:
    """Hands every line over, in a thread. With the lines ends this process: who gave the orders is gone."""

    def work() -> None:
        for line in sys.stdin:
            take(json.loads(line))
        os._exit(1)

    threading.Thread(target=work, name="orders", daemon=True).start()


def _digests(address: str, stream: str, from_step: int) -> dict[RecordKey, bytes]:
    """Asked again while the server is killed under it."""
    reader = LogReader([address], JOB)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                return reader.digests(stream, from_step, timeout_s=PATIENCE_S, cancelled=never)
            except LogUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    finally:
        reader.close()


class _Writer:
    """Told: ``{"limit": STEP}``, how far it may go; ``{"generation": G}`` after a fence; ``{"stop": true}``."""

    def __init__(self, address: str, stream: str, seed: int, generation: int, from_step: int) -> None:
        self.stream = stream
        self.step = from_step
        self.bodies = Bodies(seed, stream)
        self.writer = open_writer(address, generation, stream)
        self._cond = threading.Condition()
        self._generation = generation
        self._limit = from_step
        self._stop = False
        # What the predecessor had in the log, acknowledged or not: compared, not sent again.
        self.writer.expect(stream, _digests(address, stream, from_step))

    def take(self, order: dict[str, Any]) -> None:
        with self._cond:
            self._limit = order.get("limit", self._limit)
            self._stop = self._stop or "stop" in order
            if "generation" in order:
                self._generation = order["generation"]
                self.writer.interrupt()
            self._cond.notify_all()

    def _through(self, work: Callable[[], object]) -> None:
        """Does it under whichever generation is granted."""
        while True:
            try:
                work()
                return
            except LogInterrupted:
                with self._cond:
                    self.writer.set_generation(self._generation)

    def _append(self, key: RecordKey) -> None:
        body = self.bodies.of(key)
        self._through(lambda: self.writer.append(self.stream, key, DTYPE, (body.nbytes,), body))

    def run(self) -> None:
        while True:
            began = time.monotonic()
            with self._cond:
                self._cond.wait_for(lambda: self._stop or self.step + FLUSH_STEPS <= self._limit)
                if self._stop:
                    break
            held_s = time.monotonic() - began
            for _ in range(FLUSH_STEPS):
                for microbatch in range(len(RECORD_BYTES)):
                    self._append(RecordKey(self.step, microbatch, 0))
                self.step += 1
            self._through(lambda: self.writer.flush(PATIENCE_S * 2))
            self.writer.forget_below(self.step)
            stats = self.writer.stats
            _say(acked=self.step, held_s=held_s, resent=stats.resent, compared=stats.verified)
        self.writer.close()
        _say(stopped=self.step)


def write(address: str, stream: str, seed: int, generation: int, from_step: int) -> None:
    keep_freed_memory()
    writer = _Writer(address, stream, seed, generation, from_step)
    _listen(writer.take)
    writer.run()


def read(address: str, stream: str, seed: int) -> None:
    """Told: ``{"from": STEP, "to": STEP}``. Says how it went, then waits for the next one."""
    keep_freed_memory()
    bodies = Bodies(seed, stream)
    reader = LogReader([address], JOB)
    for line in sys.stdin:
        order = json.loads(line)
        cursor = reader.follow(stream, order["from"])
        count = 0
        try:
            for step in range(order["from"], order["to"]):
                for microbatch in range(len(RECORD_BYTES)):
                    key = RecordKey(step, microbatch, 0)
                    record = cursor.get(key, PATIENCE_S, lambda: False)
                    where = f"{stream} {key}"
                    if record.sequence != sequence_of(step, microbatch):
                        raise _Wrong(
                            f"{where} is record {record.sequence} of its stream, not {sequence_of(step, microbatch)}"
                        )
                    if not same(record.body, bodies.of(key)):
                        raise _Wrong(f"{where} holds other bytes than were written")
                    count += 1
            _say(read=order["to"], records=count)
        except RecordTrimmed as trimmed:
            _say(overtaken=order["from"], reason=str(trimmed), records=count)
        finally:
            cursor.close()
            # A closed cursor is a cycle that holds its last messages. A trainer has a few of them in its life; here
            # there is one after the other, and the collector would come by once in hundreds.
            del cursor
            gc.collect()


class _Wrong(SwiftError):
    """A record that is there and is not what was written."""


def main(role: str, address: str, *rest: str) -> int:
    try:
        if role == "write":
            stream, seed, generation, from_step = rest
            write(address, stream, int(seed), int(generation), int(from_step))
        else:
            stream, seed = rest
            read(address, stream, int(seed))
    except SwiftError as error:
        _say(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
