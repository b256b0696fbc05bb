"""python -m swift_ft_services.logserver: keeps the log of training jobs in a directory and serves it over gRPC."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

# gRPC reads this at import: otherwise its own messages about a port in use would appear next to ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from swift_ft import events, logs
from swift_ft.cli_parser import Parser, add_metrics_arguments, metrics_address, write_address
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.log.directory import LIVES_S, age_s, free_bytes
from swift_ft.log.frame import BODY_BYTES_MAX
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.protocol import Fsync
from swift_ft.log.segment import FILE_BYTES_LEAST
from swift_ft.logs import end_process_on_uncaught
from swift_ft_services import listening
from swift_ft_services.authorization import Gate
from swift_ft_services.logserver.disk import RealDisk, allow_open_files
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.quotas import HIGH_WATER, LOW_WATER, SpaceConfig
from swift_ft_services.logserver.service import make_server
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage
from swift_ft_services.logserver.storage_interface import Storage

_STOP_GRACE_S = 2.0
_SWITCH_S = 0.0005
_CREDIT_BYTES_MAX = 1 << 40
_FSYNC_INTERVAL_S_MAX = 3600.0
SPACE_BYTES_MIN = 64 << 10
"""Space that the first file of a stream takes; the smallest quota allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The command line, validated."""

    directory: Path
    protection: listening.Protection
    address_file: Path | None
    segment_bytes: int
    engine: EngineConfig
    metrics: tuple[str, int] | None = None
    metrics_address_file: Path | None = None
    log: logs.Log

    def __post_init__(self) -> None:
        if self.segment_bytes < 4096:
            raise UsageError(f"--segment-bytes {self.segment_bytes} is too small; give at least 4096")
        if self.segment_bytes > FILE_BYTES_LEAST // 2:
            raise UsageError(
                f"--segment-bytes {self.segment_bytes} is too large; give at most {FILE_BYTES_LEAST // 2}"
            )
        if not 1 <= self.engine.credit_bytes <= _CREDIT_BYTES_MAX:
            raise UsageError(f"--credit-bytes must be between 1 and {_CREDIT_BYTES_MAX}")
        if not 1 <= self.engine.body_bytes_max <= BODY_BYTES_MAX:
            raise UsageError(f"--body-bytes-max must be between 1 and {BODY_BYTES_MAX}")
        if not 0 < self.engine.fsync_interval_s <= _FSYNC_INTERVAL_S_MAX:
            raise UsageError(f"--fsync-interval must be positive, at most {_FSYNC_INTERVAL_S_MAX:g} s")
        for name in ("jobs_max", "job_streams_max", "job_records_max", "job_readers_max"):
            if getattr(self.engine, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
        if self.engine.job_bytes_max < self.engine.writer_bytes_max:
            raise UsageError(
                f"--job-bytes-max must have room for one writer: at least {self.engine.writer_bytes_max} "
                "(--credit-bytes and one frame)"
            )
        space = self.engine.space
        if min(space.quota_bytes, space.job_quota_bytes) < 0:
            raise UsageError("--quota-bytes and --job-quota-bytes must be positive; leave them out for none")
        for flag, quota in (
            ("--quota-bytes", space.quota_bytes),
            ("--job-quota-bytes", space.job_quota_bytes),
        ):
            if 0 < quota < SPACE_BYTES_MIN:
                raise UsageError(
                    f"{flag} {quota} has no room for anything: give at least {SPACE_BYTES_MIN}, or leave it out for "
                    "no quota"
                )
        if not 0 < space.low_water < space.high_water < 1:
            raise UsageError(
                f"--low-water {space.low_water:g} must be below --high-water {space.high_water:g}, "
                "and both between 0 and 1"
            )
        if self.engine.keep_s < 0:
            raise UsageError("--keep-days must be positive; leave it out to keep logs until they are dropped")
        if 0 < self.engine.keep_s < LIVES_S:
            raise UsageError(
                f"--keep-days {self.engine.keep_s / 86400:g} would drop jobs that live: give at least "
                f"{LIVES_S / 86400:.4f}, or leave it out to keep logs until they are dropped"
            )
        if self.address_file is not None and not self.address_file.parent.is_dir():
            raise UsageError(f"--address-file: there is no directory {self.address_file.parent}")


def parse(argv: Sequence[str]) -> ServerConfig:
    parser = Parser(
        prog="swift-ft logserver",
        description="Keeps the log of training jobs in a directory and serves it over gRPC.",
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="the directory of the segments; made if it is missing"
    )
    parser.add_argument(
        "--address-file", type=Path, help="host:port is written to this file once the server serves"
    )
    parser.add_argument(
        "--fsync",
        choices=[policy.value for policy in Fsync],
        default=Fsync.ALWAYS.value,
        help="acknowledge after a shared fdatasync (always), or after the write; a stream may choose its own policy",
    )
    parser.add_argument(
        "--fsync-interval",
        type=float,
        default=0.1,
        metavar="SECONDS",
        help="time between syncs with --fsync interval",
    )
    parser.add_argument(
        "--segment-bytes", type=int, default=128 << 20, help="size at which a segment is sealed"
    )
    parser.add_argument(
        "--credit-bytes", type=int, default=64 << 20, help="bytes that each writer may have under way"
    )
    parser.add_argument(
        "--body-bytes-max",
        type=int,
        default=BODY_BYTES_MAX,
        help="size of the largest tensor that is accepted",
    )
    _add_limits(parser)
    listening.add_flags(parser)
    _add_space(parser)
    add_metrics_arguments(parser)
    logs.add_arguments(parser)
    options = parser.parse_args(argv)
    return ServerConfig(
        directory=options.directory,
        protection=listening.protection_of(options, "logserver"),
        address_file=options.address_file,
        segment_bytes=options.segment_bytes,
        metrics=metrics_address(options.metrics_listen, insecure=options.insecure),
        metrics_address_file=options.metrics_address_file,
        log=logs.from_arguments("logserver", options),
        engine=EngineConfig(
            fsync=Fsync(options.fsync),
            fsync_interval_s=options.fsync_interval,
            credit_bytes=options.credit_bytes,
            body_bytes_max=options.body_bytes_max,
            jobs_max=options.jobs_max,
            job_streams_max=options.job_streams_max,
            job_readers_max=options.job_readers_max,
            job_records_max=options.job_records_max,
            job_bytes_max=options.job_bytes_max,
            space=SpaceConfig(
                quota_bytes=options.quota_bytes,
                job_quota_bytes=options.job_quota_bytes,
                high_water=options.high_water,
                low_water=options.low_water,
            ),
            keep_s=options.keep_days * 86400,
        ),
    )


def _add_space(parser: Parser) -> None:
    """Adds the flags for quotas, alarms and ages."""
    parser.add_argument(
        "--quota-bytes",
        type=int,
        default=0,
        help="limit of the records of all jobs together; default: the disk's size",
    )
    parser.add_argument(
        "--job-quota-bytes", type=int, default=0, help="limit of the records of one job; default: none"
    )
    parser.add_argument(
        "--high-water",
        type=float,
        default=HIGH_WATER,
        metavar="PART",
        help="part of a quota, or of the disk, above which an early checkpoint is asked for; default %(default)s",
    )
    parser.add_argument(
        "--low-water",
        type=float,
        default=LOW_WATER,
        metavar="PART",
        help="part below which that alarm ends; default %(default)s",
    )
    parser.add_argument(
        "--keep-days",
        type=float,
        default=0.0,
        metavar="DAYS",
        help="drop jobs that nobody has used for this long; default: keep them until `swift-ft inspect --drop-job`",
    )


def _add_limits(parser: Parser) -> None:
    """Adds the flags that limit what jobs may use of the server."""
    defaults = EngineConfig()
    group = parser.add_argument_group(
        "limits", "a call that exceeds a limit is refused, and the answer names the limit"
    )
    for flag, default, what in (
        ("--jobs-max", defaults.jobs_max, "jobs that the server keeps"),
        ("--job-streams-max", defaults.job_streams_max, "streams of a job"),
        ("--job-readers-max", defaults.job_readers_max, "streams of a job that are read at once"),
        ("--job-records-max", defaults.job_records_max, "records of a job that the server keeps"),
        ("--job-bytes-max", defaults.job_bytes_max, "bytes under way of all writers of a job together"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default %(default)s)")


def _collect_rarely() -> None:
    """Excludes recovered records from garbage collection, and collects the oldest objects less often. Python's
    collector stops every thread, the longer the more records there are, and records are in no cycle."""
    gc.collect()
    gc.freeze()
    young, younger, _ = gc.get_threshold()
    gc.set_threshold(young, younger, 100)


def _signals() -> Callable[[], None]:
    """Installs handlers for SIGTERM and SIGINT. Returns a function that waits for the first signal. The next one kills.

    Uses a wake-up descriptor: the kernel may deliver a signal to one of gRPC's threads, which does not wake a waiting
    main thread; and a handler that sets an Event can deadlock with the `wait` that it interrupts.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing)

    def wait() -> None:
        os.read(reading, 1)
        # The next signal is handled by the kernel, so it ends the process whatever the threads wait for. Acknowledged
        # records are durable.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    return wait


