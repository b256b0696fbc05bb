"""The doctor's checks: turn facts into findings. Pure; every threshold is here, with its reason."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median

# Facts that the doctor has gathered, as plain data, without judgement.


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    python: tuple[int, int, int]
    packages: Mapping[str, str]
    """Distribution -> version; those not installed are left out."""
    kernels: Sequence[str]
    """Compiled libraries that were found, by level."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """CPUs and limits of this machine, as this process sees them."""

    cpus: int
    """CPUs that this process may use."""
    open_files: int
    """Limit of open files; -1: none."""
    locked_bytes: int
    """Limit of locked memory; -1: none."""
    shared_bytes: int | None
    """Free bytes in /dev/shm; None: it does not exist."""
    memfd: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Directory:
    """The log's directory and its disk."""

    path: str
    exists: bool = False
    parent_writable: bool = False
    """True if it can be created: the nearest existing parent is writable."""
    problem: str = ""
    """Reason why the directory cannot be written."""
    filesystem: str = ""
    free_bytes: int = 0
    size_bytes: int = 0
    direct: bool = False
    preallocates: bool = False
    syncs_s: Sequence[float] = ()
    """Seconds of each 4 KiB write with fdatasync."""
    append_bytes_per_s: float = 0.0
    in_use: bool = False
    """True if a log server has locked it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    address: str
    problem: str = ""
    """Reason why no server can listen there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A service whose health was checked."""

    kind: str
    address: str
    problem: str = ""
    serving: bool = False
    round_trips_s: Sequence[float] = ()
    version: str = ""
    """Its version of swift-ft; empty: not reported."""
    security: frozenset[str] = frozenset()
    """Reported protection: "tls", "mutual-tls", "tokens", "insecure"."""
    clock_offset_s: float | None = None
    """Its wall clock minus the local one, with an uncertainty of half a round trip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """One file that a TLS environment variable names: a certificate or a key."""

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
    """True if certificate and key belong together; None: one of them is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """Claims of a token, whose signature was not verified."""

    path: str
    problem: str = ""
    job: str = ""
    roles: Sequence[str] = ()
    generation: int | None = None
    """Highest generation in which it is valid; None: any."""
    expires_in_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """All gathered facts; the checks of this module judge them."""

    own_version: str
    software: Software
    machine: Machine
    ranks: int = 0
    """Number of ranks planned for this machine; 0: not given."""
    certificate_days: float = 30.0
    directory: Directory | None = None
    ports: Sequence[Port] = ()
    peers: Sequence[Peer] = ()
    certificates: Sequence[Certificate] = field(default=())
    token: Token | None = None


GIB = 1 << 30
DAY_S = 86400.0

# The versions of pyproject.toml.
PYTHONS = ((3, 11), (3, 12), (3, 13))
LEAST = {"grpcio": (1, 85), "protobuf": (7, 35), "torch": (2, 12)}
TORCH_BELOW = (2, 16)

SYNC_PLAUSIBLE_S = 0.0005
"""Seconds. A disk that syncs faster answers from a cache, which is safe only if the cache survives a power cut."""
SYNC_SLOW_S = 0.05
APPEND_SLOW_BYTES_PER_S = 200e6
FREE_BYTES_MIN = 10 * GIB
OPEN_FILES_MIN = 1024
OPEN_FILES_WANTED = 8192
SHARED_BYTES_WANTED = 1 * GIB
ROUND_TRIP_SLOW_S = 0.01
CLOCK_WARN_S = 1.0
TOKEN_WARN_S = 600.0
"""Time left to renew it before ranks are refused."""

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse", "fuseblk", "virtiofs"}
LAYERED = {"overlay", "aufs"}


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result table."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """Advice to the operator; empty if there is none."""


def examine(facts: Facts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(facts)]


def exit_code(findings: Sequence[Finding]) -> int:
    return 3 if any(finding.status is Status.FAIL for finding in findings) else 0


# -- software -----------------------------------------------------------------------------------------


def python(facts: Facts) -> Iterator[Finding]:
    version = facts.software.python
    shown = ".".join(map(str, version))
    if version[:2] in PYTHONS:
        yield Finding("python", Status.OK, shown)
    else:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        yield Finding("python", Status.FAIL, shown, f"use Python {wanted}")


def packages(facts: Facts) -> Iterator[Finding]:
    """Checks that required packages are installed, new enough, and not newer than the tested ones."""
    for name, least in LEAST.items():
        version = facts.software.packages.get(name)
        wanted = ".".join(map(str, least))
        if version is None:
            if name == "torch":
                yield Finding(
                    name,
                    Status.WARN,
                    "not installed",
                    "servers need none; trainers: pip install 'swift-ft[train]'",
                )
            else:
                yield Finding(name, Status.FAIL, "not installed", f"pip install '{name}>={wanted}'")
        elif _numbers(version) < least:
            yield Finding(name, Status.FAIL, version, f"too old: pip install '{name}>={wanted}'")
        elif name == "torch" and _numbers(version) >= TORCH_BELOW:
            below = ".".join(map(str, TORCH_BELOW))
            yield Finding(
                name, Status.WARN, version, f"not tried with {below} and newer: pip install 'torch<{below}'"
            )
        else:
            yield Finding(name, Status.OK, version)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:2]:
        digits = "".join(char for char in part if char.isdecimal())
        numbers.append(int(digits) if digits else 0)
    return tuple(numbers)


def kernels(facts: Facts) -> Iterator[Finding]:
    """Checks whether the compiled kernels for undo exist, if torch is installed."""
    if "torch" not in facts.software.packages:
        return
    if facts.software.kernels:
        yield Finding("compiled kernels", Status.OK, ", ".join(facts.software.kernels))
    else:
        yield Finding(
            "compiled kernels",
            Status.WARN,
            "not built",
            "undo is several times slower: install a C++ compiler, then swift-ft again",
        )


# -- the machine --------------------------------------------------------------------------------------


def processors(facts: Facts) -> Iterator[Finding]:
    """Checks whether there is a CPU to spare in addition to the ranks."""
    cpus, ranks = facts.machine.cpus, facts.ranks
    if not ranks:
        yield Finding("processors", Status.OK, f"{cpus}")
    elif cpus > ranks:
        yield Finding("processors", Status.OK, f"{cpus} for {ranks} ranks")
    else:
        yield Finding(
            "processors",
            Status.WARN,
            f"{cpus} for {ranks} ranks",
            "logging takes time from training without a spare processor: run fewer ranks here",
        )


def open_files(facts: Facts) -> Iterator[Finding]:
    limit = facts.machine.open_files
    advice = f"raise it to {OPEN_FILES_WANTED}: ulimit -n, or LimitNOFILE= in the unit"
    if limit < 0 or limit >= OPEN_FILES_WANTED:
        yield Finding("open files", Status.OK, "no limit" if limit < 0 else f"limit {limit}")
    else:
        status = Status.FAIL if limit < OPEN_FILES_MIN else Status.WARN
        yield Finding("open files", status, f"limit {limit}", advice)


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """Checks whether a ring fits into /dev/shm, or memfd can replace it."""
    machine = facts.machine
    if machine.shared_bytes is None:
        room, enough = "no /dev/shm", False
    else:
        room, enough = (
            f"{_size(machine.shared_bytes)} free in /dev/shm",
            machine.shared_bytes >= SHARED_BYTES_WANTED,
        )
    if enough:
        yield Finding("shared memory", Status.OK, room)
    elif machine.memfd:
        yield Finding("shared memory", Status.OK, f"{room}, memfd works")
    else:
        yield Finding(
            "shared memory", Status.WARN, room, "give it 1 GiB: mount -o remount,size=, or --shm-size"
        )


def locked_memory(facts: Facts) -> Iterator[Finding]:
    """Checks whether buffers can be pinned."""
    limit = facts.machine.locked_bytes
    if limit < 0 or limit >= SHARED_BYTES_WANTED:
        yield Finding("locked memory", Status.OK, "no limit" if limit < 0 else f"limit {_size(limit)}")
    else:
        yield Finding(
            "locked memory",
            Status.WARN,
            f"limit {_size(limit)}",
            "pinned buffers may be refused on GPU machines: ulimit -l, or LimitMEMLOCK=",
        )


# -- the log's directory --------------------------------------------------------------------------------


def directory(facts: Facts) -> Iterator[Finding]:
    """Checks whether the log's directory can be used, and its file system and disk."""
    directory = facts.directory
    if directory is None:
        return
    if not directory.exists and not directory.problem:
        if directory.parent_writable:
            yield Finding("directory", Status.OK, f"{directory.path} will be made")
        else:
            yield Finding(
                "directory",
                Status.FAIL,
                f"{directory.path} is missing",
                "make it, writable for the server",
            )
    elif directory.problem:
        yield Finding(
            "directory",
            Status.FAIL,
            f"{directory.path}: {directory.problem}",
            "make it writable for the server's user",
        )
    else:
        used = ", a log server holds it" if directory.in_use else ""
        yield Finding("directory", Status.OK, f"{directory.path}{used}")
    if directory.filesystem:
        yield _filesystem(directory)
        yield _space(directory)
    if directory.syncs_s:
        yield from _disk(directory)


