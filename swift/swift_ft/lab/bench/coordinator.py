"""`swift-ft bench coordinator`: CPU time of a coordinator for jobs of many members.

    join        every member joins, watches, sends heartbeats and is ready; ends when all see RUNNING
    checkpoint  every member reports its shard durable; ends when all see the complete checkpoint
    recovery    one member is lost: its exit is reported, a replacement joins, all report, all are ready; ends when all
                see RUNNING
One coordinator process for each number of members, without log servers. Members are real gRPC clients in a few
processes (`swift_ft.lab.bench.coordinator_members`): they send heartbeats all the time, at the interval of the reply,
repeat calls that were not answered, and rejoin as their own replacement if they are fenced. Stages have `REPLICAS`
replicas, so all but one keep their state. CPU seconds are those of the coordinator's process, user and system.
`view_bytes` is the size of the Watch streams' messages in the recovery. `beats_cpu` is the share of a core that
heartbeats alone take: if the members' own processes are slow, a recovery takes longer and contains more heartbeats.
"""

import contextlib
import json
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.output import Worker
from swift_ft.text import show, table, whole_number

REPLICAS = 8
PROCESSES = 4
LEASE_S = 60.0
"""Long lease, because hundreds of members share a process here and may be late."""
PHASE_S = 900.0
BEATS_S = 4.0
"""Duration of the phase with heartbeats only."""
RECOVERY_CPU_S_MAX = 1.0
GROWTH_MAX = 6.0
"""Upper limit of the growth of the recovery's CPU seconds for four times as many members."""
PHASES = ("join", "checkpoint", "recovery")
MEMBERS = "swift_ft.lab.bench.coordinator_members"
STEP = 10
"""Step of the checkpoint, after which the member is lost."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--members", default="64,256,1024", metavar="N,...", help="members of each job (default %(default)s)"
    )
    parser.add_argument(
        "--store",
        default="",
        metavar="etcd://HOST:PORT,...",
        help="keep the coordinator's state in this etcd, below keys of the benchmark's own (default: a directory)",
    )


def run(arguments: Any) -> dict[str, Any]:
    sizes = [whole_number(word) or 0 for word in arguments.members.split(",")]
    if any(members < REPLICAS or members % REPLICAS for members in sizes):
        raise UsageError(f"--members {arguments.members}: give multiples of {REPLICAS}, such as 64,256,1024")
    if arguments.store and not re.fullmatch(r"etcd://[^/]+", arguments.store):
        raise UsageError(f"--store {arguments.store}: give etcd://HOST:PORT,... without a prefix")
    cases = [measure(members, arguments.store) for members in sizes]
    document = {
        "machine": output.machine(),
        "replicas": REPLICAS,
        "store": arguments.store or "sqlite",
        "cases": cases,
    }
    show(text(document))
    return document


def measure(members: int, store: str = "") -> dict[str, Any]:
    """Measures one case. `store`: URL of an etcd; empty: SQLite. Raises ServiceError if a phase does not end."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(output.place(None)))
        kept = ["--directory", f"{directory}/meta"]
        if store:
            kept = ["--store", f"{store}/swift-bench/{secrets.token_hex(8)}"]
        flags = [*kept, "--listen", "127.0.0.1:0", "--lease-s", str(LEASE_S)]
        flags += ["--calls-per-peer", str(1 << 20), "--calls-per-token-s", "0"]
        pid, address = stack.enter_context(output.service("swift_ft_services.coordinator", directory, *flags))
        processes = [
            stack.enter_context(Worker(MEMBERS, address, members, REPLICAS, first, PROCESSES))
            for first in range(PROCESSES)
        ]
        join = phase(pid, processes, "join")
        checkpoint = phase(pid, processes, "checkpoint", version=STEP)
        used = output.cpu_s(pid)
        time.sleep(BEATS_S)
        beats = (output.cpu_s(pid) - used) / BEATS_S
        recovery = phase(
            pid, processes, "recovery", **{"lost": members // 2, "from": checkpoint["generation"]}
        )
    return {
        "members": members,
        **{f"join_{name}": join[name] for name in ("cpu_s", "s")},
        "checkpoint_cpu_s": checkpoint["cpu_s"],
        "beats_cpu": round(beats, 3),
        **{f"recovery_{name}": recovery[name] for name in ("cpu_s", "s")},
        **{name: recovery[name] for name in ("view_bytes", "generation")},
    }


def phase(pid: int, processes: Sequence[Worker], order: str, **fields: Any) -> dict[str, Any]:
    """Gives all processes one order and waits until each has carried it out.

    Returns wall seconds, CPU seconds of the coordinator `pid`, bytes of the Views sent, and the newest generation.
    """
    began, used = time.monotonic(), output.cpu_s(pid)
    for process in processes:
        process.tell(json.dumps({"order": order, **fields}))
    answers = [process.result() for process in processes]
    return {
        "s": round(time.monotonic() - began, 3),
        "cpu_s": round(output.cpu_s(pid) - used, 3),
        "view_bytes": sum(answer["view_bytes"] for answer in answers),
        "generation": max(answer["generation"] for answer in answers),
    }


def text(document: dict[str, Any]) -> list[str]:
    rows = [["members", *(f"{name} cpu s" for name in PHASES), "beats", "recovery s", "view bytes a member"]]
    for case in document["cases"]:
        used = [f"{case[f'{name}_cpu_s']:g}" for name in PHASES]
        each = str(round(case["view_bytes"] / case["members"]))
        rows.append(
            [str(case["members"]), *used, f"{case['beats_cpu']:.0%}", f"{case['recovery_s']:g}", each]
        )
    again = [
        f"{case['members']} members: generation {case['generation']}, more than one recovery"
        for case in document["cases"]
        if case["generation"] > 2
    ]
    head = f"stages of {document['replicas']} replicas; {document['store']}; {document['machine']}"
    return [head, "", *table(rows), *again, "", *verdicts(document["cases"])]


def verdicts(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Evaluates the goals: a recovery of 1024 members, and the growth where one size is 4 times another."""
    used = {case["members"]: case["recovery_cpu_s"] for case in cases}
    lines = []
    if 1024 in used:
        found = output.goal(used[1024], at_most=RECOVERY_CPU_S_MAX)
        lines.append(output.goal_words(found, "recovery of 1024 members", " s"))
    for members in used:
        if members * 4 in used:
            found = output.goal(used[members * 4] / used[members], at_most=GROWTH_MAX)
            lines.append(output.goal_words(found, f"{members} to {4 * members} members", "-fold"))
    return lines
