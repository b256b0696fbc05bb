"""`swift-ft doctor`: looks at this machine and at services; `machine_checks` judges.

Exit code 0: no failure; 3: failures; 2: usage.
"""

import argparse
import contextlib
import ctypes
import errno
import fcntl
import importlib.util
import json
import mmap
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc

from swift_ft.cli_parser import Parser, argument, host_and_port, local_directory
from swift_ft.credentials import (
    ENV_TOKEN_FILE,
    SECURITY_KEY,
    advised,
    is_another_service,
    read_token,
    with_files,
)
from swift_ft.errors import SwiftError, UsageError
from swift_ft.log.protocol import TIME_KEY, VERSION_KEY, code_of, message_of, open_channel
from swift_ft.log.ring import Memory
from swift_ft.text import one_line, show, table, tell
from swift_ft.tokens import claims_of
from swift_ft.tools import machine_checks
from swift_ft.tools.machine_checks import Finding, Status

# Reading of PEM certificates and keys. Raises ValueError for other data.


def read_certificate(data: bytes) -> tuple[float, float]:
    """Returns (valid from, valid to) in seconds since 1970; of several certificates, the one that expires first. Raises
    ValueError for other data."""
    try:
        certificates = x509.load_pem_x509_certificates(data)
    except ValueError:
        raise ValueError("not a certificate in PEM") from None
    first = min(certificates, key=lambda certificate: certificate.not_valid_after_utc)
    return first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()


def read_key(data: bytes) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(data, None)
    except TypeError:
        raise ValueError("the key is encrypted: give one without a passphrase") from None
    except ValueError:
        raise ValueError("not a private key in PEM") from None


def same_key(certificate: bytes, key: bytes) -> bool | None:
    """Returns whether the key is the certificate's; None if the certificate cannot be read, which is reported
    elsewhere."""
    try:
        mine = x509.load_pem_x509_certificates(certificate)[0].public_key()
    except ValueError:
        return None
    theirs = read_key(key).public_key()
    plain = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return mine.public_bytes(*plain) == theirs.public_bytes(*plain)


# Gathering of facts: inspects this machine, writes a little into the log's directory, calls the services.

PACKAGES = ("swift-ft", "torch", "numpy", "grpcio", "protobuf", "cryptography", "prometheus-client")
TLS_VARIABLES = ("SWIFT_TLS_CERT", "SWIFT_TLS_KEY", "SWIFT_TLS_CA")
SERVICES = {"log server": "swift.log.v1.Log", "coordinator": "swift.coordinator.v1.Coordinator"}
SYNCS = 40
APPEND_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 4096
_KEEP_SIZE = 1  # <linux/falloc.h>
_ROUND_TRIPS = 7
_RING_BYTES = 256 << 20  # as a session's by default
_OF_OTHERS = (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED)
_NOT_THERE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_CLOCK = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


def software() -> Iterator[Finding]:
    versions: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    package = importlib.util.find_spec("swift_ft")
    folder = Path(package.origin).parent / "state" if package is not None and package.origin else Path()
    kernels = sorted(path.stem.removeprefix("_kernels_") for path in folder.glob("_kernels_*.so"))
    return machine_checks.software(sys.version_info[:3], versions, kernels)


def machine(ranks: int) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    no_ring = ""
    try:
        Memory.create(_RING_BYTES).close()
    except UsageError as error:
        no_ring = str(error)
    return machine_checks.machine(
        cpus=len(os.sched_getaffinity(0)),
        ranks=ranks,
        open_files=-1 if files == resource.RLIM_INFINITY else files,
        locked_bytes=-1 if locked == resource.RLIM_INFINITY else locked,
        no_ring=no_ring,
    )


# -- devices --------------------------------------------------------------------------------------------

_GPU_FIELDS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
)
_XID = re.compile(r"NVRM: Xid \(([^)]{1,40})\): ([0-9]{1,4})\b")
_KMSG_MAX = 100_000
_NVLINK_GPU = re.compile(r"GPU ([0-9]{1,4}):")
_NVLINK = re.compile(r"\s*Link [0-9]{1,3}: (?:([0-9]{1,6}(?:\.[0-9]{1,6})?) GB/s|<inactive>)")