def _filesystem(directory: Directory) -> Finding:
    kind = directory.filesystem
    if kind in IN_MEMORY:
        return Finding("filesystem", Status.FAIL, kind, "it is memory: a restart loses the log; use a disk")
    if kind in REMOTE or kind.startswith("fuse."):
        return Finding(
            "filesystem", Status.WARN, kind, "its syncs promise what its server promises; use a local disk"
        )
    if kind in LAYERED:
        return Finding("filesystem", Status.WARN, kind, "it goes with the container: mount a volume")
    return Finding("filesystem", Status.OK, kind)


def _space(directory: Directory) -> Finding:
    room = f"{_size(directory.free_bytes)} free of {_size(directory.size_bytes)}"
    if directory.free_bytes < FREE_BYTES_MIN:
        return Finding(
            "disk space",
            Status.WARN,
            room,
            "the log holds all since the last checkpoint: give it 10 GiB and more",
        )
    return Finding("disk space", Status.OK, room)


def _disk(directory: Directory) -> Iterator[Finding]:
    if directory.direct:
        yield Finding("direct writes", Status.OK, "O_DIRECT works")
    else:
        yield Finding(
            "direct writes",
            Status.WARN,
            "no O_DIRECT",
            "appends cost more, through the page cache: use ext4 or xfs",
        )
    if directory.preallocates:
        yield Finding("preallocation", Status.OK, "fallocate works")
    else:
        yield Finding(
            "preallocation",
            Status.WARN,
            "no fallocate",
            "a full disk is noticed late, syncs cost more: use ext4 or xfs",
        )
    middle_s = median(directory.syncs_s)
    worst_s = max(directory.syncs_s)
    syncs = f"median {middle_s * 1e3:.2f} ms, slowest {worst_s * 1e3:.2f} ms of {len(directory.syncs_s)}"
    if middle_s < SYNC_PLAUSIBLE_S:
        yield Finding(
            "sync latency",
            Status.WARN,
            syncs,
            "implausibly quick: be sure that the disk's cache survives a power cut, or turn it off",
        )
    elif middle_s > SYNC_SLOW_S:
        yield Finding(
            "sync latency", Status.WARN, syncs, "each acknowledgement waits so long: use another disk"
        )
    else:
        yield Finding("sync latency", Status.OK, syncs)
    speed = f"{directory.append_bytes_per_s / 1e6:.0f} MB/s with a sync at the end"
    if directory.append_bytes_per_s < APPEND_SLOW_BYTES_PER_S:
        yield Finding(
            "append speed", Status.WARN, speed, "boundary traffic above it stops training: use another disk"
        )
    else:
        yield Finding("append speed", Status.OK, speed)


