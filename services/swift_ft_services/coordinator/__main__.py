"""Runs the coordinator: membership, generations and recovery of training jobs.

python -m swift_ft_services.coordinator --directory DIR --log-servers HOST:PORT[,HOST:PORT]
"""

import argparse
import asyncio
import contextlib
import logging
import os
import re
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# gRPC reads this on import: its own messages about a port in use would duplicate ours.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from swift_ft import events, logs
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.cli_parser import Parser, argument, local_directory, metrics_address
from swift_ft.credentials import ENV_CA, ENV_CERTIFICATE, ENV_INSECURE, ENV_KEY, Credentials
from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import make_directory
from swift_ft.log.placement import COPIES_MAX, machines, parse_server
from swift_ft.text import one_line
from swift_ft_services import program
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.driver import JOBS_MAX, Driver
from swift_ft_services.coordinator.job_record import JobRow, LogServer, State
from swift_ft_services.coordinator.log_calls import LogServers
from swift_ft_services.coordinator.service import Servicer
from swift_ft_services.coordinator.store import (
    MetadataStore,
    SqliteStore,
    StoreConflict,
    StoreFailed,
    StoreHeld,
)
from swift_ft_services.coordinator.timeouts import (
    DETECT_HEARTBEAT_S,
    LEASE_HEARTBEATS,
    Timing,
    usual_log_lost_s,
)
from swift_ft_services.health import Health
from swift_ft_services.interceptors import AsyncGate

if TYPE_CHECKING:
    from swift_ft_services.coordinator.metrics import CoordinatorMetrics
    from swift_ft_services.coordinator.traces import RecoveryTraces

# QuietSelector: detects whether an event loop has read all messages received so far.
#
# A lease must not expire while the heartbeat that renews it lies unread. If the loop blocked in select() for
# QUIET_S, its inbox was empty. A loop that never blocks may lag by any time, and so may one that waits for a
# processor; /proc/thread-self/schedstat tells the two apart.

QUIET_S = 0.002
"""Longer than a gRPC thread takes to hand over a message that it has read, in seconds."""
BUSY = 0.9
"""Fraction of time running or waiting for a CPU above which the thread counts as never idle."""
_SCHEDULED = Path("/proc/thread-self/schedstat")


class QuietSelector(selectors.DefaultSelector):
    """(the loop's thread) Selector for `asyncio.SelectorEventLoop`; the loop itself is not modified."""

    def __init__(self) -> None:
        super().__init__()
        self._was_quiet = True
        self._asked_at, self._ready_s = time.monotonic(), _ready_s()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        began = time.monotonic()
        found = super().select(timeout)
        self._was_quiet = self._was_quiet or time.monotonic() - began >= QUIET_S
        return found

    def caught_up(self) -> bool:
        """Returns whether the loop's inbox was empty at some moment since the last call."""
        was_quiet, self._was_quiet = self._was_quiet, False
        before_at, before_s = self._asked_at, self._ready_s
        self._asked_at, self._ready_s = time.monotonic(), _ready_s()
        return was_quiet and self._ready_s - before_s <= BUSY * (self._asked_at - before_at)


def _ready_s() -> float:
    """Returns the seconds that this thread has run or waited for a CPU; 0 if the kernel does not report it."""
    try:
        return sum(map(int, _SCHEDULED.read_text().split()[:2])) * 1e-9
    except (OSError, ValueError):
        return 0.0


logger = logging.getLogger(__name__)

SERVICES = ("", "swift.coordinator.v1.Coordinator")
ENV_STORE = {
    "SWIFT_STORE_CA": "the CA of etcd's certificates; without it, etcd must be on loopback, unless --insecure is given",
    "SWIFT_STORE_CERT": "its own certificate for etcd, if that wants one",
    "SWIFT_STORE_KEY": "the certificate's private key, mode 0600",
}
STOP_GRACE_S = 2.0
SNAPSHOT_TIMEOUT_S = 5.0
SERVER_OPTIONS = (
    # A second coordinator on the port must be refused, not given half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients ping every 5 s to detect a dead machine; that is intended.
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.max_receive_message_length", 1 << 20),
)


def main(argv: list[str] | None = None) -> int:
    return program.run("coordinator", lambda: parse(argv), run)