def devices(limit_s: float = 20.0, messages: Path = Path("/dev/kmsg")) -> Iterator[Finding]:
    """Asks nvidia-smi, which may hang with its device. Yields nothing where there is none, or no device."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return
    try:
        yield from _devices(tool, limit_s)
    except subprocess.TimeoutExpired:
        yield machine_checks.gpu_tool(f"no answer in {limit_s:g} s")
    yield from machine_checks.xids(_xids(messages))


def _devices(tool: str, limit_s: float) -> Iterator[Finding]:
    query = [f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    code, said = _answer([tool, *query], limit_s)
    rows = [[word.strip() for word in line.split(",")] for line in said.splitlines()]
    if code or any(len(row) != len(_GPU_FIELDS) for row in rows):
        if "no devices" not in said.lower():
            yield machine_checks.gpu_tool(one_line(said[:200]) or f"exit code {code}")
        return
    for number, name, driver, total, used, ecc, uncorrected in rows:
        yield machine_checks.gpu(
            number,
            name,
            driver,
            memory_bytes=_digits(total) << 20,
            used_bytes=_digits(used) << 20,
            ecc=ecc,
            uncorrected=int(uncorrected) if uncorrected.isdecimal() else None,
        )
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield machine_checks.torch_for_gpus(metadata.version("torch"))
    code, said = _answer([tool, "nvlink", "--status"], limit_s)
    if not code:  # a tool that does not know the word says nothing about links
        yield from machine_checks.nvlink(nvlinks_of(said))


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


def _xids(messages: Path) -> dict[str, set[int]]:
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


# -- the directory --------------------------------------------------------------------------------------


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
    """Examines the log's directory. Leaves no file behind: its test file is unlinked before it is written."""
    path = Path(os.path.abspath(path))
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    measured: dict[str, Any] | None = None
    if not path.exists():
        writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
        yield machine_checks.directory(str(path), exists=False, writable=writable)
    else:
        problem = ""
        try:
            if not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            measured = _measured(path)
        except OSError as error:
            problem = error.strerror or str(error)
        in_use = measured is not None and _in_use(path)
        yield machine_checks.directory(str(path), exists=True, problem=problem, in_use=in_use)
    kind = ""
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as mounts:
        kind = filesystem_of(str(nearest.resolve()), mounts)
    if kind:
        space = os.statvfs(nearest)
        free_bytes, size_bytes = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
        yield from machine_checks.file_system(kind, free_bytes, size_bytes)
    if measured is not None:
        yield from machine_checks.disk(**measured)


def _measured(path: Path) -> dict[str, Any]:
    """Returns the arguments of `machine_checks.disk`."""
    fd, name = tempfile.mkstemp(prefix=".doctor.", dir=path)
    direct_fd = -1
    try:
        try:
            direct_fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        os.unlink(name)
        preallocates = _preallocates(fd)
        direct = direct_fd >= 0 and _writes_direct(direct_fd)
        return {
            "preallocates": preallocates,
            "direct": direct,
            "syncs_s": _syncs_s(fd),
            "append_bytes_per_s": _append(direct_fd if direct else fd),
        }
    finally:
        os.close(fd)
        if direct_fd >= 0:
            os.close(direct_fd)
        Path(name).unlink(missing_ok=True)


