"""python -m swift_ft_services.logserver: keeps the log of training jobs in a directory and serves it over gRPC."""

import argparse
import gc
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack

# gRPC reads this at import: otherwise its own messages about a port in use would appear next to ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from swift_ft import events, logs
from swift_ft.cli_parser import Parser, argument, local_directory, metrics_address, object_store
from swift_ft.errors import UsageError
from swift_ft.log.directory import LIVES_S, age_s, free_bytes
from swift_ft.log.frame import BODY_BYTES_MAX
from swift_ft.log.memory import keep_freed_memory
from swift_ft.log.protocol import Fsync
from swift_ft.log.segment import FILE_BYTES_LEAST
from swift_ft_services import program
from swift_ft_services.logserver.administration import LostServers, Tiering
from swift_ft_services.logserver.cold import ColdTier
from swift_ft_services.logserver.disk import RealDisk, allow_open_files
from swift_ft_services.logserver.engine import LogEngine
from swift_ft_services.logserver.quotas import HIGH_WATER, LOW_WATER, SpaceConfig
from swift_ft_services.logserver.service import make_server
from swift_ft_services.logserver.state import EngineConfig
from swift_ft_services.logserver.storage import DirectoryStorage

_STOP_GRACE_S = 2.0
_SWITCH_S = 0.0005
_CREDIT_BYTES_MAX = 1 << 40
_FSYNC_INTERVAL_S_MAX = 3600.0
SPACE_BYTES_MIN = 64 << 10
"""Space that the first file of a stream takes; the smallest quota allowed."""


