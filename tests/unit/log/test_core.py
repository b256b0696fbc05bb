"""The log's state machine, by transcripts: tests/golden/log/core. `pytest --rewrite`, then review the diff.

Commands are a verb and ``name=value`` pairs.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from swift_ft.log.record import RecordKey
from swift_ft_services.logserver.core import (
    STEP_UNKNOWN,
    Hole,
    JobState,
    LogCore,
    Refusal,
    Refused,
    StreamState,
)
from tests.transcripts import rerun
from tests.unit.log.frames import JOB, frame_of

GOLDEN = Path(__file__).parents[2] / "golden" / "log" / "core"
TRANSCRIPTS = sorted(GOLDEN.glob("*.txt"))


def trimmed(core: LogCore, job: JobState, below_step: int) -> list[StreamState]:
    """As the procedure does, in one piece: the streams that changed."""
    if not core.begin_trim(job, below_step):
        return []
    for stream in job.streams.values():
        sequence: int | None = 0
        while sequence is not None:
            sequence = core.sweep(job, stream, sequence, 500)
    return [stream for stream in job.streams.values() if core.end_trim(job, stream)]


class Interpreter:
    """One server's core and one job."""

    def __init__(self) -> None:
        self.core = LogCore()
        self.readers = 0

    def run(self, line: str) -> list[str]:
        verb, *pairs = line.split()
        options = dict(pair.split("=", 1) for pair in pairs)
        try:
            out = getattr(self, f"do_{verb}")(**options)
        except Refused as refused:
            out = said(refused.refusal)
        return [out] if isinstance(out, str) else list(out)

    def stream(self, name: str) -> StreamState:
        return self.core.job(JOB).stream(name)

    def do_fence(self, generation: str) -> str:
        self.core.fence(JOB, int(generation))
        return "granted"

    def do_open(self, stream: str, generation: str, acked: str = "0") -> str:
        return f"next {self.core.open(JOB, stream, int(generation), int(acked)).appended}"

    def do_append(self, stream: str, sequence: str, key: str, generation: str, **more: str) -> str:
        """key: step.microbatch.slot"""
        step, microbatch, slot = map(int, key.split("."))
        header, _ = frame_of(
            int(sequence),
            stream=stream,
            generation=int(more.get("frame_generation", generation)),
            key=RecordKey(step, microbatch, slot),
            digest=more.get("digest", "a").encode(),
        )
        decided = self.core.append(self.stream(stream), int(generation), header)
        return f"write {decided.sequence}" if decided else "known already"

    def do_durable(self, stream: str, sequence: str) -> str:
        self.core.made_durable(self.stream(stream), int(sequence))
        return self.show(self.stream(stream))

    def do_abandon(self) -> list[str]:
        self.core.abandon()
        return self.do_show()

    def do_hole(self, stream: str, begin: str, end: str) -> str:
        self.stream(stream).add_hole(Hole(int(begin), int(end), STEP_UNKNOWN, f"{begin} to {end} are gone"))
        return self.show(self.stream(stream))

    def do_reader(self, step: str) -> str:
        job = self.core.job(JOB)
        self.core.check_readable(job, int(step))
        self.readers += 1
        job.readers[self.readers] = int(step)
        return f"reader {self.readers}"

    def do_leave(self, reader: str) -> list[str]:
        del self.core.job(JOB).readers[int(reader)]
        return self.do_trim("0")

    def do_trim(self, below: str) -> list[str]:
        job = self.core.job(JOB)
        changed = trimmed(self.core, job, int(below))
        return [f"trimmed below {job.trimmed_below_step}", *(self.show(stream) for stream in changed)]

    def do_reset(self) -> list[str]:
        return [self.show(stream) for stream in self.core.reset(self.core.job(JOB))]

    def do_read(self, stream: str, step: str, sequence: str = "0") -> str:
        at = int(sequence)
        found: list[str] = []
        while True:
            before = at
            entries, at, refusal = self.core.durable_records(self.stream(stream), at, int(step), 2)
            found += [
                f"{entry.sequence}:{entry.key.step}.{entry.key.microbatch}.{entry.key.slot}"
                for entry in entries
            ]
            if refusal is not None or at == max(before, self.stream(stream).first):
                return " ".join(found) + (f"; then {said(refusal)}" if refusal else "; end")

    def do_digests(self, stream: str, step: str) -> str:
        entries, _, _ = self.core.durable_records(self.stream(stream), 0, int(step), 1000)
        return " ".join(f"{entry.key.step}.{entry.key.microbatch}" for entry in entries) or "none"

    def do_show(self) -> list[str]:
        job = self.core.job(JOB)
        return [f"generation {job.generation}", *(self.show(stream) for stream in job.streams.values())]

    def show(self, stream: StreamState) -> str:
        stream.check()
        assert len(stream.by_key) == len(stream.by_sequence)
        assert stream.bytes == sum(entry.frame_bytes for entry in stream.by_sequence.values())
        marks = f"{stream.name}: {stream.first} <= {stream.durable} <= {stream.appended}"
        corrupt = f", corrupt: {stream.corrupt_reason}" if stream.corrupt_reason else ""
        return f"{marks}, {len(stream.by_sequence)} records{corrupt}"


def said(refusal: Refusal) -> str:
    return f"REFUSED {refusal.reason}: {refusal.message}"


def test_there_are_transcripts() -> None:
    assert TRANSCRIPTS


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, golden: Callable[[Path, str], None]) -> None:
    golden(path, rerun(path.read_text(), Interpreter().run))