def _preallocates(fd: int) -> bool:
    """Returns whether fallocate works. Calls it directly: Python's posix_fallocate writes zeros if it is
    unsupported."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        return False
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return bool(fallocate(fd, _KEEP_SIZE, 0, 1 << 20) == 0)


def _writes_direct(fd: int) -> bool:
    """Returns whether a direct write works: the open may succeed and the write fail."""
    with mmap.mmap(-1, _BLOCK_BYTES) as block:
        try:
            return os.pwrite(fd, block, 0) == _BLOCK_BYTES
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise


def _syncs_s(fd: int) -> list[float]:
    times = []
    for at in range(SYNCS):
        os.pwrite(fd, os.urandom(_BLOCK_BYTES), at * _BLOCK_BYTES)
        began = time.perf_counter()
        os.fdatasync(fd)
        times.append(time.perf_counter() - began)
    return times


def _append(fd: int) -> float:
    """Returns the bytes per second of writes as the log server does them, with one sync at the end."""
    with mmap.mmap(-1, _PIECE_BYTES) as piece:
        piece[:] = os.urandom(1 << 20) * (_PIECE_BYTES >> 20)
        began = time.perf_counter()
        for offset in range(0, APPEND_BYTES, _PIECE_BYTES):
            done = 0
            while done < _PIECE_BYTES:
                with memoryview(piece) as view, view[done:] as rest:
                    done += os.pwrite(fd, rest, offset + done)
        os.fdatasync(fd)
        return APPEND_BYTES / (time.perf_counter() - began)


def _in_use(path: Path) -> bool:
    try:
        fd = os.open(path / ".lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# -- the network ----------------------------------------------------------------------------------------


def port(address: str) -> Finding:
    """Checks whether a server could listen at this address: binds it for a moment."""
    host, number = host_and_port(address, "--listen")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen()
    except OSError as error:
        return machine_checks.port(address, error.strerror or str(error))
    return machine_checks.port(address)


def peer(kind: str, address: str, timeout_s: float) -> Iterator[Finding]:
    """Checks a service's health a few times. The clock is compared in the fastest round trip."""
    where, advice = f"{kind} {address}", "is it running, there, behind no firewall?"
    try:
        channel = open_channel(address)
    except UsageError as error:  # a local problem: an invalid or missing token or certificate
        yield Finding(where, Status.FAIL, str(error), advice)
        return
    trips: list[float] = []
    offset: tuple[float, float] | None = None
    version, serving = "", False
    security: frozenset[str] = frozenset()
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICES[kind])
        for _ in range(_ROUND_TRIPS):
            began, wall = time.perf_counter(), time.time()
            reply, call = stub.Check.with_call(request, timeout=timeout_s)
            trip_s = time.perf_counter() - began
            trips.append(trip_s)
            serving = reply.status == health_pb2.HealthCheckResponse.SERVING
            about = {key: str(value) for key, value in call.trailing_metadata() or ()}
            version = about.get(VERSION_KEY, "")
            security = frozenset(filter(None, about.get(SECURITY_KEY, "").split(",")))
            told = about.get(TIME_KEY)
            if told is not None and _CLOCK.fullmatch(told) and trip_s == min(trips):
                offset = (trip_s, float(told) - (wall + trip_s / 2))
    except grpc.RpcError as error:
        problem = f"does not tell its health: {message_of(error)}"
        if code_of(error) in _OF_OTHERS or is_another_service(problem):
            problem = f"another service is there, not a {kind}"
        elif code_of(error) in _NOT_THERE:
            problem = advised(address, f"cannot be reached within {timeout_s:g} s: {message_of(error)}")
        yield Finding(where, Status.FAIL, problem, advice)
        return
    finally:
        channel.close()
    yield from machine_checks.peer(
        where,
        serving=serving,
        round_trips_s=trips,
        version=version,
        own_version=metadata.version("swift-ft"),
        security=security,
        clock_offset_s=offset[1] if offset is not None else None,
    )


# -- certificates ---------------------------------------------------------------------------------------


def certificates(environment: Mapping[str, str], now: float, warn_days: float) -> Iterator[Finding]:
    """Examines the files that the TLS variables name: their mode and validity, and whether the key matches."""
    pair = environment.get("SWIFT_TLS_CERT")
    for variable in TLS_VARIABLES:
        if not (path := environment.get(variable)):
            continue
        try:
            mode, data = os.stat(path).st_mode & 0o7777, Path(path).read_bytes()
            if variable.endswith("_KEY"):
                read_key(data)
                matches = same_key(Path(pair).read_bytes(), data) if pair else None
                yield machine_checks.key(variable, path, mode=mode, matches=matches)
                continue
            begins, ends = read_certificate(data)
        except (OSError, ValueError) as error:
            problem = (error.strerror if isinstance(error, OSError) else "") or str(error)
            yield Finding(variable, Status.FAIL, f"{path}: {problem}", "name a readable PEM file")
            continue
        yield machine_checks.certificate(
            variable, path, expires_in_s=ends - now, valid_since_s=now - begins, warn_days=warn_days
        )