def run(arguments: argparse.Namespace) -> None:
    selector = QuietSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(serve(arguments, selector.caught_up))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="swift-ft coordinator",
        description="Runs the coordinator: membership, generations and recovery of training jobs.",
    )
    parser.add_argument(
        "--directory",
        type=argument(local_directory),
        help="the directory of its durable state; the same as --store sqlite:DIR",
    )
    parser.add_argument(
        "--store",
        metavar="sqlite:DIR|etcd://HOST:PORT,...[/PREFIX]",
        help="where its durable state is kept. Several coordinators may share one etcd: one of them serves, the others "
        "stand by and take over within 5 s. PREFIX is that of all keys (default swift)",
    )
    for variable, what in ENV_STORE.items():
        parser.add_argument(
            f"--store-{variable.rpartition('_')[2].lower()}",
            type=Path,
            default=os.environ.get(variable),
            metavar="FILE",
            help=f"{what} (default: ${variable})",
        )
    parser.add_argument(
        "--log-servers",
        default="",
        metavar="[MACHINE=]HOST:PORT,...",
        help="the log servers, best one on each machine. MACHINE is the host name that the ranks there see (default: "
        "HOST, or this machine if HOST is loopback). A rank's records are kept on its own machine first. Without log "
        "servers every recovery restores the checkpoint",
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=1,
        metavar="C",
        help="the number of log servers, on different machines, that must have a record before it counts as durable "
        "(default %(default)s). Applies to new jobs; others keep their number",
    )
    parser.add_argument(
        "--log-lost-s",
        type=float,
        help="a log server that has not answered for this long is lost, if another one is left: its streams move, and "
        "it is not used again. 0: only an operator gives a server up, with swift-ft logs (default: 30 s, at least "
        "two calls to it)",
    )
    parser.add_argument(
        "--detect",
        choices=list(DETECT_HEARTBEAT_S),
        default="usual",
        help="how soon silence is a loss: usual (a heartbeat every second, a lease of 10 s), or fast (0.2 s and 2 s, "
        "for a network and machines that never stall for that long)",
    )
    parser.add_argument(
        "--heartbeat-s",
        type=float,
        help="seconds between two heartbeats of a rank; default: as --detect says, but at least 10 in a lease",
    )
    parser.add_argument(
        "--lease-s",
        type=float,
        help=f"a rank that is silent for this long is fenced; default: {LEASE_HEARTBEATS} heartbeats",
    )
    parser.add_argument(
        "--step-bound-s",
        type=float,
        help="a step that takes longer than this, and 10 times as long as the longest of the last 32, is shown as "
        "hung; default: 30 s, at least 2 leases",
    )
    parser.add_argument(
        "--die-at",
        choices=[state.value for state in State],
        help="fault injection: it kills itself (SIGKILL) once its first transition into this state, in a generation "
        "above 1, is durable and before anything else happens; once per directory",
    )
    parser.add_argument(
        "--jobs-max",
        type=int,
        default=JOBS_MAX,
        metavar="N",
        help="limit of jobs under way (default %(default)s)",
    )
    program.add_arguments(parser)
    return parser.parse_args(argv)


