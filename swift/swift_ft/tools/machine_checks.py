"""The doctor's checks: turn what was found into findings. Pure; every threshold is here, with its reason."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from swift_ft.text import size_words

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
GPU_USED_PART_MAX = 0.1
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Memory (48, 63, 64, 92, 94, 95, 140), NVLink (74), off the bus (79), firmware (62, 119, 120)."""
TOKEN_WARN_S = 600.0
"""Time left to renew it before ranks are refused."""

TOKEN = "SWIFT_TOKEN_FILE"
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


def _judge(check: str, found: str, *rules: tuple[bool, Status, str]) -> Finding:
    """Returns a finding by the first rule (condition, status, advice) that holds; without one all is well."""
    status, advice = next(((status, advice) for holds, status, advice in rules if holds), (Status.OK, ""))
    return Finding(check, status, found, advice)


WARN, FAIL = Status.WARN, Status.FAIL


# -- software -----------------------------------------------------------------------------------------


def software(python: Sequence[int], versions: Mapping[str, str], kernels: Sequence[str]) -> Iterator[Finding]:
    """Judges Python, the packages (installed, new enough, and not newer than the tested ones) and the kernels."""
    wanted = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
    yield _judge("python", _dotted(python), (tuple(python[:2]) not in PYTHONS, FAIL, f"use Python {wanted}"))
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


def machine(*, cpus: int, ranks: int, open_files: int, locked_bytes: int, no_ring: str) -> Iterator[Finding]:
    """Judges whether a CPU is left beside the ranks, the limits of this process (-1: none), and shared memory.

    `no_ring`: reason why a rank's log queue cannot be had, and a remedy. Without it sessions are refused."""
    yield _judge(
        "processors",
        f"{cpus} for {ranks} ranks" if ranks else f"{cpus}",
        (
            0 < ranks >= cpus,
            WARN,
            "logging takes time from training without a spare processor: run fewer ranks here",
        ),
    )
    advice = f"raise it to {OPEN_FILES_WANTED}: ulimit -n, or LimitNOFILE= in the unit"
    yield _judge(
        "open files",
        "no limit" if open_files < 0 else f"limit {open_files}",
        (0 <= open_files < OPEN_FILES_MIN, FAIL, advice),
        (0 <= open_files < OPEN_FILES_WANTED, WARN, advice),
    )
    problem, _, remedy = no_ring.partition("; ")
    yield _judge("shared memory", problem or "memfd works", (bool(problem), FAIL, remedy))
    yield _judge(
        "locked memory",
        "no limit" if locked_bytes < 0 else f"limit {size_words(locked_bytes)}",
        (
            0 <= locked_bytes < LOCKED_BYTES_WANTED,
            WARN,
            "pinned buffers may be refused on GPU machines: ulimit -l, or LimitMEMLOCK=",
        ),
    )


# -- devices ------------------------------------------------------------------------------------------


def gpu(
    number: str,
    name: str,
    driver: str,
    *,
    memory_bytes: int,
    used_bytes: int,
    ecc: str,
    uncorrected: int | None,
) -> Finding:
    """`ecc`: "Enabled", "Disabled", or another word if the device has none. `uncorrected`: ECC errors since the last
    reset; None: not told."""
    lost = uncorrected or 0
    return _judge(
        f"gpu {number}",
        f"{name}, driver {driver}, {size_words(used_bytes)} of {size_words(memory_bytes)} in use, "
        + ("ECC off" if ecc == "Disabled" else f"{lost} uncorrected ECC errors"),
        (lost > 0, FAIL, "its memory has lost bits: reset it (nvidia-smi --gpu-reset), or have it exchanged"),
        (ecc == "Disabled", WARN, "a flipped bit goes unseen: nvidia-smi -e 1, then reset it"),
        (
            used_bytes > GPU_USED_PART_MAX * memory_bytes,
            WARN,
            "other processes have its memory: see nvidia-smi",
        ),
    )


def gpu_tool(problem: str) -> Finding:
    return _judge("gpu", f"nvidia-smi: {problem}", (True, WARN, "load the driver, or reset the device"))