def token(environment: Mapping[str, str], now: float) -> Iterator[Finding]:
    """Examines the token that this machine's clients would use. Its signature is not verified."""
    if not (name := environment.get(ENV_TOKEN_FILE)):
        return
    problem = "holds something that is no token of ours"
    try:
        claims = claims_of(read_token(Path(name)))
    except UsageError as error:
        claims, problem = None, str(error).removeprefix(f"{ENV_TOKEN_FILE} {name}: ")
    if claims is None:
        yield Finding(machine_checks.TOKEN, Status.FAIL, f"{name}: {problem}", "make one with swift-ft token")
        return
    yield machine_checks.token(
        name,
        job=claims.job,
        roles=claims.roles,
        generation=claims.generation_max,
        expires_in_s=claims.expires_at - now,
    )


TIMEOUT_S_MAX = 3600.0


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
    parser.add_argument(
        "--ranks", type=int, default=0, help="the number of ranks that will run on this machine"
    )
    for flag, what in (
        ("--listen", "must be free here"),
        ("--server", "a log server that must answer"),
        ("--coordinator", "a coordinator that must answer"),
    ):
        parser.add_argument(
            flag, action="append", default=[], metavar="HOST:PORT", help=f"{what}; may be repeated"
        )
    parser.add_argument(
        "--certificate-days",
        type=float,
        default=30.0,
        help="warn if a certificate expires within this many days",
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="how long to wait for each service"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the findings as JSON, for programs")
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options, checked. Raises UsageError."""
    options = parser().parse_args(argv)
    for flag in ("listen", "server", "coordinator"):
        for address in getattr(options, flag):
            host_and_port(address, f"--{flag}")
    for flag, least in (("ranks", 0), ("certificate_days", 0), ("timeout", 0.01)):
        if getattr(options, flag) < least:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: give at least {least}")
    if options.timeout > TIMEOUT_S_MAX:
        raise UsageError(f"--timeout {options.timeout:g}: give at most {TIMEOUT_S_MAX:g} s")
    if options.json is not None and not options.json.parent.is_dir():
        raise UsageError(f"--json: there is no directory {options.json.parent}")
    return options


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """Yields what is found on this machine and of the services."""
    yield from software()
    yield from machine(options.ranks)
    yield from devices()
    if options.directory is not None:
        yield from directory(options.directory)
    yield from map(port, options.listen)
    for kind, addresses in (("log server", options.server), ("coordinator", options.coordinator)):
        for address in addresses:
            yield from peer(kind, address, options.timeout)
    environment = with_files(os.environ)
    yield from certificates(environment, time.time(), options.certificate_days)
    yield from token(environment, time.time())


def lines(findings: Sequence[Finding]) -> list[str]:
    """Formats one line per finding: status, check, fact, and after a dash the advice."""
    rows = [
        (
            f"{finding.status:<4}",
            finding.check,
            finding.found + (f" - {finding.advice}" if finding.advice else ""),
        )
        for finding in findings
    ]
    counts = {status: sum(finding.status is status for finding in findings) for status in Status}
    last = f"{counts[Status.OK]} ok, {counts[Status.WARN]} to look at, {counts[Status.FAIL]} failed"
    return [*table(rows, left=3), last]


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        findings = list(examine(options))
        failed = any(finding.status is Status.FAIL for finding in findings)
        if options.json is not None:
            report = {"ok": not failed, "findings": [asdict(finding) for finding in findings]}
            options.json.write_text(json.dumps(report, indent=1) + "\n")
        show(lines(findings))
        return 3 if failed else 0
    except SwiftError as error:
        tell(error)
        return error.exit_code
    except BrokenPipeError:
        raise  # for `end_quietly`
    except OSError as error:
        tell(error)
        return 3
