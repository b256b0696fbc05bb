"""`swift-ft watch`: a live page of a coordinator's jobs for a browser. It reads, and changes nothing.

The page is served by the command itself, on loopback, with the token of who runs it. So a coordinator has no port that
answers browsers, and a browser needs no token.
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
from swift_ft.cli_parser import Parser, argument, host_and_port, is_loopback
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.rpc.client import CoordinatorClient
from swift_ft.rpc.views import OVER, inexact_words, rehearsal_words, state_name
from swift_ft.text import tell, time_words
from swift_ft.tools.status import (
    add_coordinator,
    clock_words,
    goes_on_words,
    kept_by,
    late_words,
    replay_words,
    told_words,
    unsaved_words,
)

PATIENCE_S = 2.0
"""Seconds to wait for the coordinator's answer; then the page says that there is none, and asks again."""
REFRESH_S = 2
_GENERATIONS_SHOWN = 20
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7d46; --bad: #c0392b; --busy: #b9770e; --dim: #777; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.2rem auto; max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--dim); }
td { font-variant-numeric: tabular-nums; } td:last-child { min-width: 14rem; }
.s { font-weight: 600; color: var(--busy); } .RUNNING, .FINISHED { color: var(--good); } .FAILED { color: var(--bad); }
.bad { color: var(--bad); } .dim { color: var(--dim); }
"""


def _page(title: str, body: Iterable[str]) -> str:
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="refresh" content="{REFRESH_S}">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """`rows` are HTML."""
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>{body}</table></div>'


def _state(state: "pb.State.ValueType") -> str:
    name = state_name(state)
    return f'<span class="s {name}">{name}</span>'


def jobs_page(reply: pb.JobsReply, coordinator: str) -> str:
    """Returns the page of all jobs, as HTML."""
    rows = []
    for job in reply.jobs:
        words = [f"waits for {job.waiting_for}"] if job.waiting_for else []
        words += [job.reason] if job.reason and job.state != pb.RUNNING else []
        exact = f"not since version {job.inexact_since}" if job.HasField("inexact_since") else "yes"
        link = f'<a href="/job/{quote(job.job, safe="")}">{escape(job.job)}</a>'
        checkpoint = str(job.checkpoint) if job.HasField("checkpoint") else "-"
        ranks = f"{job.live_ranks} of {job.world_size}"
        numbers = [str(job.generation), ranks, str(job.version), checkpoint]
        rows.append([link, _state(job.state), *numbers, exact, escape("; ".join(words))])
    head = ["job", "state", "generation", "ranks", "version", "checkpoint", "exact", ""]
    more = [f"<p>and {reply.left_out} more</p>"] if reply.left_out else []
    table = _table(head, rows) if rows else "<p>There are no jobs.</p>"
    return _page("jobs", [f"<h1>Jobs of {escape(coordinator)}</h1>", table, *more])


def job_page(status: pb.StatusReply) -> str:
    """Returns the page of one job, as HTML."""
    view = status.view
    body = [
        '<p><a href="/">all jobs</a></p>',
        f"<h1>{escape(view.job)}: {_state(view.state)}, generation {view.generation}</h1>",
    ]
    lines = [f"because {view.reason}" if view.reason else "", goes_on_words(view)]
    lines += [f"waits for {view.waiting_for}" if view.waiting_for else ""]
    lines += [f"plan: {view.plan.reason}" if view.state == pb.RECOVERING else ""]
    body += [f"<p>{escape(line)}</p>" for line in lines if line]
    if inexact := inexact_words(view):
        body.append(f'<p class="bad">{escape(inexact)}</p>')
    suspected = [told_words(each) for each in status.suspicions if each.told]
    suspected += late_words([each for each in status.suspicions if not each.told])
    body += [f'<p class="bad">{escape(line)}</p>' for line in suspected]
    body += ["<h2>Ranks</h2>", _table(["rank", "stages", "process", "version", "heard", ""], _ranks(status))]
    if view.log_places:
        body += ["<h2>Log servers</h2>", _table(["address", "machine", "ranks", ""], _log_servers(status))]
    if rehearsed := rehearsal_words(view):
        body += ["<h2>Rehearsals</h2>", *(f"<p>{escape(line)}</p>" for line in rehearsed)]
    head = ["generation", "began", "cause", "plan", "states"]
    return _page(view.job, [*body, "<h2>History, newest first</h2>", _table(head, _history(status))])


def _ranks(status: pb.StatusReply) -> Iterable[Sequence[str]]:
    view = status.view
    members, over = {member.rank: member for member in view.members}, view.state in OVER
    for rank in status.ranks:
        who, words = members.get(rank.rank, pb.Member()), []
        if rank.HasField("replay"):
            words.append(replay_words(rank.replay))
        if rank.HasField("unsaved"):
            words.append(unsaved_words(rank.unsaved, max(view.checkpoints, default=0)))
        heard = "" if over else f"{rank.lease_age_s:.1f} s ago"
        stages = ", ".join(map(str, rank.stages))
        process = f"{who.pid} on {escape(who.host)}"
        yield [str(rank.rank), stages, process, str(rank.version), heard, escape("; ".join(words))]
    for slot in view.vacant:
        yield [str(slot), "", '<span class="dim">vacant</span>', "", "", ""]


def _log_servers(status: pb.StatusReply) -> Iterable[Sequence[str]]:
    kept, silent = kept_by(status.view), {each.address: each.silent_s for each in status.log_servers}
    for server in status.view.log_places:
        words = f'<span class="bad">lost: it {escape(server.lost)}</span>' if server.lost else ""
        if not words and server.address in silent and status.view.state not in OVER:
            words = f"answered {silent[server.address]:.1f} s ago"
        ranks = escape(", ".join(kept[server.address]))
        yield [escape(server.address), escape(server.host), ranks, words]


def _history(status: pb.StatusReply) -> Iterable[Sequence[str]]:
    for generation in reversed(status.history[-_GENERATIONS_SHOWN:]):
        first = generation.entries[0]
        states = [state_name(first.state)]
        states += [f"{state_name(e.state)} +{time_words(e.at - first.at)}" for e in generation.entries[1:]]
        words = [generation.plan, ", ".join(states)]
        cause = first.reason or "the job began"
        yield [str(generation.number), clock_words(first.at), escape(cause), *map(escape, words)]


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
            page = _page(
                "no answer", [f'<p class="bad">{escape(str(error))}</p><p><a href="/">all jobs</a></p>']
            )
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
    """Binds the port. Raises ServiceError if that is not possible."""
    try:
        return _Server(given.listen, given.coordinator, given.job)
    except OSError as error:
        raise ServiceError(f"--listen {given.listen[0]}:{given.listen[1]}: {error.strerror}") from None


def main(argv: Sequence[str] | None = None) -> int:
    try:
        given = parser().parse_args(sys.argv[1:] if argv is None else argv)
        CoordinatorClient(given.coordinator, given.job, patience_s=PATIENCE_S, tell=tell).close()
        server = serve(given)
    except SwiftError as error:
        tell(error)
        return error.exit_code
    print(f"open {server.url} (Ctrl-C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 130
    return 0
