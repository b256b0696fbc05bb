"""The doctor's checks: turn facts into findings. Pure; every threshold is here, with its reason."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

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
    no_ring: str
    """Reason why a rank's log queue cannot be had; empty: it can."""


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
LOCKED_BYTES_WANTED = 1 * GIB
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


def _judge(check: str, found: str, *rules: tuple[bool, Status, str]) -> Finding:
    """Returns a finding by the first rule (condition, status, advice) that holds; without one all is well."""
    status, advice = next(((status, advice) for holds, status, advice in rules if holds), (Status.OK, ""))
    return Finding(check, status, found, advice)


WARN, FAIL = Status.WARN, Status.FAIL


# -- software -----------------------------------------------------------------------------------------


def software(facts: Facts) -> Iterator[Finding]:
    """Judges Python, the packages (installed, new enough, and not newer than the tested ones) and the kernels."""
    python, versions, kernels = facts.software.python, facts.software.packages, facts.software.kernels
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    yield _judge("python", _dotted(python), (python[:2] not in PYTHONS, FAIL, f"use Python {wanted}"))
    below = _dotted(TORCH_BELOW)
    for name, least in LEAST.items():
        found, is_torch = versions.get(name), name == "torch"
        install = f"pip install '{name}>={_dotted(least)}'"
        yield _judge(
            name,
            found or "not installed",
            (not found and is_torch, WARN, "servers need none; trainers: pip install 'swift-ft[train]'"),
            (not found, FAIL, install),
            (_numbers(found or "") < least, FAIL, f"too old: {install}"),
            (
                is_torch and _numbers(found or "") >= TORCH_BELOW,
                WARN,
                f"not tried with {below} and newer: pip install 'torch<{below}'",
            ),
        )
    if "torch" in versions:  # the compiled kernels are for undo
        advice = "undo takes copies of the state: install a C++ compiler, then swift-ft again"
        yield _judge("compiled kernels", ", ".join(kernels) or "not built", (not kernels, WARN, advice))


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))


def _numbers(version: str) -> tuple[int, ...]:
    parts = ("".join(filter(str.isdecimal, part)) for part in version.split("+")[0].split(".")[:2])
    return tuple(int(digits or 0) for digits in parts)


# -- the machine --------------------------------------------------------------------------------------


def machine(facts: Facts) -> Iterator[Finding]:
    """Judges whether a CPU is left beside the ranks, the limits of this process, and shared memory."""
    machine, ranks = facts.machine, facts.ranks
    yield _judge(
        "processors",
        f"{machine.cpus} for {ranks} ranks" if ranks else f"{machine.cpus}",
        (
            0 < ranks >= machine.cpus,
            WARN,
            "logging takes time from training without a spare processor: run fewer ranks here",
        ),
    )
    files = machine.open_files
    advice = f"raise it to {OPEN_FILES_WANTED}: ulimit -n, or LimitNOFILE= in the unit"
    yield _judge(
        "open files",
        "no limit" if files < 0 else f"limit {files}",
        (0 <= files < OPEN_FILES_MIN, FAIL, advice),
        (0 <= files < OPEN_FILES_WANTED, WARN, advice),
    )
    # A rank's log queue: without it sessions are refused.
    problem, _, remedy = machine.no_ring.partition("; ")
    yield _judge("shared memory", problem or "memfd works", (bool(problem), FAIL, remedy))
    locked = machine.locked_bytes
    yield _judge(
        "locked memory",
        "no limit" if locked < 0 else f"limit {_size(locked)}",
        (
            0 <= locked < LOCKED_BYTES_WANTED,
            WARN,
            "pinned buffers may be refused on GPU machines: ulimit -l, or LimitMEMLOCK=",
        ),
    )


# -- the log's directory --------------------------------------------------------------------------------


def directory(facts: Facts) -> Iterator[Finding]:
    """Judges whether the log's directory can be used, and its file system and disk."""
    directory = facts.directory
    if directory is None:
        return
    absent = not directory.exists and not directory.problem
    found = (f": {directory.problem}" if directory.problem else "") + (
        ", a log server holds it" if directory.in_use else ""
    )
    if absent:
        found = " will be made" if directory.parent_writable else " is missing"
    yield _judge(
        "directory",
        f"{directory.path}{found}",
        (absent and not directory.parent_writable, FAIL, "make it, writable for the server"),
        (bool(directory.problem), FAIL, "make it writable for the server's user"),
    )
    if kind := directory.filesystem:
        remote = kind in REMOTE or kind.startswith("fuse.")
        yield _judge(
            "filesystem",
            kind,
            (kind in IN_MEMORY, FAIL, "it is memory: a restart loses the log; use a disk"),
            (remote, WARN, "its syncs promise what its server promises; use a local disk"),
            (kind in LAYERED, WARN, "it goes with the container: mount a volume"),
        )
        advice = "the log holds all since the last checkpoint: give it 10 GiB and more"
        room = f"{_size(directory.free_bytes)} free of {_size(directory.size_bytes)}"
        yield _judge("disk space", room, (directory.free_bytes < FREE_BYTES_MIN, WARN, advice))
    if directory.syncs_s:
        yield from _disk(directory)


