"""`swift-ft logs`: shows where a job's log is kept, and changes its log servers."""

from collections.abc import Sequence
from typing import Any

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import UsageError
from swift_ft.log.placement import parse_server
from swift_ft.rpc.views import state_name
from swift_ft.tools.status import OVER, answer, client_of, exit_code_of, parser_of

SILENT_S = 5.0
"""Seconds after which a log server that does not answer is shown as silent."""
DESCRIPTION = """\
Shows the log servers of a job, and on which of them each rank's streams are kept. A log server that is silent is given
up by the coordinator itself (--log-lost-s) if another one is left. With --lost it is given up now; with --add there is
one more, which is emptied of this job first. Both together replace a server. Either makes a new generation: ranks keep
their state, and the step under way is done again."""


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code_of(run, argv)


def run(argv: Sequence[str]) -> int:
    """Runs the command: changes the log servers if requested, then prints the placement. Returns the exit code.

    Raises UsageError for flags that contradict each other, ServiceError if the coordinator does not answer.
    """
    parser = parser_of("swift-ft logs", DESCRIPTION, "print it as JSON")
    parser.add_argument(
        "--lost", default="", metavar="HOST:PORT", help="give this log server up: it will not come back"
    )
    parser.add_argument(
        "--add",
        default="",
        metavar="[MACHINE=]HOST:PORT",
        help="use this log server from now on; with --lost, in place of the lost one",
    )
    arguments = parser.parse_args(argv)
    host, add = parse_server(arguments.add, "--add") if arguments.add else ("", "")
    lost = parse_server(arguments.lost, "--lost")[1] if arguments.lost else ""
    if lost and lost == add:
        raise UsageError(f"--lost and --add both name {lost}")
    client = client_of(arguments)
    try:
        if lost or add:
            client.call(pb.ChangeLogServersRequest(lost=lost, add=add, add_host=host))
        status = client.status()
    finally:
        client.close()
    answer(as_json(status) if arguments.json else lines(status))
    return 0


def as_json(status: pb.StatusReply) -> dict[str, Any]:
    """Returns the output of --json: groups, log servers, and the log servers of each rank."""
    view, silent = status.view, _silent(status)
    return {
        "job": view.job,
        "generation": view.generation,
        "state": state_name(view.state),
        "waiting_for": view.waiting_for,
        "copies_wanted": view.copies_wanted,
        "groups": view.groups,
        "log_servers": [
            {
                "address": server.address,
                "machine": server.host,
                "lost": server.lost or None,
                "silent_seconds": silent.get(server.address),
            }
            for server in view.log_places
        ],
        "ranks": {str(logs.rank): list(logs.servers) for logs in view.log_copies},
    }


def lines(status: pb.StatusReply) -> list[str]:
    """Returns the lines of the text output."""
    view, silent = status.view, _silent(status)
    kept: dict[str, list[str]] = {server.address: [] for server in view.log_places}
    for logs in view.log_copies:
        for number, address in enumerate(logs.servers):
            kept.setdefault(address, []).append(f"{logs.rank}{'' if number == 0 else ' (copy)'}")
    out = [f"job {view.job}: {state_name(view.state)}, generation {view.generation}"]
    if view.waiting_for:
        out.append(f"waits for {view.waiting_for}")
    if view.groups:
        out.append(f"recovery groups {view.groups}")
    fewest = min((len(logs.servers) for logs in view.log_copies), default=view.copies_wanted)
    if fewest < view.copies_wanted:
        out.append(f"{fewest} of {view.copies_wanted} copies are kept: add a log server")
    for server in view.log_places:
        what = (
            f"lost: it {server.lost}" if server.lost else f"ranks {', '.join(kept[server.address]) or 'none'}"
        )
        if view.state not in OVER and silent.get(server.address, 0.0) > SILENT_S:
            what += f"; has not answered for {silent[server.address]:.0f} s"
        out.append(f"{server.address} on {server.host or 'an unknown machine'}: {what}")
    return out


def _silent(status: pb.StatusReply) -> dict[str, float]:
    return {server.address: round(server.silent_s, 1) for server in status.log_servers}
