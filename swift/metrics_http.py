"""The HTTP server behind `/metrics`: for one scraper or a few, on a port that anybody may reach.

A connection has a thread while it lasts, and there are few of both: who comes when all places are taken gets the
place of the one who is there longest. So connections that say nothing, or do not read, keep nobody from scraping, and
take nothing that the rest of the process needs. One answer is made at a time.
"""

import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

CONNECTIONS_MAX = 16
SILENT_S = 10.0
"""Who says nothing for so long, or takes nothing, is let go."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves from the constructor on, until `close`. OSError: it cannot listen there."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = facts[0][0]
        self._connections: dict[socket.socket, None] = {}
        self._changed = threading.Condition()
        super().__init__((host, port), _Handler)
        self.set_app(_one_at_a_time(make_wsgi_app(registry)))
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
        """Somebody has gone away in the middle of it: nothing to tell."""


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody wants to know who scrapes."""


def _one_at_a_time(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    lock = threading.Lock()

    def answer(*args: Any) -> Iterable[bytes]:
        with lock:
            return app(*args)

    return answer