# -- the network ----------------------------------------------------------------------------------------


def ports(facts: Facts) -> Iterator[Finding]:
    for port in facts.ports:
        if port.problem:
            yield Finding(
                "port", Status.FAIL, f"{port.address}: {port.problem}", "stop what uses it, or take another"
            )
        else:
            yield Finding("port", Status.OK, f"{port.address} is free")


def peers(facts: Facts) -> Iterator[Finding]:
    """Checks whether the services answer, have this version, are secured, and have the same time."""
    for peer in facts.peers:
        where = f"{peer.kind} {peer.address}"
        if peer.problem:
            yield Finding(
                where,
                Status.FAIL,
                peer.problem,
                "is it running, there, behind no firewall?",
            )
            continue
        yield _answer(where, peer)
        yield _security(where, peer)
        yield _version(where, peer, facts.own_version)
        yield _clock(where, peer)


def _answer(where: str, peer: Peer) -> Finding:
    trip_s = median(peer.round_trips_s)
    round_trip = f"round trip {trip_s * 1e3:.2f} ms"
    if not peer.serving:
        return Finding(
            where, Status.FAIL, f"NOT_SERVING, {round_trip}", "see its log: disk full, failed, or draining"
        )
    if trip_s > ROUND_TRIP_SLOW_S:
        return Finding(where, Status.WARN, f"SERVING, {round_trip}", "every step waits for it: put it nearer")
    return Finding(where, Status.OK, f"SERVING, {round_trip}")


