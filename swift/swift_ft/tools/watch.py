"""`swift-ft watch`: a live page of a coordinator's jobs for a browser. It reads, and changes nothing.

The page has the lines of `swift-ft jobs`, `status`, `logs` and `events`. It is served by the command itself, on
loopback, with the token of who runs it. So a coordinator has no port that answers browsers, and a browser needs no
token.
"""

import argparse
import socket
import sys
from collections.abc import Iterable, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.cli_parser import Parser, argument, command, host_and_port, is_loopback
from swift_ft.coordinator_client import CoordinatorClient
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.text import one_line, tell
from swift_ft.tools.status import add_coordinator, event_lines, job_lines, lines, log_lines

PATIENCE_S = 2.0
"""Seconds to wait for the coordinator's answer; then the page says that there is none, and asks again."""
REFRESH_S = 2
_STYLE = ":root { color-scheme: light dark; } body { font: 14px/1.5 monospace; margin: 1rem; white-space: pre-wrap; }"


def _page(title: str, body: Iterable[str]) -> str:
    """`body` is HTML, of which each item is a line."""
    head = f'<meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_S}"><title>{escape(title)}</title>'
    shown = "\n".join(body)
    return f"<!doctype html><html><head>{head}<style>{_STYLE}</style></head><body>{shown}</body></html>\n"


def _text(lines: Iterable[str]) -> list[str]:
    return [escape(one_line(line)) for line in lines]


def jobs_page(reply: pb.JobsReply, coordinator: str) -> str:
    """Returns the page of all jobs, as HTML: each line leads to its job."""
    links = [f'<a href="/job/{quote(job.job, safe="")}">{{}}</a>' for job in reply.jobs]
    shown = _text(job_lines(reply))
    shown[1 : 1 + len(links)] = map(str.format, links, shown[1:])
    return _page("jobs", [f"<b>Jobs of {escape(coordinator)}</b>", "", *shown])


def job_page(status: pb.StatusReply) -> str:
    body = ['<a href="/">all jobs</a>', "", *_text(lines(status))]
    for title, more in (("Log servers", log_lines(status)), ("History", event_lines(status))):
        body += ["", f"<b>{title}</b>", *_text(more[1:])]  # the first line is that of the job again
    return _page(status.view.job, body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, listen: tuple[str, int], coordinator: str, job: str) -> None:
        host = listen[0]
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__(listen, _Handler)
        self.coordinator, self.job = coordinator, job
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a browser that has left before its answer."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_GET(self) -> None:
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            host = ""
        if not is_loopback(host):
            self._answer(403, "open this page by its address\n", "text/plain")  # a name of somebody else's
            return
        job = unquote(self.path.removeprefix("/job/")) if self.path.startswith("/job/") else self.server.job
        if self.path != "/" and not self.path.startswith("/job/"):
            self._answer(404, "there are / and /job/NAME\n", "text/plain")
            return
        try:
            client = CoordinatorClient(
                self.server.coordinator, job, patience_s=PATIENCE_S, tell=lambda _line: None
            )
            try:
                page = (
                    job_page(client.status(history=True))
                    if job
                    else jobs_page(client.jobs(), self.server.coordinator)
                )
            finally:
                client.close()
        except SwiftError as error:
            page = _page("no answer", ['<a href="/">all jobs</a>', "", *_text([str(error)])])
        self._answer(200, page, "text/html")

    def _answer(self, code: int, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests."""


def parser() -> Parser:
    parser = Parser(
        prog="swift-ft watch",
        description="Serves a live page of a coordinator's jobs on loopback, for a browser, until Ctrl-C.",
    )
    add_coordinator(parser)
    parser.add_argument("--job", default="", metavar="NAME", help="the page / shows this job; default: all")
    parser.add_argument(
        "--listen",
        type=argument(_loopback),
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="a loopback address; default: a free port",
    )
    return parser


def _loopback(text: str) -> tuple[str, int]:
    host, port = host_and_port(text, "--listen")
    if not is_loopback(host):
        raise UsageError(f"--listen {text}: the page asks nobody for a token: give a loopback address")
    return host.strip("[]"), port


def serve(given: argparse.Namespace) -> _Server:
    try:
        return _Server(given.listen, given.coordinator, given.job)
    except OSError as error:
        raise ServiceError(f"--listen {given.listen[0]}:{given.listen[1]}: {error.strerror}") from None


@command
def main(argv: Sequence[str]) -> int:
    given = parser().parse_args(argv)
    CoordinatorClient(given.coordinator, given.job, patience_s=PATIENCE_S, tell=tell).close()
    server = serve(given)
    print(f"open {server.url} (Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0