def _assembled(
    config: ServerConfig, gate: Gate, stack: ExitStack
) -> tuple[DirectoryStorage, LogEngine, grpc.Server, Callable[[], None]]:
    """Returns the storage, the engine, the server, and a function that exports their metrics once the engine has
    started."""
    where, directory = config.metrics, config.directory

    def engine_on(storage: Storage) -> LogEngine:
        return LogEngine(
            storage, config.engine, lambda: free_bytes(directory), lambda job: age_s(directory, job)
        )

    if where is None:
        storage = DirectoryStorage(config.directory, config.segment_bytes, open_max=allow_open_files())
        engine = engine_on(storage)
        return storage, engine, make_server(engine, gate)[0], lambda: None
    # Imported only if metrics are enabled.
    from swift_ft.metrics import Exposition
    from swift_ft_services.logserver.metrics import FAMILIES, LogMetrics, ObservedDisk

    disk = ObservedDisk(RealDisk(config.directory))
    storage = DirectoryStorage(config.directory, config.segment_bytes, disk.as_disk(), allow_open_files())
    metrics = LogMetrics(config.directory, storage, disk)
    stack.callback(metrics.close)
    engine = engine_on(metrics.watched_storage)

    def show() -> None:
        shown = Exposition(*where, FAMILIES, lambda: metrics.samples(engine.snapshot()))
        stack.callback(shown.close)
        shown.announce(config.metrics_address_file, as_text=config.log.format == logs.TEXT)

    return storage, engine, make_server(engine, gate, [metrics.refusals])[0], show