def _security(where: str, peer: Peer) -> Finding:
    name, security = f"{where} security", ", ".join(sorted(peer.security)) or "plain, on loopback"
    if "insecure" in peer.security:
        return Finding(
            name,
            Status.WARN,
            security,
            "whoever reaches its port can use it: see docs/security.md, or trust the network",
        )
    return Finding(name, Status.OK, security)


def _version(where: str, peer: Peer, own: str) -> Finding:
    if peer.version == own:
        return Finding(f"{where} version", Status.OK, own)
    return Finding(
        f"{where} version",
        Status.WARN,
        f"{peer.version or 'unknown'}, here {own}",
        "install one version everywhere",
    )


def _clock(where: str, peer: Peer) -> Finding:
    name = f"{where} clock"
    if peer.clock_offset_s is None:
        return Finding(name, Status.WARN, "not told", "install one version everywhere")
    uncertain_s = min(peer.round_trips_s) / 2
    offset = f"{peer.clock_offset_s:+.3f} s against here, ± {uncertain_s:.3f} s"
    if abs(peer.clock_offset_s) - uncertain_s > CLOCK_WARN_S:
        # Leases use monotonic time: a wrong clock affects only the reading of logs and the dates of certificates.
        return Finding(
            name, Status.WARN, offset, "run NTP on both: logs of the two cannot be read side by side"
        )
    return Finding(name, Status.OK, offset)


def certificates(facts: Facts) -> Iterator[Finding]:
    for certificate in facts.certificates:
        yield _certificate(certificate, facts.certificate_days)


def _certificate(certificate: Certificate, days: float) -> Finding:
    where = f"{certificate.variable}"
    if certificate.problem:
        return Finding(
            where, Status.FAIL, f"{certificate.path}: {certificate.problem}", "name a readable PEM file"
        )
    if certificate.is_key:
        if certificate.mode & 0o077:
            return Finding(
                where,
                Status.FAIL,
                f"{certificate.path}: mode {certificate.mode:04o}",
                f"others may use it: chmod 600 {certificate.path}",
            )
        if certificate.matches is False:
            return Finding(
                where, Status.FAIL, f"{certificate.path}: not the certificate's key", "name the pair"
            )
        return Finding(where, Status.OK, f"{certificate.path}: mode {certificate.mode:04o}")
    if certificate.expires_in_s <= 0:
        return Finding(where, Status.FAIL, f"{certificate.path}: expired", "renew it")
    left = f"{certificate.path}: {certificate.expires_in_s / DAY_S:.0f} days left"
    if certificate.valid_since_s < 0:
        return Finding(
            where, Status.FAIL, f"{certificate.path}: not valid yet", "wait, or set this machine's clock"
        )
    if certificate.expires_in_s < days * DAY_S:
        return Finding(where, Status.WARN, left, "renew it")
    return Finding(where, Status.OK, left)


def token(facts: Facts) -> Iterator[Finding]:
    """Checks whether the token is valid, for how long, and not bound to a generation."""
    token, name = facts.token, "SWIFT_TOKEN_FILE"
    if token is None:
        return
    claims = f"{token.path}: job {token.job}, {', '.join(token.roles)}"
    left = f"{claims}, {token.expires_in_s / 60:.0f} min left"
    renew = "is swift-ft token --renew running?"
    if token.problem:
        yield Finding(name, Status.FAIL, f"{token.path}: {token.problem}", "make one with swift-ft token")
    elif token.expires_in_s <= 0:
        yield Finding(name, Status.FAIL, f"{claims}: expired", renew)
    elif token.generation is not None:
        yield Finding(
            name,
            Status.WARN,
            f"{left}, to generation {token.generation}",
            "a job's ranks need one that is not bound: leave --generation out",
        )
    elif token.expires_in_s < TOKEN_WARN_S:
        yield Finding(name, Status.WARN, left, renew)
    else:
        yield Finding(name, Status.OK, left)


def _size(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    *(python, packages, kernels),
    *(processors, open_files, shared_memory, locked_memory),
    *(directory, ports, peers, certificates, token),
)
