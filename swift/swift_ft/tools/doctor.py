"""`swift-ft doctor`: looks at this machine, and at services. Every threshold is here, with its reason.

Exit code 0: no failure; 3: failures; 2: usage.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from statistics import median

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft.cli_parser import (
    Parser,
    add_json,
    argument,
    check_file,
    command,
    host_and_port,
    local_directory,
    write_json,
)
from swift_ft.credentials import (
    ENV_CA,
    ENV_CERTIFICATE,
    ENV_KEY,
    ENV_TOKEN_FILE,
    SECURITY_KEY,
    advised,
    is_another_service,
    read_token,
    with_files,
)
from swift_ft.errors import UsageError
from swift_ft.log.directory import server_runs
from swift_ft.log.protocol import MEMORY_KEY, TIME_KEY, VERSION_KEY, code_of, message_of, open_channel
from swift_ft.log.shared_memory import is_near
from swift_ft.text import one_line, show, size_words, table
from swift_ft.tokens import claims_of, read_file, read_secret

GIB = 1 << 30
DAY_S = 86400.0
SYNC_PLAUSIBLE_S = 0.0005
"""Seconds. A disk that syncs faster answers from a cache, which is safe only if the cache survives a power cut."""
SYNC_SLOW_S = 0.05
APPEND_SLOW_BYTES_PER_S = 200e6
FREE_BYTES_MIN = 10 * GIB
OPEN_FILES_MIN = 1024
OPEN_FILES_WANTED = 8192
ROUND_TRIP_SLOW_S = 0.01
CLOCK_WARN_S = 1.0
CERTIFICATE_WARN_S = 30 * DAY_S
GPU_USED_PART_MAX = 0.1
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
"""Memory (48, 63, 64, 92, 94, 95, 140), NVLink (74), off the bus (79), firmware (62, 119, 120)."""
TOKEN_WARN_S = 600.0
"""Time left to renew it before ranks are refused."""
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
REMOTE = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "glusterfs", "fuse", "fuseblk", "virtiofs"}
LAYERED = {"overlay", "aufs"}
SERVICES = {"log server": "swift.log.v1.Log", "coordinator": "swift.coordinator.v1.Coordinator"}
SYNCS = 40
APPEND_BYTES = 64 << 20
TIMEOUT_S_MAX = 3600.0
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 4096
_ROUND_TRIPS = 7
_OF_OTHERS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_GPU_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
_NVLINK_GPU = re.compile(r"GPU ([0-9]{1,4}):")
_NVLINK = re.compile(r"\s*Link [0-9]{1,3}: (?:([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s|<inactive>)")
_XID = re.compile(r"NVRM: Xid \(([^)]{1,40})\): ([0-9]{1,4})\b")
_KMSG_MAX = 100_000
_CLOCK = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class Status(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


WARN, FAIL = Status.WARN, Status.FAIL


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    status: Status
    found: str
    advice: str = ""
    """Advice to the operator; empty if there is none."""


def _judge(check: str, found: str, *rules: tuple[bool, Status, str]) -> Finding:
    """Returns a finding by the first rule (condition, status, advice) that holds; without one all is well."""
    status, advice = next(((status, advice) for holds, status, advice in rules if holds), (Status.OK, ""))
    return Finding(check, status, found, advice)


# -- the machine --------------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    versions = [f"Python {sys.version.split()[0]}"]
    for name in ("swift-ft", "torch", "grpcio", "protobuf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    yield _judge("software", ", ".join(versions))
    if importlib.util.find_spec("torch") is not None:  # the compiled kernels are for undo
        folder = Path(__file__).parents[1] / "state"
        kernels = sorted(path.stem.removeprefix("_kernels_") for path in folder.glob("_kernels_*.so"))
        advice = "undo takes copies of the state: install a C++ compiler, then swift-ft again"
        yield _judge("compiled kernels", ", ".join(kernels) or "not built", (not kernels, WARN, advice))
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def open_files(limit: int) -> Finding:
    no_limit = limit == resource.RLIM_INFINITY
    advice = f"raise it to {OPEN_FILES_WANTED}: ulimit -n, or LimitNOFILE= in the unit"
    return _judge(
        "open files",
        "no limit" if no_limit else f"limit {limit}",
        (not no_limit and limit < OPEN_FILES_MIN, FAIL, advice),
        (not no_limit and limit < OPEN_FILES_WANTED, WARN, advice),
    )


# -- GPUs --------------------------------------------------------------------------------------------


def devices(limit_s: float = 20.0, messages: Path = Path("/dev/kmsg")) -> Iterator[Finding]:
    """Asks nvidia-smi, which may hang with its device. Yields nothing where there is none, or no device."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return
    try:
        yield from _devices(tool, limit_s)
    except subprocess.TimeoutExpired:
        yield _gpu_tool(f"no answer in {limit_s:g} s")
    yield from _xids(_xids_in(messages))