def nvlink(by_gpu: Mapping[str, Sequence[float | None]]) -> Iterator[Finding]:
    """`by_gpu`: GB/s of each of a GPU's links, None for one that is down. A machine without any that is up has none to
    lose: a single GPU, or one without a bridge."""
    up = {gpu: [speed for speed in links if speed is not None] for gpu, links in by_gpu.items()}
    for gpu, speeds in up.items() if any(up.values()) else ():
        yield _judge(
            f"nvlink of gpu {gpu}",
            f"{len(speeds)} of {len(by_gpu[gpu])} links up, {sum(speeds):.0f} GB/s",
            (
                len(speeds) < len(by_gpu[gpu]) or sum(speeds) < max(map(sum, up.values())),
                WARN,
                "its messages take a slower way than those of others: nvidia-smi nvlink --errorcounters, dmesg",
            ),
        )


def torch_for_gpus(torch: str) -> Finding:
    advice = "install torch for CUDA: https://pytorch.org/get-started"
    return _judge("torch for GPUs", torch, (torch.endswith("+cpu"), WARN, advice))


def xids(by_device: Mapping[str, Collection[int]]) -> Iterator[Finding]:
    """`by_device`: the numbers of the driver's errors since this machine was started. Those of programs are left
    out."""
    for where, numbers in sorted(by_device.items()):
        if found := sorted(HARDWARE_XIDS.intersection(numbers)):
            advice = (
                "the driver has seen the hardware fail: dmesg, then reset the device or have it exchanged"
            )
            yield _judge(f"gpu {where}", f"XID {', '.join(map(str, found))}", (True, WARN, advice))


# -- the log's directory --------------------------------------------------------------------------------


def directory(
    path: str, *, exists: bool, writable: bool = True, problem: str = "", in_use: bool = False
) -> Finding:
    """Judges whether the log's directory can be used. `writable`: it, or its nearest parent that exists."""
    found = (f": {problem}" if problem else "") + (", a log server holds it" if in_use else "")
    if not exists:
        found = " will be made" if writable else " is missing"
    return _judge(
        "directory",
        f"{path}{found}",
        (not exists and not writable, FAIL, "make it, writable for the server"),
        (bool(problem), FAIL, "make it writable for the server's user"),
    )


def file_system(kind: str, free_bytes: int, size_bytes: int) -> Iterator[Finding]:
    yield _judge(
        "filesystem",
        kind,
        (kind in IN_MEMORY, FAIL, "it is memory: a restart loses the log; use a disk"),
        (
            kind in REMOTE or kind.startswith("fuse."),
            WARN,
            "its syncs promise what its server promises; use a local disk",
        ),
        (kind in LAYERED, WARN, "it goes with the container: mount a volume"),
    )
    advice = "the log holds all since the last checkpoint: give it 10 GiB and more"
    room = f"{size_words(free_bytes)} free of {size_words(size_bytes)}"
    yield _judge("disk space", room, (free_bytes < FREE_BYTES_MIN, WARN, advice))


def disk(
    *, direct: bool, preallocates: bool, syncs_s: Sequence[float], append_bytes_per_s: float
) -> Iterator[Finding]:
    """`syncs_s`: seconds of each 4 KiB write with fdatasync."""
    advice = "appends cost more, through the page cache: use ext4 or xfs"
    yield _judge("direct writes", "O_DIRECT works" if direct else "no O_DIRECT", (not direct, WARN, advice))
    advice = "a full disk is noticed late, syncs cost more: use ext4 or xfs"
    found = "fallocate works" if preallocates else "no fallocate"
    yield _judge("preallocation", found, (not preallocates, WARN, advice))
    middle_s, worst_s = median(syncs_s), max(syncs_s)
    yield _judge(
        "sync latency",
        f"median {middle_s * 1e3:.2f} ms, slowest {worst_s * 1e3:.2f} ms of {len(syncs_s)}",
        (
            middle_s < SYNC_PLAUSIBLE_S,
            WARN,
            "implausibly quick: be sure that the disk's cache survives a power cut, or turn it off",
        ),
        (middle_s > SYNC_SLOW_S, WARN, "each acknowledgement waits so long: use another disk"),
    )
    yield _judge(
        "append speed",
        f"{append_bytes_per_s / 1e6:.0f} MB/s with a sync at the end",
        (
            append_bytes_per_s < APPEND_SLOW_BYTES_PER_S,
            WARN,
            "boundary traffic above it stops training: use another disk",
        ),
    )


