"""Prometheus metrics, without global state: tables of families, values read at scrape time, an HTTP server.

A process lists its metrics in a table of `Family` and gives a function that reads their values. The function is called
only at a scrape, so the working code only counts in plain integers, if at all. Import this module only if metrics are
enabled: otherwise `prometheus_client` is not loaded.
"""

import socket
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from swift_ft import events
from swift_ft.cli_parser import write_address
from swift_ft.errors import UsageError
from swift_ft.text import one_line

# HTTP server for `/metrics` and `/healthz`: for a few scrapers, on a port that any client may reach.
#
# A connection has a thread while it lasts, and their number is limited: a new connection replaces the oldest one. So
# idle clients, or clients that do not read, neither block scraping nor exhaust the process. One answer is computed at a
# time.

CONNECTIONS_MAX = 16
SILENT_S = 10.0
"""Seconds after which a silent or non-reading connection is closed."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves from its creation until `close`. Raises OSError if it cannot listen there."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry, problem: Callable[[], str]) -> None:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = facts[0][0]
        self._connections: dict[socket.socket, None] = {}
        self._changed = threading.Condition()
        super().__init__((host, port), _Handler)
        self.set_app(_routed(_one_at_a_time(make_wsgi_app(registry)), problem))
        self._thread = threading.Thread(target=self.serve_forever, name="swift-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join(5.0)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            while len(self._connections) >= CONNECTIONS_MAX:
                with suppress(OSError):
                    next(iter(self._connections)).shutdown(socket.SHUT_RDWR)
                self._changed.wait(SILENT_S)
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._connections.pop(request, None)
            self._changed.notify()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of clients that have disconnected."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs no requests."""


def _routed(
    metrics: Callable[..., Iterable[bytes]], problem: Callable[[], str]
) -> Callable[..., Iterable[bytes]]:
    def answer(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return metrics(environ, start_response)
        status, words = "404 Not Found", "there are /metrics and /healthz"
        if path == "/healthz":
            words = problem()
            status, words = ("503 Service Unavailable", words) if words else ("200 OK", "ok")
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{one_line(words)}\n".encode()]

    return answer


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    lock = threading.Lock()

    def answer(*args: Any) -> Iterable[bytes]:
        with lock:
            return app(*args)

    return answer


COUNTER, GAUGE, HISTOGRAM, STATES, INFO = "counter", "gauge", "histogram", "states", "info"
_CLASSES: Mapping[str, Any] = {
    COUNTER: CounterMetricFamily,
    GAUGE: GaugeMetricFamily,
    HISTOGRAM: HistogramMetricFamily,
    STATES: StateSetMetricFamily,
    INFO: InfoMetricFamily,
}

LATENCY_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Histogram bounds for disk latencies, in seconds."""
DURATION_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Histogram bounds for steps and recoveries, in seconds."""


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. Counters have their full name, with ``_total``."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    """Possible states of a family of kind STATES: the current one is 1, the others are 0."""


class Distribution:
    """A histogram that one or more threads fill. Thread-safe."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def read(self) -> tuple[list[tuple[str, float]], float]:
        """Returns (bound, count at or below it) for each bound, ending with +Inf; and the sum of all values."""
        with self._lock:
            total = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
                total += count
                buckets.append((bound, float(total)))
            return buckets, self._sum


Value = float | str | Distribution | Mapping[str, str]
Samples = Mapping[str, Mapping[tuple[str, ...], Value]]
"""Family -> label values -> value. `plain` makes the entry of a family without labels."""


def plain(value: Value) -> Mapping[tuple[str, ...], Value]:
    return {(): value}


class _Collector(Collector):
    def __init__(self, families: Sequence[Family], read: Callable[[], Samples]) -> None:
        self._families = families
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Returns the metrics without samples: the registry asks for the names only."""
        return [_metric(family, {}) for family in self._families]

    def collect(self) -> Iterator[Metric]:
        samples = self._read()
        unknown = samples.keys() - {family.name for family in self._families}
        assert not unknown, unknown
        for family in self._families:
            yield _metric(family, samples.get(family.name, {}))


def _metric(family: Family, samples: Mapping[tuple[str, ...], Value]) -> Metric:
    name = family.name.removesuffix("_info") if family.kind == INFO else family.name
    metric = _CLASSES[family.kind](name, family.help, labels=family.labels)
    for labels, value in samples.items():
        if isinstance(value, Distribution):
            metric.add_metric(labels, *value.read())
        elif family.kind == STATES:
            assert value in family.states, (name, value)
            metric.add_metric(labels, {state: state == value for state in family.states})
        else:
            metric.add_metric(labels, value)
    assert isinstance(metric, Metric)
    return metric


BUILD = Family("swift_build_info", INFO, "The version of swift-ft, as a label.")


class Exposition:
    def __init__(
        self,
        host: str,
        port: int,
        families: Sequence[Family],
        read: Callable[[], Samples],
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Starts the server. Port 0: any free one. `problem`: why this process is not healthy; empty if it is. Raises
        UsageError if it cannot listen there."""
        registry = CollectorRegistry()
        registry.register(_Collector(families, read))
        version = {"version": metadata.version("swift-ft")}
        registry.register(_Collector((BUILD,), lambda: {BUILD.name: plain(version)}))
        ProcessCollector(registry=registry)
        try:
            self._server = MetricsServer(host.strip("[]"), port, registry, problem)
        except OSError as error:
            raise UsageError(
                f"cannot show metrics on {host}:{port}: {error.strerror or error}; give another address"
            ) from None
        self.address = f"{host}:{self._server.server_port}"

    def announce(self, address_file: Path | None, *, as_text: bool) -> None:
        """Announces the address: as an event, in a file if one was requested, and on stdout in text mode."""
        if address_file is not None:
            write_address(address_file, self.address, "--metrics-address-file")
        events.emit("metrics", address=self.address)
        if as_text:
            print(f"metrics on http://{self.address}/metrics", flush=True)

    def close(self) -> None:
        self._server.close()
