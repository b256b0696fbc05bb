"""What the doctor found, as plain data. Nothing here judges it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    python: tuple[int, int, int]
    packages: Mapping[str, str]
    """Distribution -> version; those that are not installed are left out."""
    kernels: Sequence[str]
    """Compiled libraries that are there, by level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Processors and limits of this machine, as this process sees them."""

    cpus: int
    """That this process may use."""
    open_files: int
    """The limit; -1: none."""
    locked_bytes: int
    """How much memory may be locked; -1: no limit."""
    shared_bytes: int | None
    """Free in /dev/shm; None: there is none."""
    memfd: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """The log's directory and the disk below it."""

    path: str
    exists: bool = False
    parent_writable: bool = False
    """It can be made: the nearest directory above that exists is writable."""
    problem: str = ""
    """Why nothing could be written."""
    filesystem: str = ""
    free_bytes: int = 0
    size_bytes: int = 0
    direct: bool = False
    preallocates: bool = False
    syncs_s: Sequence[float] = ()
    """Each the time of one 4 KiB write with fdatasync."""
    append_bytes_per_s: float = 0.0
    in_use: bool = False
    """A log server holds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    address: str
    problem: str = ""
    """Why nobody could listen there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A service that was asked for its health."""

    kind: str
    address: str
    problem: str = ""
    serving: bool = False
    round_trips_s: Sequence[float] = ()
    version: str = ""
    """Its version of swift-ft; empty: it did not say."""
    security: frozenset[str] = frozenset()
    """How it says that it is protected: "tls", "mutual-tls", "tokens", "insecure"."""
    clock_offset_s: float | None = None
    """Its wall clock minus this one's, known to half a round trip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """One file that an environment variable names for TLS: a certificate or a key."""

    variable: str
    path: str
    problem: str = ""
    expires_in_s: float = 0.0
    valid_since_s: float = 0.0
    """Negative: not valid yet."""
    mode: int = 0
    """Permission bits of the file."""
    is_key: bool = False
    matches: bool | None = None
    """Whether certificate and key belong together; None: there are not both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What a token says of itself. Nobody here has checked its signature."""

    path: str
    problem: str = ""
    job: str = ""
    roles: Sequence[str] = ()
    generation: int | None = None
    """It is good until the job's generation is above; None: whatever it is."""
    expires_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All that was found; `machine_checks` judges it."""

    own_version: str
    software: Software
    machine: Machine
    ranks: int = 0
    """That are to run here; 0: not said."""
    certificate_days: float = 30.0
    directory: Directory | None = None
    ports: Sequence[Port] = ()
    peers: Sequence[Peer] = ()
    certificates: Sequence[Certificate] = field(default=())
    token: Token | None = None
