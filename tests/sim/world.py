"""One simulated world: log servers, a coordinator, ranks, and what goes wrong. One seed says all of it.

For `FAULTS_UNTIL_S` seconds things fail; then the network is whole, disks are sound, what is dead is started again,
and the job has `GRACE_S` to end.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import SwiftError
from swift_ft.log.protocol import Fsync
from swift_ft.log.record import boundary
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Refusal
from swift_ft_services.coordinator.job_record import JobRow, State
from tests.sim.checkers import Checkers, Truth, Violation
from tests.sim.control import Coordinator, SharedStore, Shown
from tests.sim.disk import PowerCut, SimDisk
from tests.sim.kernel import Kernel, Network
from tests.sim.server import JOB, ServerProcess, at
from tests.sim.trainer import UNLOADABLE, Trainer

FAULTS_UNTIL_S = 14.0
GRACE_S = 90.0
DROPPING = 0.25
"""Share of the worlds whose writers drop records."""
OPERATED = 0.125
"""Of the worlds."""
LEGITIMATE_ENDS = ("in a row",)
"""Why a job may fail, if enough goes wrong."""
NOWHERE_TO_GO = "no complete checkpoint"
"""And where ranks could not load one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a seed."""

    seed: int
    state: str
    sim_seconds: float
    counts: dict[str, int]
    violation: str = ""
    checker: str = ""
    trace: list[str] = field(default_factory=list)


class World:
    def __init__(self, seed: int) -> None:
        self.kernel = Kernel(seed)
        chance = self.kernel.random
        self.ranks = chance.choice((2, 3, 3, 4))
        self.names = ["log0", "log1"][: 1 if chance.random() < 0.6 else 2]
        # Drawn apart, so that the other worlds stay as they are.
        self.places = random.Random(f"places {seed}")
        self.copies, self.log_lost_s = 1, 0.0
        if self.places.random() < 0.2:
            self.names, self.log_lost_s = ["log0", "log1", "log2"], 6.0
            self.copies = self.places.choice((1, 2, 2))
        drops = random.Random(f"drops {seed}")
        self.drop_queue = drops.choice((1, 2, 3, 5)) if drops.random() < DROPPING else 0
        self.operators = random.Random(f"operators {seed}")
        self.operated = self.operators.random() < OPERATED
        """Operators give servers up and name others, and disks come back empty."""
        self.looks_at_logs = bool(self.log_lost_s) or self.operated
        self.lost: set[str] = set()
        """Servers that are gone for good, unless an operator puts another machine in their place."""
        self._first = list(self.names)
        self._used = set(range(len(self.names)))
        """Servers that have come into use, by their numbers."""
        self.fsync = chance.choices((Fsync.ALWAYS, Fsync.INTERVAL, Fsync.NEVER), (7, 2, 1))[0]
        self.network = Network(self.kernel)
        # Small records share a block of the disk; large ones fill some.
        self.truth = Truth(self.ranks, 2 if chance.random() < 0.85 else 700)
        self.checkers = Checkers(self.truth)
        self.mail: dict[tuple[int, str, int, int], int] = {}
        self.checkpoints: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.history = 0
        self.state = State.FORMING
        self.reason = ""
        self.calm = False
        self._disks = {name: SimDisk(self.kernel, name) for name in self.names}
        self._servers: dict[str, ServerProcess | None] = dict.fromkeys(self.names)
        self._coordinator: Coordinator | None = None
        self.trainers: list[Trainer] = []
        for name in self.names:
            self._start_server(name)
        self.store = SharedStore()
        self._start_coordinator()
        for rank in range(self.ranks):
            self._spawn(rank)
        self.kernel.after(0.3, self._launcher)

    # -- what the processes find ------------------------------------------------------------------------

    def servers(self) -> dict[str, ServerProcess | None]:
        return self._servers

    def disk(self, name: str) -> SimDisk:
        return self._disks[name]

    def coordinator(self) -> Coordinator | None:
        return self._coordinator

    def show(self, shown: Shown) -> None:
        for trainer in self.trainers:
            if trainer.alive and self._coordinator is not None:
                self.network.send(self._coordinator.name, trainer, trainer.see, shown)

    def row_saved(self, row: JobRow, by: object) -> None:
        self.checkers.generation_saved(row.generation, by)
        if row.rolled_back_in != self.history:
            assert row.plan is not None or row.state is State.FORMING
            self.kernel.count("history given up" if row.plan is not None else "begun anew before it ran")
            base = row.plan.target_version if row.plan is not None else 0
            self.truth.begin(row.rolled_back_in, base, self.history)
            self.history = row.rolled_back_in
            self.checkers.history_begins()
        self._look_at_places(row)
        if row.state is State.RUNNING and self.state is not State.RUNNING:
            versions = dict(row.ready)
            if len(versions) < self.ranks or len(set(versions.values())) > 1:
                raise Violation("replay", f"the job runs with ranks at {versions}")
        planned = row.plan if self.state is State.PLANNING and row.state is State.RECOVERING else None
        if planned is not None and planned.restores and "declared unlogged" in planned.reason:
            self.kernel.count("nothing replayed over declared steps")
        self.state, self.reason = row.state, row.reason

    def _look_at_places(self, row: JobRow) -> None:
        """Tells the checkers what the coordinator counts on."""
        for number in row.living() if row.granted == row.generation else ():
            if number not in self._used:
                self._used.add(number)
                self.checkers.comes(row.log_servers[number].address, row.generation)
        if row.state is State.RUNNING and self.state is not State.RUNNING:
            for rank, logs in row.placement.items():
                for copy in logs.copies:
                    name = row.log_servers[copy.server].address
                    streams = [at(name, boundary(rank, kind)) for kind in "FB"]
                    assert copy.whole_from is not None
                    self.checkers.counts(name, streams, copy.whole_from, max(row.ready.values()))

    # -- life and death -----------------------------------------------------------------------------------

    def _start_server(self, name: str) -> None:
        if self._servers[name] is not None or name in self.lost:
            return
        disk = self._disks[name]
        try:
            server = ServerProcess(
                self.kernel,
                name,
                self.network,
                disk,
                self.fsync,
                self.checkers,
                lambda: self.kill_server(name, power=self.kernel.chance(0.5)),
            )
        except PowerCut:
            self.kernel.count("killed while it recovers")
            self._lose_power(name)
            self.kernel.after(self.kernel.between(0.2, 1.0), self._start_server, name)
            return
        except SwiftError as error:
            if not disk.failing:
                raise Violation("start", f"{name} cannot start: {error}") from error
            self.kernel.count("server did not start on a failing disk")
            self.kernel.after(1.0, self._start_server, name)
            return
        self._servers[name] = server
        self.kernel.note("{} serves", name)
        self.check_log(name)

    def kill_server(self, name: str, power: bool) -> None:
        server, disk = self._servers[name], self._disks[name]
        if server is None:
            return
        server.alive = False
        self._servers[name] = None
        disk.crash_in = -1
        self.kernel.note("{} {}", name, "loses its power" if power else "is killed")
        if power:
            self._lose_power(name)
        for call in sorted(server.calls, key=lambda call: (call.writer, call.number)):
            call.broken = True
            if call.client is not None:
                call.client.later(self.kernel.between(0.0, 0.5), call.on_end, call, "", "server gone")
        self.kernel.after(self.kernel.between(0.2, 2.0), self._start_server, name)

    def lose_server(self, name: str) -> bool:
        """With its disk. One stays, unless operators bring others; and a job that is not formed yet waits for all."""
        last = len(self.lost | {name}) == len(self.names)
        if self.state is State.FORMING or (last and not self.operated):
            return False
        self.lost.add(name)
        self.kill_server(name, power=False)
        return True

    def empty_server(self, name: str) -> None:
        """It comes back, with another disk."""
        self.kill_server(name, power=False)
        self._disks[name] = SimDisk(self.kernel, name)
        self.checkers.disk_lost(name)

    def bring_server(self, name: str) -> None:
        """A machine under this address, a new one if the last one is lost."""
        if name not in self.names:
            self.names.append(name)
            self._servers[name], self._disks[name] = None, SimDisk(self.kernel, name)
            self.lost.add(name)
        if name in self.lost:
            self.lost.discard(name)
            self.empty_server(name)
            self._start_server(name)

    def _lose_power(self, name: str) -> None:
        lost, shuffled = self._disks[name].power_cut()
        self.checkers.damaged |= {at(name, stream) for stream in shuffled}
        if self.fsync is not Fsync.ALWAYS:
            self.checkers.lossy |= {at(name, stream) for stream in lost}

    def _start_coordinator(self) -> None:
        self._coordinator = coordinator = Coordinator(self.kernel, self.network, self, self._first)
        if not coordinator.alive:
            self._coordinator = None

    def take_over(self) -> None:
        """The holder has lost its lease, and lives: it was stopped, or is cut off from the store."""
        if self._coordinator is not None:
            self._coordinator.pause(self.kernel.between(0.0, 4.0) * self.kernel.random.randint(0, 1))
        self.kernel.note("coordinator: another one takes over")
        self._start_coordinator()

    def coordinator_died(self) -> None:
        if self._coordinator is not None:
            self._coordinator.alive = False
        self._coordinator = None
        self.kernel.note("coordinator: killed")
        self.kernel.after(self.kernel.between(0.2, 1.5), self._start_coordinator)

    def _spawn(self, rank: int) -> None:
        number = sum(trainer.rank == rank for trainer in self.trainers)
        careless = number > 0 and self.kernel.chance(0.08)
        name = f"r{rank}.{number}"
        self.trainers.append(Trainer(self.kernel, self.network, self, rank, name, careless))
        self.kernel.note("{} starts", name)

    def kill_trainer(self, trainer: Trainer, told: bool) -> None:
        trainer.alive = False
        self.kernel.note("{} is killed", trainer.name)
        for link in trainer.writer.links.values():
            link.break_call(told=False)
        if told:
            self._tell_exit(trainer)

    def trainer_failed(self, trainer: Trainer) -> None:
        self.kernel.count("trainer ended by its log")
        self.kill_trainer(trainer, told=True)

    def _tell_exit(self, trainer: Trainer) -> None:
        """The launcher says it until it is heard."""
        self.say(pb.ExitRequest(rank=trainer.rank, incarnation=trainer.name, pid=1, exit_code=-9))

    def say(self, command: m.Command, then: Callable[[], None] = lambda: None) -> None:
        """By somebody beside the job, until it is heard."""
        heard: list[Refusal | None] = []

        def hear(refusal: Refusal | None) -> None:
            heard.append(refusal)
            if len(heard) == 1:
                then()

        def again() -> None:
            if not heard and not self.state.is_over:
                if self._coordinator is not None:
                    self._coordinator.later(self.network.delay_s(), self._coordinator.handle, command, hear)
                self.kernel.after(0.5, again)

        self.kernel.after(self.kernel.between(0.01, 0.3), again)

    def servers_in_use(self) -> list[str]:
        """As the coordinator has it, and tells operators."""
        job = self._coordinator.job if self._coordinator is not None else None
        return job.row.addresses() if job is not None else []

    def _operator(self) -> None:
        """When nothing fails any more: a job that waits for servers that are gone for good gets one that lives."""
        self.kernel.after(1.0, self._operator)
        if self.state.is_over or self.state is State.FORMING or self._coordinator is None:
            return
        in_use = self.servers_in_use()
        gone = [name for name in in_use if name in self.lost]
        if len(gone) == len(in_use):
            living = next((name for name in self.names if name not in self.lost), self.names[0])
            self.bring_server(living)
            self.kernel.count("operator: brings a server back at the end")
            self.say(pb.ChangeLogServersRequest(lost=gone[0] if gone else "", add=living))
        elif gone and not self.log_lost_s:
            self.say(pb.ChangeLogServersRequest(lost=gone[0]))

    def _launcher(self) -> None:
        """Every rank has a process, or gets one."""
        self.kernel.after(0.3, self._launcher)
        if self.state.is_over:
            return
        shown = self._coordinator.shown if self._coordinator is not None else None
        for rank in range(self.ranks):
            mine = [trainer for trainer in self.trainers if trainer.rank == rank and trainer.alive]
            if all(shown is not None and trainer.name in shown.fenced for trainer in mine):
                self._spawn(rank)

    # -- checks -------------------------------------------------------------------------------------------

    def check_log(self, name: str) -> None:
        """Reads every stream of a server, as a reader does."""
        server = self._servers[name]
        if server is None:
            return
        job = server.state.core.jobs.get(JOB)
        self.kernel.count("log read whole")

        def read(where: str) -> tuple[list[bytes], str]:
            if job is None:
                return [], ""  # as one that has never heard of it: nothing
            messages, refusal = server.read(where.removeprefix(at(name, "")), job.trimmed_below_step, 0)
            return messages, refusal.message if refusal is not None else ""

        streams = {at(name, stream) for stream in job.streams} if job is not None else set()
        self.checkers.check_log(name, streams, read)

    def run(self, faults: Callable[["World"], None]) -> None:
        """Raises Violation."""
        faults(self)
        self.kernel.run(lambda: self.state.is_over, FAULTS_UNTIL_S)
        self._heal()
        if not self.kernel.run(lambda: self.state.is_over, FAULTS_UNTIL_S + GRACE_S):
            raise Violation(
                "live", f"the job is {self.state} {GRACE_S:g} s after the last fault: {self.reason}"
            )
        may_end = LEGITIMATE_ENDS
        if self.kernel.counts[f"refused: {UNLOADABLE}"]:
            may_end += (NOWHERE_TO_GO,)
        if self.state is State.FAILED and not any(end in self.reason for end in may_end):
            raise Violation("live", f"the job has failed: {self.reason}")
        living = [name for name in self.names if name not in self.lost]
        self.kernel.run(lambda: all(self._servers[name] for name in living), self.kernel.now + 10.0)
        for name in self.names:
            self.check_log(name)

    def _heal(self) -> None:
        self.calm = True
        self.kernel.after(0.0, self._operator)
        self.network.heal_all()
        self.kernel.note("no more faults")
        for trainer in self.trainers:
            trainer.resumes_at = 0.0
        if self._coordinator is not None:
            self._coordinator.resumes_at = 0.0
            self._coordinator.crash_in = -1
        for name, disk in self._disks.items():
            disk.crash_in = -1
            disk.full = disk.failing = False
            server = self._servers[name]
            if server is not None:
                server.resumes_at = 0.0
                if server.state.failed:
                    self.kill_server(name, power=True)