def checked_timing(arguments: argparse.Namespace) -> Timing:
    """Returns the timeouts, with defaults derived from each other. Raises UsageError if they conflict."""
    heartbeat_s = arguments.heartbeat_s
    if heartbeat_s is None:
        heartbeat_s = DETECT_HEARTBEAT_S[arguments.detect]
    lease_s = arguments.lease_s if arguments.lease_s is not None else LEASE_HEARTBEATS * heartbeat_s
    bound_s = arguments.step_bound_s if arguments.step_bound_s is not None else max(30.0, 2 * lease_s)
    try:
        return Timing(
            # A short lease alone has as many; what else follows from the heartbeat does not.
            heartbeat_s=arguments.heartbeat_s or min(heartbeat_s, lease_s / LEASE_HEARTBEATS),
            suspicion_s=heartbeat_s / 2,
            lease_s=lease_s,
            step_bound_s=bound_s,
            log_lost_s=usual_log_lost_s(heartbeat_s)
            if arguments.log_lost_s is None
            else arguments.log_lost_s,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None


def checked_log_servers(text: str, copies: int) -> list[LogServer]:
    servers = [parse_server(word.strip(), "--log-servers") for word in text.split(",") if word.strip()]
    addresses = [address for _, address in servers]
    if len(set(addresses)) < len(addresses):
        raise UsageError(f"--log-servers {text}: the same address twice")
    if not 1 <= copies <= COPIES_MAX:
        raise UsageError(f"--copies must be 1 to {COPIES_MAX}, not {copies}")
    there = machines([host for host, _ in servers])
    if copies > 1 and there < copies:
        raise UsageError(
            f"--copies {copies} needs log servers on {copies} machines, --log-servers names {there}: a machine that "
            "is lost must not take all copies with it; name more, say where they are (MACHINE=HOST:PORT), or take fewer"
        )
    return [LogServer(address=address, host=host) for host, address in servers]


STAND_BY_S = 0.25
"""Seconds between two tries of a coordinator that stands by to take the store."""
_STORES = ("sqlite:", "etcd://")


def check_store(arguments: argparse.Namespace) -> None:
    """Puts --directory and --store in one form. Raises UsageError."""
    store, directory = arguments.store, arguments.directory
    if (store is None) == (directory is None):
        raise UsageError(
            "give --directory DIR (or --store sqlite:DIR), or --store etcd://HOST:PORT,...: one of them"
        )
    if store is not None and not store.startswith(_STORES):
        raise UsageError(f"--store {store}: sqlite:DIR or etcd://HOST:PORT,HOST:PORT,...")
    if store is not None and store.startswith("sqlite:"):
        try:
            arguments.directory = local_directory(store.removeprefix("sqlite:"))
        except UsageError as error:
            raise UsageError(f"--store {store}: {error}") from None
        arguments.store = None
    tls = (arguments.store_ca, arguments.store_cert, arguments.store_key)
    if arguments.store is None and any(tls) and not any(map(os.environ.get, ENV_STORE)):
        raise UsageError("--store-ca, --store-cert and --store-key are for --store etcd://...")


def open_store(arguments: argparse.Namespace, address: Callable[[], str]) -> MetadataStore:
    """`address`: returns where this coordinator serves. Raises UsageError."""
    return open_directory(arguments.directory) if arguments.store is None else open_etcd(arguments, address)


def open_directory(directory: Path) -> SqliteStore:
    try:
        make_directory(directory, durable=True)
    except OSError as error:
        raise UsageError(
            f"--directory {directory}: {error.strerror}; give one that can be read and written"
        ) from None
    return SqliteStore(directory / "coordinator.sqlite")


def open_etcd(arguments: argparse.Namespace, address: Callable[[], str]) -> MetadataStore:
    from swift_ft_services.coordinator.etcd_store import EtcdStore  # costs nothing where it is not used

    members, _, prefix = arguments.store.removeprefix("etcd://").partition("/")
    if not re.fullmatch("[A-Za-z0-9._/-]{0,200}", prefix):
        raise UsageError(
            f"--store {arguments.store}: the prefix may have letters, digits, '.', '_', '-' and '/'"
        )
    try:
        credentials = Credentials(
            ca=arguments.store_ca,
            certificate=arguments.store_cert,
            key=arguments.store_key,
            insecure=arguments.insecure,
        )
        for member in members.split(","):
            credentials.check(member)
    except UsageError as error:
        raise UsageError(f"--store: {store_flags(str(error))}") from None
    return EtcdStore(members.split(","), prefix.strip("/") or "swift", credentials, name=address)


def store_flags(text: str) -> str:
    """Returns a message of `Credentials` with the flags in place of a client's variables."""
    for variable, flag in (
        (ENV_CA, "--store-ca"),
        (ENV_CERTIFICATE, "--store-cert"),
        (ENV_KEY, "--store-key"),
    ):
        text = text.replace(variable, flag)
    return text.replace(f"say {ENV_INSECURE}=1", "say --insecure")


async def hold(store: MetadataStore) -> None:
    """Takes the store before anything is read or served. Raises ServiceError if it is held elsewhere or damaged."""
    try:
        await store.hold()
    except (StoreHeld, StoreFailed) as error:
        raise ServiceError(f"--directory: {error}") from None


def killer(directory: Path | None, die_at: str | None) -> Callable[[JobRow, m.Persist], None]:
    """Returns the callback that implements --die-at."""

    def die(row: JobRow, persist: m.Persist) -> None:
        if (
            persist.entered is None
            or persist.entered.value != die_at
            or row.generation < 2
            or directory is None
        ):
            return
        try:
            os.close(os.open(directory / f"died-at-{die_at}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        events.emit("die_at", job=row.job, generation=row.generation, state=die_at)
        os.kill(os.getpid(), signal.SIGKILL)

    return die


def show_metrics(
    metrics: "CoordinatorMetrics",
    driver: Callable[[], Driver | None],
    checks: Health,
    listen: tuple[str, int],
    arguments: argparse.Namespace,
) -> Callable[[], None]:
    """(on the driver's loop) Starts to serve the metrics. Returns a function that stops it."""
    from swift_ft.metrics import Exposition, Samples
    from swift_ft_services.coordinator.metrics import FAMILIES

    loop = asyncio.get_running_loop()

    async def collect() -> Samples:
        serving = driver()
        return metrics.samples(()) if serving is None else await serving.read_jobs(metrics.samples)

    def samples() -> Samples:
        return asyncio.run_coroutine_threadsafe(collect(), loop).result(SNAPSHOT_TIMEOUT_S)

    def problem() -> str:
        async def failure() -> str:
            serving = driver()
            failed = serving is not None and serving.failed.done()
            return serving.failed.result() if serving is not None and failed else checks.problem()

        try:  # a loop that hangs does not answer
            return asyncio.run_coroutine_threadsafe(failure(), loop).result(SNAPSHOT_TIMEOUT_S)
        except TimeoutError:
            return f"it has not answered for {SNAPSHOT_TIMEOUT_S:g} s"

    shown = Exposition(*listen, FAMILIES, samples, problem)
    shown.announce(arguments.metrics_address_file, as_text=arguments.log_format == logs.TEXT)
    return shown.close


ENV_TRACES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def open_traces() -> "RecoveryTraces | None":
    """Returns None, with a warning if the environment says where traces go, and they cannot be sent."""
    named = next(filter(os.environ.get, ENV_TRACES), None)
    if named is None:
        return None
    try:
        from swift_ft_services.coordinator import traces

        return traces.from_environment()
    except Exception as error:  # noqa: BLE001  (whatever a variable of OpenTelemetry's says, jobs are served)
        what = "; pip install 'swift-ft[otel]'" if isinstance(error, ImportError) else ""
        logger.warning("%s is set, but traces cannot be sent: %s%s", named, one_line(error), what)
        return None


class Coordinator:
    """One coordinator: its port, and a driver for each time that it holds the store."""

    def __init__(self, arguments: argparse.Namespace, caught_up: Callable[[], bool]) -> None:
        """Raises UsageError for what the arguments say."""
        check_store(arguments)
        self.metrics_listen = metrics_address(arguments.metrics_listen, insecure=arguments.insecure)
        self._arguments = arguments
        self._caught_up = caught_up
        self._timing = checked_timing(arguments)
        self._log_servers = checked_log_servers(arguments.log_servers, arguments.copies)
        self._protection = program.protection_of(arguments, "coordinator")
        self._address = ""
        self.store = open_store(arguments, lambda: self._address)
        self._takes_over = arguments.store is not None
        """Others may hold the store before this one, and after it."""
        if arguments.die_at and self._takes_over:
            raise UsageError("--die-at: once per directory, so it needs --directory")
        self._die = killer(arguments.directory, arguments.die_at)
        if arguments.jobs_max < 1:
            raise UsageError("--jobs-max must be at least 1")
        self._metrics = None
        if self.metrics_listen:  # without --metrics-listen the module is not loaded
            from swift_ft_services.coordinator.metrics import CoordinatorMetrics

            self._metrics = CoordinatorMetrics()
        self._traces = open_traces()
        gate = self._protection.gate()
        self._servicer = Servicer(None) if self._metrics is None else Servicer(None, self._metrics.refused)
        gate.generation_of = self._servicer.generation_of
        if self._metrics is not None:
            gate.on_denied = self._metrics.refused
        self.checks = Health(gate.shown)
        self.checks.set(*SERVICES, serving=False)
        self._server = grpc.aio.server(interceptors=(AsyncGate(gate),), options=SERVER_OPTIONS)
        pb_grpc.add_CoordinatorServicer_to_server(self._servicer, self._server)
        self._server.add_generic_rpc_handlers((self.checks.handlers(on_loop=True),))

    async def serve(self, stopped: asyncio.Event) -> None:
        """Serves until `stopped`. Raises UsageError, and ServiceError if the store fails."""
        if not self._takes_over:
            await hold(self.store)
        hide = None
        try:
            port = program.bind(self._server, self._protection)
            self._address = f"{self._arguments.listen.rpartition(':')[0]}:{port}"
            if self._takes_over:
                await self._server.start()
                program.announce(self._arguments, "coordinator", port, self._protection.fields())
                await self._stand_by(stopped)
            while not stopped.is_set():
                driver = await self._begin()
                if not self._takes_over:
                    await self._server.start()
                self.checks.set(*SERVICES, serving=True)
                if self._metrics is not None and self.metrics_listen and hide is None:
                    hide = show_metrics(
                        self._metrics, self._driver, self.checks, self.metrics_listen, self._arguments
                    )
                if not self._takes_over:
                    program.announce(self._arguments, "coordinator", port, self._protection.fields())
                await self._serve_jobs(driver, stopped)
                if not stopped.is_set():
                    await self._stand_by(stopped)
        finally:
            events.emit("draining")
            self._end()
            await self._server.stop(grace=STOP_GRACE_S)
            if hide is not None:
                await asyncio.to_thread(hide)  # a scrape in progress waits for this loop
            await self.store.close()
            if self._traces is not None:
                self._traces.close()
            events.emit("stopped")

    def _driver(self) -> Driver | None:
        return self._servicer.driver

    async def _stand_by(self, stopped: asyncio.Event) -> None:
        """Returns once this coordinator holds the store, or `stopped` is set."""
        told = ""
        while not stopped.is_set():
            try:
                await self.store.hold()
            except StoreHeld as held:
                self._servicer.standing_by = f"this coordinator stands by: {held}"
                if str(held) != told:
                    told = str(held)
                    events.emit("stands_by", reason=told)
                    self._say(f"stands by: {told}")
            except StoreConflict as conflict:  # the lease has run out while the state was read
                self._servicer.standing_by = f"this coordinator stands by: {conflict}"
            except StoreFailed as failure:
                raise ServiceError(f"--store: {failure}") from None
            else:
                events.emit("holds_store")
                self._say("holds the store and serves")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), STAND_BY_S)

    def _say(self, line: str) -> None:
        if self._arguments.log_format == logs.TEXT:
            print(f"coordinator {self._address} {line}", flush=True)

    async def _begin(self) -> Driver:
        """(the store is held) Loads all jobs. Raises ServiceError if the store cannot hold the state."""
        driver = Driver(
            self.store,
            LogServers(self._timing.log_call_s),
            self._timing,
            self._log_servers,
            copies=self._arguments.copies,
            caught_up=self._caught_up,
            after_durable=self._after_durable,
            jobs_max=self._arguments.jobs_max,
        )
        try:
            await driver.start()
        except StoreFailed as error:
            flag = "--store" if self._takes_over else "--directory"
            raise ServiceError(f"{flag}: {error}") from None
        self._servicer.driver = driver
        return driver

    def _after_durable(self, row: JobRow, persist: m.Persist) -> None:
        self._die(row, persist)
        if self._metrics is not None:
            self._metrics.after_durable(row, persist)
        if self._traces is not None:
            self._traces.after_durable(row)

    async def _serve_jobs(self, driver: Driver, stopped: asyncio.Event) -> None:
        """Returns once `stopped` is set, or another coordinator may hold the store. Raises ServiceError."""
        try:
            await until_stopped(self._server, driver, stopped)
        except ServiceError:
            if not self._takes_over or stopped.is_set() or not self._is_lost():
                raise
            self._end()

    def _is_lost(self) -> bool:
        try:
            self.store.holds()
        except StoreConflict:
            return True
        return False

    def _end(self) -> None:
        self.checks.set(*SERVICES, serving=False)
        driver, self._servicer.driver = self._servicer.driver, None
        if driver is not None:
            driver.stop()
        for told in (self._metrics, self._traces):
            if told is not None:
                told.forget_recoveries()


async def serve(arguments: argparse.Namespace, caught_up: Callable[[], bool]) -> None:
    """Serves until SIGTERM. Raises UsageError for what the arguments say, ServiceError if the store fails."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    program.take_signals(lambda: loop.call_soon_threadsafe(stopped.set))
    await Coordinator(arguments, caught_up).serve(stopped)


async def until_stopped(server: grpc.aio.Server, driver: Driver, stopped: asyncio.Event) -> None:
    """Runs ticks until a signal arrives. Raises ServiceError if this process must end, and the error of the ticks or
    the server if either ends: the process would be useless without it."""
    ticks = asyncio.create_task(driver.run_ticks())
    serving = asyncio.create_task(server.wait_for_termination())
    stop = asyncio.create_task(stopped.wait())
    ends: list[asyncio.Future[Any]] = [ticks, serving, stop, driver.failed]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ticks.cancel()
        stop.cancel()  # `serving` is not cancelled: that would cancel the server too
    if driver.failed.done():
        raise ServiceError(driver.failed.result())
    for ended in done:
        ended.result()


if __name__ == "__main__":
    program.exit_with(main)
