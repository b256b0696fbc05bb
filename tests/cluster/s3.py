"""An S3 server (moto) in its own process, behind a proxy of ours that counts requests and makes some of them fail."""

import http.client
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.frameworks.environment import ensure

_PINS = ("moto[server]==5.2.5",)
_START_S = 60.0
BUCKET = "bucket"


@dataclass(frozen=True)
class Asked:
    """One request."""

    number: int
    method: str
    path: str


@dataclass
class Answer:
    """What becomes of a request. By default it is passed on, and so is its answer."""

    after_s: float = 0.0
    status: int = 0
    """Not 0: this status, and the request is not passed on."""
    lost: bool = False
    """It is passed on, and its answer is not."""
    refused: bool = False
    """It is not passed on, and its connection is closed."""


@dataclass
class Store:
    """(the test) Where the server is, and what it is to do."""

    url: str = ""
    requests: list[Asked] = field(default_factory=list)
    rule: Callable[[Asked], Answer | None] = lambda _asked: None
    after: Callable[[Asked], None] = lambda _asked: None
    """Called when it was carried out, before it is answered."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def again(self) -> None:
        """Forgets requests and rules."""
        self.requests.clear()
        self.rule = lambda _asked: None
        self.after = lambda _asked: None


class _Proxy(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client was killed."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving() -> Iterator[Store]:
    """Starts both, with one empty bucket. Raises Unavailable."""
    python, port, store = ensure("s3", _PINS), _free_port(), Store()
    command = [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    proxy = _Proxy(("127.0.0.1", 0), _handler(store, port))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{proxy.server_address[1]}"
    try:
        _make_bucket(port)
        yield store
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.kill()
        server.wait()


def _make_bucket(port: int) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("PUT", f"/{BUCKET}")
            assert connection.getresponse().status == 200
            return
        except OSError:
            assert time.monotonic() < until, "moto does not serve"
            time.sleep(0.1)


def _handler(store: Store, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with store.lock:
                asked = Asked(len(store.requests) + 1, self.command, self.path)
                store.requests.append(asked)
                what = store.rule(asked) or Answer()
            time.sleep(what.after_s)
            if what.refused:
                self.close_connection = True
                return
            if what.status:
                self.send_response(what.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            try:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
            except (OSError, http.client.HTTPException):  # the server is gone
                self.close_connection = True
                return
            store.after(asked)
            if what.lost:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in (
                    "content-length",
                    "transfer-encoding",
                    "connection",
                    "server",
                    "date",
                ):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def environment(store: Store) -> Iterator[None]:
    """(context manager) This process's calls go to the store, too."""
    before = {name: os.environ.get(name) for name in store.environment}
    os.environ.update(store.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