def check(options: argparse.Namespace, engine: EngineConfig) -> None:
    if not 4096 <= options.segment_bytes <= FILE_BYTES_LEAST // 2:
        raise UsageError(f"--segment-bytes must be between 4096 and {FILE_BYTES_LEAST // 2}")
    if not 1 <= engine.credit_bytes <= _CREDIT_BYTES_MAX:
        raise UsageError(f"--credit-bytes must be between 1 and {_CREDIT_BYTES_MAX}")
    if not 1 <= engine.body_bytes_max <= BODY_BYTES_MAX:
        raise UsageError(f"--body-bytes-max must be between 1 and {BODY_BYTES_MAX}")
    if not 0 < engine.fsync_interval_s <= _FSYNC_INTERVAL_S_MAX:
        raise UsageError(f"--fsync-interval must be positive, at most {_FSYNC_INTERVAL_S_MAX:g} s")
    for name in ("jobs_max", "job_streams_max", "job_records_max"):
        if getattr(engine, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if engine.job_bytes_max < engine.writer_bytes_max:
        raise UsageError(
            f"--job-bytes-max must have room for one writer: at least {engine.writer_bytes_max} "
            "(--credit-bytes and one frame)"
        )
    space = engine.space
    for flag, quota in (("--quota-bytes", space.quota_bytes), ("--job-quota-bytes", space.job_quota_bytes)):
        if quota and quota < SPACE_BYTES_MIN:
            raise UsageError(
                f"{flag} {quota} has no room for anything: give at least {SPACE_BYTES_MIN}, or leave it out for "
                "no quota"
            )
    if not 0 < space.low_water < space.high_water < 1:
        raise UsageError(
            f"--low-water {space.low_water:g} must be below --high-water {space.high_water:g}, "
            "and both between 0 and 1"
        )
    if engine.keep_s and engine.keep_s < LIVES_S:
        raise UsageError(
            f"--keep-days {options.keep_days:g} would drop jobs that live: give at least "
            f"{LIVES_S / 86400:.4f}, or leave it out to keep logs until they are dropped"
        )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the validated options: with `engine`, `protection` and `metrics` made of them."""
    parser = Parser(
        prog="swift-ft logserver",
        description="Keeps the log of training jobs in a directory and serves it over gRPC.",
    )
    parser.add_argument(
        "--directory",
        type=argument(local_directory),
        required=True,
        help="the directory of the segments; made if it is missing",
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
    _add_space(parser)
    program.add_arguments(parser)
    options = parser.parse_args(argv)
    options.engine = EngineConfig(
        fsync=Fsync(options.fsync),
        fsync_interval_s=options.fsync_interval,
        credit_bytes=options.credit_bytes,
        body_bytes_max=options.body_bytes_max,
        jobs_max=options.jobs_max,
        job_streams_max=options.job_streams_max,
        job_records_max=options.job_records_max,
        job_bytes_max=options.job_bytes_max,
        space=SpaceConfig(
            quota_bytes=options.quota_bytes,
            job_quota_bytes=options.job_quota_bytes,
            high_water=options.high_water,
            low_water=options.low_water,
        ),
        keep_s=options.keep_days * 86400,
    )
    options.protection = program.protection_of(options, "logserver")
    options.metrics = metrics_address(options.metrics_listen, insecure=options.insecure)
    check(options, options.engine)
    return options


def _add_space(parser: Parser) -> None:
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
        "--cold",
        type=argument(object_store),
        metavar="URL",
        help="an object store (s3://BUCKET/PREFIX, gs://…, az://…) to which sealed segments are moved once the low "
        "mark is reached; default: none",
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
    defaults = EngineConfig()
    group = parser.add_argument_group(
        "limits", "a call that exceeds a limit is refused, and the answer names the limit"
    )
    for flag, default, what in (
        ("--jobs-max", defaults.jobs_max, "jobs that the server keeps"),
        ("--job-streams-max", defaults.job_streams_max, "streams of a job"),
        ("--job-records-max", defaults.job_records_max, "records of a job that the server keeps"),
        ("--job-bytes-max", defaults.job_bytes_max, "bytes under way of all writers of a job together"),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default %(default)s)")


def serve(options: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT; then drains and syncs. A second signal ends the process at once."""
    stopped = threading.Event()
    program.take_signals(stopped.set)
    keep_freed_memory()
    # A record passes several threads: each may wait this long while another one computes.
    sys.setswitchinterval(_SWITCH_S)
    # Python's collector stops every thread, the longer the more records there are, and records are in no cycle.
    young, younger, _ = gc.get_threshold()
    gc.set_threshold(young, younger, 100)
    directory, protection = options.directory, options.protection
    gate = protection.gate()
    with ExitStack() as stack:
        metrics = None
        if options.metrics:  # imported only if metrics are enabled
            from swift_ft.metrics import Exposition
            from swift_ft_services.logserver.metrics import FAMILIES, LogMetrics

            metrics = LogMetrics(directory)
            stack.callback(metrics.close)
        disk = RealDisk(directory) if metrics is None else RealDisk(directory, metrics.sync_s.observe)
        cold = ColdTier.at(options.cold) if options.cold else None
        storage = DirectoryStorage(directory, options.segment_bytes, disk, allow_open_files(), cold=cold)
        engine = LogEngine(
            storage, options.engine, lambda: free_bytes(directory), lambda job: age_s(directory, job)
        )
        if metrics is None:
            server, checks = make_server(engine, gate)
        else:
            engine.committer.on_commit = metrics.committed
            server, checks = make_server(engine, gate, metrics.refused)
        port = program.bind(server, protection)
        engine.start(storage.recover())
        tiering = Tiering(engine.state, storage, engine.watch) if cold is not None else None
        if tiering is not None:
            tiering.start()
            engine.lost = LostServers(engine.state, storage, engine.take_over)
        if metrics is not None:
            host, metrics_port = options.metrics
            shown = Exposition(
                host,
                metrics_port,
                FAMILIES,
                lambda: metrics.samples(engine),
                lambda: checks.problem() and (engine.state.failed or f"it is {engine.state.condition()}"),
            )
            stack.callback(shown.close)
            shown.announce(options.metrics_address_file, as_text=options.log_format == logs.TEXT)
        server.start()
        engine.state.on_health(engine.state.serves)
        program.announce(options, "log server", port, protection.fields())
        stopped.wait()
        events.emit("draining")
        engine.drain()
        _stop(server)
        if tiering is not None:
            tiering.stop()
        engine.close()
        events.emit("stopped")


def _stop(server: grpc.Server) -> None:
    """Stops the server; running calls get a grace period."""
    try:
        server.stop(_STOP_GRACE_S).wait()
    except RuntimeError:  # no thread to time the grace period: calls end now
        server.stop(None)


def main(argv: Sequence[str] | None = None) -> int:
    return program.run("logserver", lambda: parse(sys.argv[1:] if argv is None else argv), serve)


if __name__ == "__main__":
    program.exit_with(main)
