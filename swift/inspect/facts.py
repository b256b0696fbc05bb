"""What is told of a log, whoever tells it: a server over gRPC, or the files of a directory."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentFacts:
    """A file."""

    name: str
    first_sequence: int
    records: int
    bytes: int
    ending: str
    torn_bytes: int


@dataclass(kw_only=True, slots=True)
class StreamFacts:
    """first <= durable <= appended; each is exclusive, the first sequence that is *not* there."""

    stream: str
    first_sequence: int
    durable_sequence: int
    appended_sequence: int
    records: int = 0
    bytes: int = 0
    first_step: int | None = None
    last_step: int | None = None
    unlogged: tuple[int, int] | None = None
    """The first and the last step that the writer has declared not to be whole."""
    segments: list[SegmentFacts] | None = None
    """None: a server does not tell."""
    problems: list[str] = field(default_factory=list)
    """Holes and the quarantine, with their reasons."""


@dataclass(kw_only=True, slots=True)
class JobFacts:
    """One job in a log."""

    job: str
    generation: int = 0
    trimmed_below_step: int = 0
    records: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    """0: no quota."""
    alarm: str = ""
    idle_seconds: float = 0.0
    """Since anybody wrote, read, or spoke for it (a server), or since a file changed (a directory)."""
    writers: int | None = None
    """Streams that are open for appending. None: a directory does not tell."""
    problem: str = ""
    """Why nothing more is known."""
    streams: list[StreamFacts] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Verified:
    """What --verify has found. ``damage`` is one line for each thing that is wrong."""

    records: int = 0
    bytes: int = 0
    damage: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class LogFacts:
    """A whole log: its space, its jobs, and what was verified."""

    source: str
    used_bytes: int = 0
    limit_bytes: int = 0
    """Most that may be kept, by quota or by what the disk has; 0: unknown."""
    alarm: str = ""
    """Empty, or what is wrong."""
    server_runs: bool | None = None
    jobs: list[JobFacts] = field(default_factory=list)
    verified: Verified | None = None

    def problems(self) -> list[str]:
        """One line each."""
        lines = [f"{job.job}: {job.problem}" for job in self.jobs if job.problem]
        return lines + [
            f"{job.job}/{stream.stream}: {problem}"
            for job in self.jobs
            for stream in job.streams
            for problem in stream.problems
        ]