def run(config: ServerConfig) -> int:
    """Serves until SIGTERM or SIGINT; then drains, syncs and returns 0. A second signal ends the process at once."""
    keep_freed_memory()
    # A record passes several threads: each may wait this long while another one computes.
    sys.setswitchinterval(_SWITCH_S)
    protection = config.protection
    gate = protection.gate()
    with ExitStack() as stack:
        storage, engine, server, show_metrics = _assembled(config, gate, stack)
        host = protection.listen.rpartition(":")[0]
        port = listening.bind(server, protection)
        engine.start(storage.recover())
        _collect_rarely()
        show_metrics()
        wait_for_signal = _signals()
        server.start()
        engine.state.on_health(engine.state.serves)
        address = f"{host}:{port}"
        events.emit("serving", address=address, directory=str(config.directory), **protection.fields())
        if config.address_file is not None:
            write_address(config.address_file, address)
        if config.log.format == logs.TEXT:
            print(f"log server on {address}, directory {config.directory}", flush=True)
        wait_for_signal()
        events.emit("draining")
        engine.drain()
        _stop(server)
        engine.close()
        events.emit("stopped")
    return 0


def _stop(server: grpc.Server) -> None:
    """Stops the server; running calls get a grace period."""
    try:
        server.stop(_STOP_GRACE_S).wait()
    except RuntimeError:  # no thread to time the grace period: calls end now
        server.stop(None)


def main(argv: Sequence[str] | None = None) -> int:
    events.configure("logserver")
    log = logs.Log("logserver", logs.TEXT, logging.WARNING)
    try:
        config = parse(sys.argv[1:] if argv is None else argv)
        log = config.log
        log.start()
        end_process_on_uncaught(log.uncaught)
        return run(config)
    except SwiftError as error:
        log.fatal(str(error))
        return error.exit_code
    except OSError as error:
        log.fatal(str(error))
        return ServiceError.exit_code
    except KeyboardInterrupt:  # before it served
        return 130


if __name__ == "__main__":
    os.umask(0o077)  # other users cannot read its files
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # not sys.exit, which would wait for threads; all acknowledged records are durable
