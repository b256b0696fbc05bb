"""Tables for people: rich on a terminal, plain columns elsewhere."""

import sys
from collections.abc import Sequence

from swift.inspect.facts import JobFacts, LogFacts, StreamFacts
from swift.words import one_line

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

JOB_COLUMNS = (
    "job",
    "generation",
    "trimmed below step",
    "streams",
    "records",
    "size",
    "of",
    "writers",
    "idle",
)
STREAM_COLUMNS = (
    "job",
    "stream",
    "first",
    "durable",
    "appended",
    "records",
    "size",
    "steps",
    "segments",
    "state",
)
SEGMENT_COLUMNS = ("job", "stream", "segment", "records", "size", "ends")
_LEFT = {"job", "stream", "segment", "state", "ends", "steps"}


def size_words(count: int) -> str:
    """1234567 -> "1.2 MB"."""
    value = float(count)
    for unit in _UNITS:
        if value < 999.95 or unit == _UNITS[-1]:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError


def time_words(seconds: float) -> str:
    """90.0 -> "1.5 min"."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def show(facts: LogFacts, *, segments: bool) -> None:
    """``segments``: every file, too."""
    print(one_line(_head(facts)))
    _table(JOB_COLUMNS, [_job_row(job) for job in facts.jobs])
    _table(STREAM_COLUMNS, [_stream_row(job.job, s) for job in facts.jobs for s in job.streams])
    if segments:
        _table(
            SEGMENT_COLUMNS, [row for job in facts.jobs for s in job.streams for row in _files(job.job, s)]
        )
    for alarm in (facts.alarm, *(job.alarm for job in facts.jobs)):
        if alarm:
            print(one_line(f"alarm: {alarm}"))
    if facts.verified is None:
        for problem in facts.problems():
            print(one_line(f"problem: {problem}"))


def _head(facts: LogFacts) -> str:
    of = f" of {size_words(facts.limit_bytes)} that it may" if facts.limit_bytes else ""
    words = {True: "a log server runs on it", False: "no log server runs on it", None: ""}
    runs = f"; {words[facts.server_runs]}" if words[facts.server_runs] and ":" not in facts.source else ""
    return f"{facts.source} keeps {size_words(facts.used_bytes)}{of}{runs}"


def _job_row(job: JobFacts) -> list[str]:
    return [
        job.job,
        str(job.generation),
        str(job.trimmed_below_step),
        str(len(job.streams)),
        str(job.records),
        size_words(job.bytes),
        size_words(job.limit_bytes) if job.limit_bytes else "-",
        "-" if job.writers is None else str(job.writers),
        time_words(job.idle_seconds),
    ]


def _stream_row(job: str, stream: StreamFacts) -> list[str]:
    steps = "-" if stream.first_step is None else f"{stream.first_step} to {stream.last_step}"
    if stream.unlogged is not None:
        steps += " but {} to {}".format(*stream.unlogged)
    problems = len(stream.problems)
    return [
        job,
        stream.stream,
        str(stream.first_sequence),
        str(stream.durable_sequence),
        str(stream.appended_sequence),
        str(stream.records),
        size_words(stream.bytes),
        steps,
        "-" if stream.segments is None else str(len(stream.segments)),
        "ok" if not problems else f"{problems} problem{'s' if problems > 1 else ''}",
    ]


def _files(job: str, stream: StreamFacts) -> list[list[str]]:
    return [
        [
            job,
            stream.stream,
            segment.name,
            str(segment.records),
            size_words(segment.bytes),
            f"torn, {segment.torn_bytes} B" if segment.torn_bytes else segment.ending,
        ]
        for segment in stream.segments or []
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    rows = [[one_line(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _rich_table(columns, rows)
        return
    widths = [max(len(row[at]) for row in [columns, *rows]) for at in range(len(columns))]
    print()
    for row in [columns, *rows]:
        cells = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(columns, row, widths)
        ]
        print("  ".join(cells).rstrip())


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold")
    for row in rows:
        table.add_row(*[Text(cell, style="red" if "problem" in cell else "") for cell in row])
    console = Console()
    console.print()
    console.print(table)
