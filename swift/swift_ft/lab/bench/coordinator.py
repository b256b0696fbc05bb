"""`swift-ft bench coordinator`: CPU time of a coordinator for jobs of many members.

    join        every member joins, watches, sends heartbeats and is ready; ends when all see RUNNING
    checkpoint  every member reports its shard durable; ends when all see the complete checkpoint
    recovery    one member is lost: its exit is reported, a replacement joins, all report, all are ready; ends when all
                see RUNNING
One coordinator process for each number of members, without log servers. Members are real gRPC clients in a few
processes (`Fleet`): they send heartbeats all the time, at the interval of the reply, repeat calls that were not
answered, and rejoin as their own replacement if they are fenced. Stages have `REPLICAS` replicas, so all but one keep
their state. CPU seconds are those of the coordinator's process, user and system. `view_bytes` is the size of the Watch
streams' messages in the recovery. `beats_cpu` is the share of a core that heartbeats alone take: if the members' own
processes are slow, a recovery takes longer and contains more heartbeats.

    python -m swift_ft.lab.bench.coordinator ADDRESS MEMBERS FIRST

Runs ranks FIRST, FIRST + `PROCESSES`, ... of MEMBERS. Each line on stdin is an order, and is answered by a line:

    {"order": "join"}                      all join; answered when all see RUNNING
    {"order": "checkpoint", "version": V}  all report their shards durable; answered when all see it complete
    {"order": "recovery", "lost": RANK, "from": G}    RANK's exit is reported, and it rejoins as another process;
                                           answered when all see RUNNING in a generation above G
"""

import asyncio
import contextlib
import json
import math
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft._pb import coordinator_pb2_grpc as pb_grpc
from swift_ft.cli_parser import Parser
from swift_ft.coordinator_client import ATTEMPT_TIMEOUT_S, CHANNEL_OPTIONS, RETRY_PAUSE_S
from swift_ft.credentials import CONNECTING
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
            stack.enter_context(Worker(__name__, address, members, first)) for first in range(PROCESSES)
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


# A process of members, without trainers: they follow each View.

JOB = "bench"
CHANNELS = 4
_FENCED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ALREADY_EXISTS)


class _Fenced(Exception):
    """Raised if this process does not hold its rank any more, or not yet."""


class Fleet:
    def __init__(self, address: str, members: int, ranks: range) -> None:
        self.world_size = members
        options = (*CHANNEL_OPTIONS, *CONNECTING)
        self.channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(CHANNELS)]
        self.members = {rank: Member(self, rank) for rank in ranks}
        self.version = 0
        self.view_bytes = 0
        self.seen = asyncio.Event()
        """Set when a member receives a View."""

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Carries out one order (see above) with all members of this process, and returns its measurements."""
        match order["order"]:
            case "join":
                for member in self.members.values():
                    member.start()
                await self.until(lambda view: view.state == pb.RUNNING)
            case "checkpoint":
                self.version = order["version"]
                await asyncio.gather(*(member.save(self.version) for member in self.members.values()))
                await self.until(lambda view: self.version in view.checkpoints)
            case "recovery":
                if order["lost"] in self.members:
                    await self.members[order["lost"]].die()
                # The order has the generation before: by now another process's members may have recovered already.
                await self.until(lambda view: view.state == pb.RUNNING and view.generation > order["from"])
        newest = max(member.generation for member in self.members.values())
        view_bytes, self.view_bytes = self.view_bytes, 0
        return {"view_bytes": view_bytes, "generation": newest}

    async def until(self, condition: Callable[[pb.View], bool]) -> None:
        """Waits until every member's View fulfils the condition. Raises TimeoutError after PHASE_S."""
        async with asyncio.timeout(PHASE_S):
            while not all(
                member.view is not None and condition(member.view) for member in self.members.values()
            ):
                self.seen.clear()
                await self.seen.wait()