# -- the network ----------------------------------------------------------------------------------------


def port(address: str, problem: str = "") -> Finding:
    """`problem`: reason why no server can listen there."""
    found = f"{address}: {problem}" if problem else f"{address} is free"
    return _judge("port", found, (bool(problem), FAIL, "stop what uses it, or take another"))


def peer(
    where: str,
    *,
    serving: bool,
    round_trips_s: Sequence[float],
    version: str,
    own_version: str,
    security: Collection[str],
    clock_offset_s: float | None,
) -> Iterator[Finding]:
    """Judges a service that answers. `version`, `clock_offset_s` (its wall clock minus the local one, known to half a
    round trip): empty or None if not reported. `security`: of "tls", "mutual-tls", "tokens", "insecure"."""
    trip_s, uncertain_s = median(round_trips_s), min(round_trips_s) / 2
    yield _judge(
        where,
        f"{'SERVING' if serving else 'NOT_SERVING'}, round trip {trip_s * 1e3:.2f} ms",
        (not serving, FAIL, "see its log: disk full, failed, or draining"),
        (trip_s > ROUND_TRIP_SLOW_S, WARN, "every step waits for it: put it nearer"),
    )
    advice = "whoever reaches its port can use it: see docs/security.md, or trust the network"
    found = ", ".join(sorted(security)) or "plain, on loopback"
    yield _judge(f"{where} security", found, ("insecure" in security, WARN, advice))
    other, same = version != own_version, "install one version everywhere"
    found = f"{version or 'unknown'}, here {own_version}" if other else version
    yield _judge(f"{where} version", found, (other, WARN, same))
    # Leases use monotonic time: a wrong clock affects only the reading of logs and the dates of certificates.
    yield _judge(
        f"{where} clock",
        "not told"
        if clock_offset_s is None
        else f"{clock_offset_s:+.3f} s against here, ± {uncertain_s:.3f} s",
        (clock_offset_s is None, WARN, same),
        (
            abs(clock_offset_s or 0.0) - uncertain_s > CLOCK_WARN_S,
            WARN,
            "run NTP on both: logs of the two cannot be read side by side",
        ),
    )


def token(
    path: str, *, job: str, roles: Collection[str], generation: int | None, expires_in_s: float
) -> Finding:
    """Judges for how long a token is valid, and to which generation (None: any)."""
    renew, claims = "is swift-ft token --renew running?", f"{path}: job {job}, {', '.join(sorted(roles))}"
    expired, bound = expires_in_s <= 0, generation is not None
    left = f"{claims}: expired" if expired else f"{claims}, {expires_in_s / 60:.0f} min left"
    left += f", to generation {generation}" if bound and not expired else ""
    return _judge(
        TOKEN,
        left,
        (expired, FAIL, renew),
        (bound, WARN, "a job's ranks need one that is not bound: leave --generation out"),
        (expires_in_s < TOKEN_WARN_S, WARN, renew),
    )


def key(variable: str, path: str, *, mode: int, matches: bool | None) -> Finding:
    """`matches`: whether certificate and key belong together; None: one of them is missing."""
    readable = bool(mode & 0o077)
    found = "not the certificate's key" if matches is False and not readable else f"mode {mode:04o}"
    return _judge(
        variable,
        f"{path}: {found}",
        (readable, FAIL, f"others may use it: chmod 600 {path}"),
        (matches is False, FAIL, "name the pair"),
    )


def certificate(
    variable: str, path: str, *, expires_in_s: float, valid_since_s: float, warn_days: float
) -> Finding:
    """`valid_since_s`: negative if it is not valid yet."""
    early = valid_since_s < 0
    found = (
        "expired"
        if expires_in_s <= 0
        else "not valid yet"
        if early
        else f"{expires_in_s / DAY_S:.0f} days left"
    )
    return _judge(
        variable,
        f"{path}: {found}",
        (expires_in_s <= 0, FAIL, "renew it"),
        (early, FAIL, "wait, or set this machine's clock"),
        (expires_in_s < warn_days * DAY_S, WARN, "renew it"),
    )
