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
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.text import whole_number

REPLICAS = 8
PROCESSES = 4
START_S = 30.0
LEASE_S = 60.0
"""Long lease, because hundreds of members share a process here and may be late."""
PHASE_S = 900.0
BEATS_S = 4.0
"""Duration of the phase with heartbeats only."""
RECOVERY_CPU_S_MAX = 2.0
GROWTH_MAX = 6.0
"""Upper limit of the growth of the recovery's CPU seconds for four times as many members."""
STEP = 10
"""Step of the checkpoint, after which the member is lost."""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench coordinator",
        description="Measures the coordinator's processor time for jobs of many members.",
    )
    parser.add_argument(
        "--members", default="64,256,1024", metavar="N,...", help="members of each job (default %(default)s)"
    )
    output.add_json(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    output.check_json(arguments.json)
    cases = [measure(members) for members in checked_members(arguments.members)]
    document = {"machine": output.machine(), "replicas": REPLICAS, "cases": cases}
    output.write_json(arguments.json, document)
    print(text(document))
    return 0


def checked_members(words: str) -> list[int]:
    """Parses --members. Raises UsageError."""
    sizes = [whole_number(word) or 0 for word in words.split(",")]
    if any(members < REPLICAS or members % REPLICAS for members in sizes):
        raise UsageError(f"--members {words}: give multiples of {REPLICAS}, such as 64,256,1024")
    return sizes


def measure(members: int) -> dict[str, Any]:
    """Measures one case. Raises ServiceError if a phase does not end."""
    with (
        tempfile.TemporaryDirectory(prefix="swift-bench-") as directory,
        coordinator(Path(directory)) as (pid, address),
        contextlib.ExitStack() as stack,
    ):
        processes = [
            stack.enter_context(Members(address, members, range(first, members, PROCESSES)))
            for first in range(PROCESSES)
        ]
        join = phase(pid, processes, "join")
        checkpoint = phase(pid, processes, "checkpoint", version=STEP)
        used = cpu_s(pid)
        time.sleep(BEATS_S)
        beats = (cpu_s(pid) - used) / BEATS_S
        recovery = phase(
            pid, processes, "recovery", **{"lost": members // 2, "from": checkpoint["generation"]}
        )
    return {
        "members": members,
        "join_cpu_s": join["cpu_s"],
        "join_s": join["s"],
        "checkpoint_cpu_s": checkpoint["cpu_s"],
        "beats_cpu": round(beats, 3),
        "recovery_cpu_s": recovery["cpu_s"],
        "recovery_s": recovery["s"],
        "view_bytes": recovery["view_bytes"],
        "generation": recovery["generation"],
    }


def phase(pid: int, processes: "Sequence[Members]", order: str, **fields: Any) -> dict[str, Any]:
    """Gives all processes one order and waits until each has carried it out.

    Returns wall seconds, CPU seconds of the coordinator `pid`, bytes of the Views sent, and the newest generation.
    """
    began, used = time.monotonic(), cpu_s(pid)
    for process in processes:
        process.tell(order=order, **fields)
    answers = [process.receive() for process in processes]
    return {
        "s": round(time.monotonic() - began, 3),
        "cpu_s": round(cpu_s(pid) - used, 3),
        "view_bytes": sum(answer["view_bytes"] for answer in answers),
        "generation": max(answer["generation"] for answer in answers),
    }


def cpu_s(pid: int) -> float:
    """Returns a process's CPU seconds, user and system. Raises ServiceError if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        raise ServiceError("the coordinator has ended") from None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def coordinator(directory: Path) -> Iterator[tuple[int, str]]:
    """Runs a coordinator and yields its (pid, address). Raises ServiceError if it does not start."""
    address_file = directory / "address"
    command = [
        sys.executable,
        "-P",
        "-m",
        "swift_ft_services.coordinator",
        "--directory",
        str(directory / "meta"),
    ]
    command += ["--listen", "127.0.0.1:0", "--address-file", str(address_file)]
    command += ["--calls-per-peer", str(1 << 20), "--calls-per-token-s", "0", "--lease-s", str(LEASE_S)]
    with (directory / "coordinator.stderr").open("ab") as output:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=output)
    try:
        deadline = time.monotonic() + START_S
        while not address_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                words = (directory / "coordinator.stderr").read_text(errors="replace").strip()
                raise ServiceError(f"the coordinator does not serve: {words.rpartition(chr(10))[2]}")
            time.sleep(0.02)
        yield process.pid, address_file.read_text().strip()
    finally:
        process.kill()
        process.wait()


class Members:
    """A process that runs some of the members. As a context manager it kills the process."""

    def __init__(self, address: str, members: int, ranks: range) -> None:
        words = [address, str(members), str(REPLICAS), str(ranks.start), str(ranks.step)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "swift_ft.lab.bench.coordinator_members", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Members":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Returns the process's answer. Raises ServiceError if it has ended, or its members failed the phase."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ServiceError(f"a process of members has ended with exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServiceError(answer["error"])
        return answer


def text(document: dict[str, Any]) -> str:
    """Formats the document as text: a line for each number of members, then the goals."""
    head = (
        "members",
        "join cpu s",
        "checkpoint cpu s",
        "beats",
        "recovery cpu s",
        "recovery s",
        "view bytes a member",
    )
    lines = [f"stages of {document['replicas']} replicas; {document['machine']}", "", "  ".join(head)]
    for case in document["cases"]:
        each = round(case["view_bytes"] / case["members"])
        row = (case["members"], case["join_cpu_s"], case["checkpoint_cpu_s"])
        cells = [*row, f"{case['beats_cpu']:.0%}", case["recovery_cpu_s"], case["recovery_s"], each]
        line = "  ".join(f"{cell:>{len(name)}}" for name, cell in zip(head, cells, strict=True))
        again = f"  generation {case['generation']}: more than one recovery" if case["generation"] > 2 else ""
        lines.append(line + again)
    return "\n".join([*lines, "", *verdicts(document["cases"])])


def verdicts(cases: Sequence[dict[str, Any]]) -> list[str]:
    """Evaluates the goals: a recovery of 1024 members, and the growth where one size is 4 times another."""
    by_members = {case["members"]: case for case in cases}
    lines = []
    if 1024 in by_members:
        used = by_members[1024]["recovery_cpu_s"]
        met = "met" if used <= RECOVERY_CPU_S_MAX else "missed"
        lines.append(f"goal at most {RECOVERY_CPU_S_MAX:g} s: {used:.2f} s, {met} (recovery of 1024 members)")
    for members, case in by_members.items():
        if members * 4 in by_members:
            growth = by_members[members * 4]["recovery_cpu_s"] / case["recovery_cpu_s"]
            met = "met" if growth <= GROWTH_MAX else "missed"
            lines.append(
                f"goal at most {GROWTH_MAX:g}-fold: {growth:.1f}, {met} ({members} to {4 * members} members)"
            )
    return lines