def _disk(directory: Directory) -> Iterator[Finding]:
    direct, preallocates = directory.direct, directory.preallocates
    advice = "appends cost more, through the page cache: use ext4 or xfs"
    yield _judge("direct writes", "O_DIRECT works" if direct else "no O_DIRECT", (not direct, WARN, advice))
    advice = "a full disk is noticed late, syncs cost more: use ext4 or xfs"
    found = "fallocate works" if preallocates else "no fallocate"
    yield _judge("preallocation", found, (not preallocates, WARN, advice))
    middle_s, worst_s = median(directory.syncs_s), max(directory.syncs_s)
    yield _judge(
        "sync latency",
        f"median {middle_s * 1e3:.2f} ms, slowest {worst_s * 1e3:.2f} ms of {len(directory.syncs_s)}",
        (
            middle_s < SYNC_PLAUSIBLE_S,
            WARN,
            "implausibly quick: be sure that the disk's cache survives a power cut, or turn it off",
        ),
        (middle_s > SYNC_SLOW_S, WARN, "each acknowledgement waits so long: use another disk"),
    )
    slow = directory.append_bytes_per_s < APPEND_SLOW_BYTES_PER_S
    speed = f"{directory.append_bytes_per_s / 1e6:.0f} MB/s with a sync at the end"
    yield _judge(
        "append speed", speed, (slow, WARN, "boundary traffic above it stops training: use another disk")
    )


# -- the network ----------------------------------------------------------------------------------------


def network(facts: Facts) -> Iterator[Finding]:
    """Judges whether ports are free and services answer, have this version, are secured, and have the same time."""
    for port in facts.ports:
        found = f"{port.address}: {port.problem}" if port.problem else f"{port.address} is free"
        yield _judge("port", found, (bool(port.problem), FAIL, "stop what uses it, or take another"))
    for peer in facts.peers:
        where = f"{peer.kind} {peer.address}"
        if peer.problem:
            yield Finding(where, FAIL, peer.problem, "is it running, there, behind no firewall?")
        else:
            yield from _peer(where, peer, facts.own_version)


def _peer(where: str, peer: Peer, own: str) -> Iterator[Finding]:
    trip_s, uncertain_s = median(peer.round_trips_s), min(peer.round_trips_s) / 2
    yield _judge(
        where,
        f"{'SERVING' if peer.serving else 'NOT_SERVING'}, round trip {trip_s * 1e3:.2f} ms",
        (not peer.serving, FAIL, "see its log: disk full, failed, or draining"),
        (trip_s > ROUND_TRIP_SLOW_S, WARN, "every step waits for it: put it nearer"),
    )
    advice = "whoever reaches its port can use it: see docs/security.md, or trust the network"
    security = ", ".join(sorted(peer.security)) or "plain, on loopback"
    yield _judge(f"{where} security", security, ("insecure" in peer.security, WARN, advice))
    other, same = peer.version != own, "install one version everywhere"
    found = f"{peer.version or 'unknown'}, here {own}" if other else own
    yield _judge(f"{where} version", found, (other, WARN, same))
    offset_s = peer.clock_offset_s
    # Leases use monotonic time: a wrong clock affects only the reading of logs and the dates of certificates.
    yield _judge(
        f"{where} clock",
        "not told" if offset_s is None else f"{offset_s:+.3f} s against here, ± {uncertain_s:.3f} s",
        (offset_s is None, WARN, same),
        (
            abs(offset_s or 0.0) - uncertain_s > CLOCK_WARN_S,
            WARN,
            "run NTP on both: logs of the two cannot be read side by side",
        ),
    )


def credentials(facts: Facts) -> Iterator[Finding]:
    """Judges the files that the TLS variables name, and the token: for how long it is valid, and in which
    generations."""
    for certificate in facts.certificates:
        found, *rules = _key(certificate) if certificate.is_key else _certificate(certificate, facts)
        if certificate.problem:
            found, rules = certificate.problem, [(True, FAIL, "name a readable PEM file")]
        yield _judge(certificate.variable, f"{certificate.path}: {found}", *rules)
    if (token := facts.token) is None:
        return
    renew, minutes = "is swift-ft token --renew running?", token.expires_in_s / 60
    claims = f"{token.path}: job {token.job}, {', '.join(token.roles)}"
    expired, bound = token.expires_in_s <= 0, token.generation is not None
    left = f"{claims}: expired" if expired else f"{claims}, {minutes:.0f} min left"
    left += f", to generation {token.generation}" if bound and not expired else ""
    yield _judge(
        "SWIFT_TOKEN_FILE",
        f"{token.path}: {token.problem}" if token.problem else left,
        (bool(token.problem), FAIL, "make one with swift-ft token"),
        (expired, FAIL, renew),
        (bound, WARN, "a job's ranks need one that is not bound: leave --generation out"),
        (token.expires_in_s < TOKEN_WARN_S, WARN, renew),
    )


def _key(key: Certificate) -> tuple[Any, ...]:
    readable = bool(key.mode & 0o077)
    found = "not the certificate's key" if key.matches is False and not readable else f"mode {key.mode:04o}"
    return (
        found,
        (readable, FAIL, f"others may use it: chmod 600 {key.path}"),
        (key.matches is False, FAIL, "name the pair"),
    )


def _certificate(certificate: Certificate, facts: Facts) -> tuple[Any, ...]:
    left_s, early = certificate.expires_in_s, certificate.valid_since_s < 0
    found = "expired" if left_s <= 0 else "not valid yet" if early else f"{left_s / DAY_S:.0f} days left"
    return (
        found,
        (left_s <= 0, FAIL, "renew it"),
        (early, FAIL, "wait, or set this machine's clock"),
        (left_s < facts.certificate_days * DAY_S, WARN, "renew it"),
    )


def _size(size: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"


CHECKS = (software, machine, directory, network, credentials)