class Member:
    def __init__(self, fleet: Fleet, rank: int) -> None:
        self._fleet = fleet
        self._rank = rank
        channel = fleet.channels[rank // REPLICAS % CHANNELS]
        self._stub = pb_grpc.CoordinatorStub(channel)
        self._watch = channel.unary_stream(
            "/swift.coordinator.v1.Coordinator/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=bytes,
        )
        self._lives = 0
        self._renewed_at = -math.inf
        self._me: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.view: pb.View | None = None
        self.version: int | None = 0

    @property
    def generation(self) -> int:
        return 0 if self.view is None else self.view.generation

    def start(self) -> None:
        self._lives += 1
        self._me = {"job": JOB, "rank": self._rank, "incarnation": f"{self._rank:016x}{self._lives:016x}"}
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._live())]

    async def die(self) -> None:
        """Stops the member, reports its exit as its launcher would, and starts another incarnation."""
        me = self._me
        self.stop()
        await self._say(self._stub.MemberExited, pb.ExitRequest(**me, pid=self._rank + 1, exit_code=-9))
        self.version = None
        self.start()

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def save(self, version: int) -> None:
        self.version = version
        request = pb.CheckpointRequest(**self._me, version=version, generation=self.generation)
        await self._say(self._stub.CheckpointDurable, request)

    async def _follow(self) -> None:
        while True:
            try:
                known = 0
                async for data in self._watch(pb.WatchRequest(job=JOB, rank=self._rank)):
                    self._fleet.view_bytes += len(data)
                    update = pb.ViewUpdate.FromString(data)
                    if update.base not in (0, known):
                        raise AssertionError("a change of a View that was not told")
                    # Every update has the fields that a member acts on, so there is no need to merge Views here.
                    self.view, known = update.view, update.view.revision
                    self._changed.set()
                    self._fleet.seen.set()
            except grpc.aio.AioRpcError:
                pass  # the coordinator is stopping or starting: try again, as a rank's watcher does
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _live(self) -> None:
        try:
            await self._join()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._act())
        except* _Fenced:
            self.stop()
            self.version = None
            self.start()

    async def _join(self) -> None:
        incarnation = self._me["incarnation"]
        request = pb.JoinRequest(
            job=JOB,
            member=pb.Member(rank=self._rank, incarnation=incarnation, pid=self._rank + 1, host="bench"),
            world_size=self._fleet.world_size,
            config={"replicas": str(REPLICAS), "seed": "7"},
            fingerprint={"torch": "2.13.0"},
        )
        await self._say(self._stub.Join, request)

    async def _beat(self) -> None:
        """Sends heartbeats as ranks do: a Report or a Ready replaces one."""
        loop = asyncio.get_running_loop()
        while True:
            version = self.version or 0
            reply = await self._say(self._stub.Heartbeat, pb.HeartbeatRequest(**self._me, version=version))
            pause_s = reply.interval_s
            while pause_s > 0:
                await asyncio.sleep(pause_s)
                pause_s = self._renewed_at + reply.interval_s - loop.time()

    async def _act(self) -> None:
        answered = (0, 0)
        while True:
            await self._changed.wait()
            self._changed.clear()
            view = self.view
            if view is None or (view.generation, view.state) == answered:
                continue
            answered = (view.generation, view.state)
            if view.state == pb.FORMING:
                await self._ready(view.generation, 0)
            elif view.state == pb.PLANNING:
                request = pb.ReportRequest(
                    **self._me,
                    generation=view.generation,
                    has_state=self.version is not None,
                    version=self.version or 0,
                )
                await self._renew(self._stub.Report, request)
            elif view.state == pb.RECOVERING:
                await self._ready(view.generation, view.plan.target_version)

    async def _ready(self, generation: int, version: int) -> None:
        self.version = version
        request = pb.ReadyRequest(
            **self._me,
            generation=generation,
            version=version,
            stages=[self._rank // REPLICAS],
            num_stages=self._fleet.world_size // REPLICAS,
        )
        await self._renew(self._stub.Ready, request)

    async def _renew(self, method: Callable[..., Awaitable[Any]], request: Any) -> None:
        """Makes a call that also renews the lease."""
        begun = asyncio.get_running_loop().time()
        await self._say(method, request)
        self._renewed_at = begun

    async def _say(self, method: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Repeats a call until it is answered. Returns None if it came too late. Raises _Fenced."""
        while True:
            try:
                return await method(request, timeout=ATTEMPT_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in _FENCED:
                    raise _Fenced from None
                if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                    return None  # the View's state is over: another View follows
                await asyncio.sleep(RETRY_PAUSE_S)


async def run_members(address: str, members: int, first: int) -> None:
    fleet = Fleet(address, members, range(first, members, PROCESSES))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        try:
            answer = await fleet.obey(order)
        except TimeoutError:
            answer = {
                "error": f"the members have not come to the end of {order['order']} within {PHASE_S:g} s"
            }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(run_members(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