def _devices(tool: str, limit_s: float) -> Iterator[Finding]:
    query = [f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    code, said = _answer([tool, *query], limit_s)
    rows = [[word.strip() for word in line.split(",")] for line in said.splitlines()]
    if code or any(len(row) != len(_GPU_FIELDS) for row in rows):
        if "no devices" not in said.lower():
            yield _gpu_tool(one_line(said[:200]) or f"exit code {code}")
        return
    for number, name, driver, total, used, ecc, uncorrected in rows:
        yield gpu(
            number,
            name,
            driver,
            memory_bytes=_digits(total) << 20,
            used_bytes=_digits(used) << 20,
            ecc=ecc,
            uncorrected=_digits(uncorrected),
        )
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch, advice = metadata.version("torch"), "install torch for CUDA: https://pytorch.org/get-started"
        yield _judge("torch for GPUs", torch, (torch.endswith("+cpu"), WARN, advice))
    code, said = _answer([tool, "nvlink", "--status"], limit_s)
    if not code:  # a tool that does not know the word says nothing about links
        yield from _nvlink(nvlinks_of(said))


def _answer(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Returns (exit code, output). Raises TimeoutExpired, and leaves no wait behind."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said = process.communicate(timeout=limit_s)[0].strip()
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel it cannot be killed
            process.wait(1.0)
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    return process.returncode, said


def nvlinks_of(said: str) -> dict[str, list[float | None]]:
    """Returns GPU -> GB/s of each of its links, None for one that is down, from `nvidia-smi nvlink --status`."""
    found: dict[str, list[float | None]] = {}
    links: list[float | None] = []
    for line in said.splitlines():
        if gpu := _NVLINK_GPU.match(line):
            links = found.setdefault(gpu[1], [])
        elif link := _NVLINK.match(line):
            links.append(float(link[1]) if link[1] else None)
    return found


def _digits(word: str) -> int:
    return int(word) if word.isdecimal() else 0


def _xids_in(messages: Path) -> dict[str, set[int]]:
    """Returns device -> numbers, from the kernel's messages; empty if this user may not read them."""
    found: dict[str, set[int]] = {}
    with contextlib.suppress(OSError):  # BlockingIOError: that was the last one
        fd = os.open(messages, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for _ in range(_KMSG_MAX):
                try:
                    line = os.read(fd, 1 << 13)
                except BrokenPipeError:  # overwritten meanwhile
                    continue
                if not line:
                    break
                for where, number in _XID.findall(line.decode(errors="replace")):
                    found.setdefault(where, set()).add(int(number))
        finally:
            os.close(fd)
    return found


def gpu(
    number: str, name: str, driver: str, *, memory_bytes: int, used_bytes: int, ecc: str, uncorrected: int
) -> Finding:
    """`ecc`: "Enabled", "Disabled", or another word if the device has none. `uncorrected`: ECC errors since the last
    reset, as far as they are told."""
    return _judge(
        f"gpu {number}",
        f"{name}, driver {driver}, {size_words(used_bytes)} of {size_words(memory_bytes)} in use, "
        + ("ECC off" if ecc == "Disabled" else f"{uncorrected} uncorrected ECC errors"),
        (
            uncorrected > 0,
            FAIL,
            "its memory has lost bits: reset it (nvidia-smi --gpu-reset), or have it exchanged",
        ),
        (ecc == "Disabled", WARN, "a flipped bit goes unseen: nvidia-smi -e 1, then reset it"),
        (
            used_bytes > GPU_USED_PART_MAX * memory_bytes,
            WARN,
            "other processes have its memory: see nvidia-smi",
        ),
    )


def _gpu_tool(problem: str) -> Finding:
    return _judge("gpu", f"nvidia-smi: {problem}", (True, WARN, "load the driver, or reset the device"))


def _nvlink(by_gpu: Mapping[str, Sequence[float | None]]) -> Iterator[Finding]:
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


def _xids(by_device: Mapping[str, Collection[int]]) -> Iterator[Finding]:
    """`by_device`: the numbers of the driver's errors since this machine was started. Those of programs are left
    out."""
    for where, numbers in sorted(by_device.items()):
        if found := sorted(HARDWARE_XIDS.intersection(numbers)):
            advice = (
                "the driver has seen the hardware fail: dmesg, then reset the device or have it exchanged"
            )
            yield _judge(f"gpu {where}", f"XID {', '.join(map(str, found))}", (True, WARN, advice))


# -- the log's directory --------------------------------------------------------------------------------


def filesystem_of(path: str, mounts: Iterable[str]) -> str:
    """Returns the file system type of `path` (absolute, resolved), from the lines of /proc/self/mountinfo."""
    best, kind = "", ""
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = fields[4].replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split()[0]
    return kind


def directory(path: Path) -> Iterator[Finding]:
    """Examines the log's directory, or the nearest parent if there is none yet. Leaves no file behind."""
    path = Path(os.path.abspath(path))
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    with open("/proc/self/mountinfo") as mounts:
        kind = filesystem_of(str(nearest.resolve()), mounts)
    space = os.statvfs(nearest)
    yield from file_system(kind, space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize)
    try:
        with tempfile.TemporaryFile(dir=nearest, buffering=0) as file:
            syncs_s, append_bytes_per_s = _syncs_s(file.fileno()), _append(file.fileno())
    except OSError as error:
        found = f"{path}: {error.strerror}"
        yield _judge(
            "directory", found, (True, FAIL, "make it, with room and writable for the server's user")
        )
        return
    missing, held = nearest != path, bool(server_runs(path))
    words = " will be made" if missing else ", a log server holds it" if held else ""
    yield _judge("directory", f"{path}{words}")
    yield from disk(syncs_s, append_bytes_per_s)


def file_system(kind: str, free_bytes: int, size_bytes: int) -> Iterator[Finding]:
    remote = kind in REMOTE or kind.startswith("fuse.")
    yield _judge(
        "filesystem",
        kind,
        (kind in IN_MEMORY, FAIL, "it is memory: a restart loses the log; use a disk"),
        (remote, WARN, "its syncs promise what its server promises; use a local disk"),
        (kind in LAYERED, WARN, "it goes with the container: mount a volume"),
    )
    advice = "the log holds all since the last checkpoint: give it 10 GiB and more"
    room = f"{size_words(free_bytes)} free of {size_words(size_bytes)}"
    yield _judge("disk space", room, (free_bytes < FREE_BYTES_MIN, WARN, advice))


def disk(syncs_s: Sequence[float], append_bytes_per_s: float) -> Iterator[Finding]:
    """`syncs_s`: seconds of each 4 KiB write with fdatasync."""
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
    slow = append_bytes_per_s < APPEND_SLOW_BYTES_PER_S
    yield _judge(
        "append speed",
        f"{append_bytes_per_s / 1e6:.0f} MB/s with a sync at the end",
        (slow, WARN, "boundary traffic above it stops training: use another disk"),
    )


def _syncs_s(fd: int) -> list[float]:
    times = []
    for at in range(SYNCS):
        os.pwrite(fd, os.urandom(_BLOCK_BYTES), at * _BLOCK_BYTES)
        began = time.perf_counter()
        os.fdatasync(fd)
        times.append(time.perf_counter() - began)
    return times


def _append(fd: int) -> float:
    """Returns the bytes per second of large writes, with one sync at the end."""
    piece = os.urandom(_PIECE_BYTES)
    began = time.perf_counter()
    done = 0
    while done < APPEND_BYTES:
        done += os.pwrite(fd, piece, done)
    os.fdatasync(fd)
    return done / (time.perf_counter() - began)


# -- the services ---------------------------------------------------------------------------------------


def peer(kind: str, address: str, timeout_s: float) -> Iterator[Finding]:
    """Checks a service's health a few times. The clock is compared in the fastest round trip."""
    where, advice = f"{kind} {address}", "is it running, there, behind no firewall?"
    try:
        channel = open_channel(address)
    except UsageError as error:  # a local problem: an invalid or missing token or certificate
        yield Finding(where, FAIL, str(error), advice)
        return
    trips_s: list[float] = []
    serving = False
    about: dict[str, str] = {}
    offset_s: float | None = None
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICES[kind])
        for _ in range(_ROUND_TRIPS):
            began, wall = time.perf_counter(), time.time()
            reply, call = stub.Check.with_call(request, timeout=timeout_s)
            trip_s = time.perf_counter() - began
            trips_s.append(trip_s)
            serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            about = {key: str(value) for key, value in call.trailing_metadata() or ()}
            if trip_s == min(trips_s) and _CLOCK.fullmatch(about.get(TIME_KEY, "")):
                offset_s = float(about[TIME_KEY]) - (wall + trip_s / 2)
    except grpc.RpcError as error:
        problem = f"does not tell its health: {message_of(error)}"
        if code_of(error) in _OF_OTHERS or is_another_service(problem):
            problem = f"another service is there, not a {kind}"
        elif code_of(error) in _NOT_THERE:
            problem = advised(address, f"cannot be reached within {timeout_s:g} s: {message_of(error)}")
        yield Finding(where, FAIL, problem, advice)
        return
    finally:
        channel.close()
    yield from answer(where, serving, trips_s, about, offset_s)


def answer(
    where: str,
    serving: bool,
    trips_s: Sequence[float],
    about: Mapping[str, str],
    offset_s: float | None,
) -> Iterator[Finding]:
    """Judges a service that answers. `about`: the metadata of its health. `offset_s`: its wall clock minus the local
    one, known to half a round trip; None if it is not told."""
    trip_s, uncertain_s = median(trips_s), min(trips_s) / 2
    yield _judge(
        where,
        f"{'SERVING' if serving else 'NOT_SERVING'}, round trip {trip_s * 1e3:.2f} ms",
        (not serving, FAIL, "see its log: disk full, failed, or draining"),
        (trip_s > ROUND_TRIP_SLOW_S, WARN, "every step waits for it: put it nearer"),
    )
    security = sorted(filter(None, about.get(SECURITY_KEY, "").split(",")))
    advice = "whoever reaches its port can use it: see docs/security.md, or trust the network"
    found = ", ".join(security) or "plain, on loopback"
    yield _judge(f"{where} security", found, ("insecure" in security, WARN, advice))
    version, own = about.get(VERSION_KEY, ""), metadata.version("swift-ft")
    found = version if version == own else f"{version or 'unknown'}, here {own}"
    yield _judge(f"{where} version", found, (version != own, WARN, "install one version everywhere"))
    if offset_s is not None:
        # Leases use monotonic time: a wrong clock affects only the reading of logs and the dates of certificates.
        differs = abs(offset_s) - uncertain_s > CLOCK_WARN_S
        yield _judge(
            f"{where} clock",
            f"{offset_s:+.3f} s against here, ± {uncertain_s:.3f} s",
            (differs, WARN, "run NTP on both: logs of the two cannot be read side by side"),
        )
    if memory := about.get(MEMORY_KEY):
        sent = "are sent to it over gRPC: it is on another machine, in another network namespace, or another user's"
        yield _judge(f"{where} records", "are read in their writers' memory" if is_near(memory) else sent)


def coordinators(addresses: Sequence[str], timeout_s: float) -> Iterator[Finding]:
    """Checks all that share one store: one of them serves, and those that stand by do not."""
    found = [list(peer("coordinator", address, timeout_s)) for address in addresses]
    serves = any(first.found.startswith("SERVING") for first, *_ in found)
    for first, *others in found:
        if serves and first.found.startswith("NOT_SERVING"):
            first = replace(first, status=Status.OK, advice="it stands by, and another one serves")
        yield from (first, *others)


# -- certificates and tokens ----------------------------------------------------------------------------


def certificates(environment: Mapping[str, str], now: float) -> Iterator[Finding]:
    """Examines the files that the TLS variables name: their mode and validity, and whether the key matches."""
    for variable in (ENV_CERTIFICATE, ENV_KEY, ENV_CA):
        if not (path := environment.get(variable)):
            continue
        try:
            if variable == ENV_KEY:
                yield _key(Path(path), environment.get(ENV_CERTIFICATE))
            else:
                yield _certificate(variable, Path(path), now)
        except UsageError as error:
            found = str(error).removeprefix(f"{variable} ")
            yield Finding(variable, FAIL, found, "name a file in PEM that can be read")
        except (ValueError, TypeError) as error:
            yield Finding(variable, FAIL, f"{path}: {error}", "name a file in PEM, without a passphrase")


def _key(path: Path, certificate: str | None) -> Finding:
    """Raises UsageError, ValueError, or TypeError if the key is encrypted."""
    key = load_pem_private_key(read_secret(path, ENV_KEY), None).public_key()
    theirs = None
    if certificate is not None:
        with contextlib.suppress(UsageError, ValueError):  # reported as the certificate's
            data = read_file(Path(certificate), ENV_CERTIFICATE)
            theirs = x509.load_pem_x509_certificates(data)[0].public_key()
    is_other = theirs is not None and theirs != key
    found = "not the certificate's key" if is_other else "can be used"
    return _judge(ENV_KEY, f"{path}: {found}", (is_other, FAIL, "name the pair"))


def _certificate(variable: str, path: Path, now: float) -> Finding:
    """Judges the one of several certificates that expires first. Raises UsageError or ValueError."""
    every = x509.load_pem_x509_certificates(read_file(path, variable))
    first = min(every, key=lambda one: one.not_valid_after_utc)
    left_s = first.not_valid_after_utc.timestamp() - now
    early = first.not_valid_before_utc.timestamp() > now
    left = "expired" if left_s <= 0 else "not valid yet" if early else f"{left_s / DAY_S:.0f} days left"
    return _judge(
        variable,
        f"{path}: {left}",
        (left_s <= 0, FAIL, "renew it"),
        (early, FAIL, "wait, or set this machine's clock"),
        (left_s < CERTIFICATE_WARN_S, WARN, "renew it"),
    )


def token(environment: Mapping[str, str], now: float) -> Iterator[Finding]:
    """Examines the token that this machine's clients would use. Its signature is not verified."""
    if not (name := environment.get(ENV_TOKEN_FILE)):
        return
    try:
        claims = claims_of(read_token(Path(name)))
        problem = "" if claims else f"{name}: holds something that is no token of ours"
    except UsageError as error:
        claims, problem = None, str(error).removeprefix(f"{ENV_TOKEN_FILE} ")
    if claims is None:
        yield Finding(ENV_TOKEN_FILE, FAIL, problem, "make one with swift-ft token")
        return
    left_s, renew = claims.expires_at - now, "is swift-ft token --renew running?"
    left = f"{left_s / 60:.0f} min left" if left_s > 0 else "expired"
    bound = claims.generation_max is not None
    until = f", to generation {claims.generation_max}" if bound else ""
    yield _judge(
        ENV_TOKEN_FILE,
        f"{name}: job {claims.job}, {', '.join(sorted(claims.roles))}: {left}{until}",
        (left_s <= 0, FAIL, renew),
        (bound, WARN, "a job's ranks need one that is not bound: leave --generation out"),
        (left_s < TOKEN_WARN_S, WARN, renew),
    )


# -- the command ----------------------------------------------------------------------------------------


def parser() -> Parser:
    parser = Parser(
        prog="swift-ft doctor",
        description="Checks whether this machine is fit for swift, and whether the services answer.",
    )
    parser.add_argument(
        "--directory",
        type=argument(local_directory),
        help="the log server's directory; 64 MiB are written there and removed",
    )
    several = "a coordinator that must answer, or several with commas between them, one of which serves"
    for flag, what in (("--server", "a log server that must answer"), ("--coordinator", several)):
        parser.add_argument(
            flag, action="append", default=[], metavar="HOST:PORT", help=f"{what}; may be repeated"
        )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for each service"
    )
    add_json(parser)
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    options = parser().parse_args(argv)
    for address in options.server:
        host_and_port(address, "--server")
    for addresses in options.coordinator:
        for address in addresses.split(","):
            host_and_port(address, "--coordinator")
    if not 0.01 <= options.timeout <= TIMEOUT_S_MAX:
        raise UsageError(f"--timeout {options.timeout:g}: at least 0.01 s, at most {TIMEOUT_S_MAX:g} s")
    check_file("--json", options.json)
    return options


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    yield from machine()
    yield from devices()
    if options.directory is not None:
        yield from directory(options.directory)
    for address in options.server:
        yield from peer("log server", address, options.timeout)
    for addresses in options.coordinator:
        yield from coordinators(addresses.split(","), options.timeout)
    environment = with_files(os.environ)
    yield from certificates(environment, time.time())
    yield from token(environment, time.time())


def lines(findings: Sequence[Finding]) -> list[str]:
    """Formats one line per finding: status, check, fact, and after a dash the advice."""
    rows = []
    for finding in findings:
        advice = f" - {finding.advice}" if finding.advice else ""
        rows.append((f"{finding.status:<4}", finding.check, finding.found + advice))
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    last = f"{counts[Status.OK]} ok, {counts[WARN]} to look at, {counts[FAIL]} failed"
    return [*table(rows, left=3), last]


@command
def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    findings = list(examine(options))
    failed = any(finding.status is FAIL for finding in findings)
    write_json(options.json, {"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    show(lines(findings))
    return 3 if failed else 0
