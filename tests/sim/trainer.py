"""A simulated rank: trains step by step, logs what it sends, drops steps, reports, replays, refuses.

One process holds one stage of a pipeline. Its state and what it sends are functions of its inputs (`checkers.Truth`),
so that a wrong input is seen in every bit that comes of it. Live messages go through `Surroundings.mail`; what a
process of an older generation posts there reaches its own generation only, as with process groups.
"""

from collections.abc import Callable
from typing import Any, Protocol

from swift_ft._pb import coordinator_pb2, log_pb2
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.errors import LogError
from swift_ft.log.frame import decode_header, decode_record
from swift_ft.log.protocol import Reason, split_frames
from swift_ft.log.record import RecordKey, Steps, boundary, declared
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Fenced, Invalid, Refusal
from swift_ft_services.logserver.core import Refusal as LogRefusal
from tests.sim.checkers import Violation, body_of, first_state, next_state, output
from tests.sim.control import Coordinator, Shown
from tests.sim.kernel import Kernel, Network, Process
from tests.sim.server import ServerProcess, at
from tests.sim.writer import SimWriter, own_servers
from tests.sim.writer import Surroundings as WritersSurroundings

STEPS = 9
CHECKPOINT_EVERY = 3
BACKLOG_MAX = 12
MISSING_S = 8.0
RESAY_S = 1.0
UNLOADABLE = "its checkpoint cannot be loaded"


class Surroundings(WritersSurroundings, Protocol):
    ranks: int
    names: list[str]
    mail: dict[tuple[int, str, int, int], int]
    """(generation, kind, rank, step) -> what was sent live."""
    checkpoints: dict[tuple[int, int], list[tuple[int, int]]]
    """(rank, version) -> (generation, state), as saved."""

    def coordinator(self) -> Coordinator | None: ...

    def trainer_failed(self, trainer: "Trainer") -> None: ...


class _Reader:
    """One stream, read by asking again and again for what has come."""

    def __init__(self, stream: str, copies: list[str], from_step: int, now: float) -> None:
        self.stream = stream
        self.copies = copies
        """Those that have not refused; the first one is read."""
        self.from_step = from_step
        self.next_sequence = 0
        self.records: dict[int, bytes] = {}
        self.marks: list[Steps] = []
        self.asked_at = -RESAY_S
        self.waits_since = now
        self.request = 0


class Trainer(Process):
    def __init__(
        self, kernel: Kernel, network: Network, world: Surroundings, rank: int, name: str, careless: bool
    ) -> None:
        """``careless``: it forgets to ask the log what its predecessor has sent already."""
        super().__init__(kernel, name)
        self.rank = rank
        self.network = network
        self.world = world
        self.careless = careless
        self.shown: Shown | None = None
        self.version: int | None = None
        self.state = 0
        self.writer = SimWriter(self, network, world, self._refuse)
        self._joined = False
        self._generation = 0
        self._stage = 0
        self._forward = self._backward = 0
        self._recovering = False
        self._digests_wanted: set[tuple[str, str]] = set()
        """Of which stream, from which server."""
        self._damaged: set[tuple[str, str]] = set()
        self._readers: dict[str, _Reader] = {}
        self._refused_in = 0
        self._to_say: int | None = None
        """A checkpoint that the coordinator has not acknowledged."""
        self._said: dict[str, float] = {}
        self._acked: set[str] = set()
        self.later(kernel.between(0.0, 0.1), self._tick)
        self.later(0.2, self._beat)

    @property
    def sender(self) -> dict[str, Any]:
        return {"rank": self.rank, "incarnation": self.name}

    # -- the coordinator ------------------------------------------------------------------------------

    def _tell(self, command: m.Command, answer: Callable[[Refusal | None], None]) -> None:
        coordinator = self.world.coordinator()
        if coordinator is None:
            return

        def back(refusal: Refusal | None) -> None:
            self.network.send(coordinator.name, self, self._heard, refusal, answer, coordinator.shown)

        self.network.send(self.name, coordinator, coordinator.handle, command, back)

    def _heard(
        self, refusal: Refusal | None, answer: Callable[[Refusal | None], None], shown: Shown | None
    ) -> None:
        if isinstance(refusal, Fenced):
            self.kernel.count("fenced process told so")
            self.alive = False
            return
        if isinstance(refusal, Invalid):
            raise Violation("protocol", f"{self.name} said something impossible: {refusal}")
        if shown is not None:
            self.see(shown)
        answer(refusal)

    def say(self, key: str, command: m.Command) -> bool:
        """Until it is acknowledged. True: it was."""
        key = f"{key} {self._generation}"
        if key in self._acked:
            return True
        if self.kernel.now - self._said.get(key, -RESAY_S) >= RESAY_S:
            self._said[key] = self.kernel.now
            self._tell(command, lambda refusal: None if refusal else self._acked.add(key))
        return False

    def _beat(self) -> None:
        self.later(0.5, self._beat)
        if self._joined:
            self._tell(pb.HeartbeatRequest(**self.sender, version=self.version or 0), lambda refusal: None)
            self._say_wanted()

    def _say_wanted(self) -> None:
        wanted, generation = self.writer.dropping.wanted, self._generation
        if wanted is None:
            return
        ask = pb.AskCheckpointRequest(
            **self.sender, generation=generation, after_version=wanted[0], reason=wanted[1]
        )

        def heard(refusal: Refusal | None) -> None:
            if refusal is None and self.writer.dropping.wanted is wanted and self._generation == generation:
                self.writer.dropping.wanted = None

        self._tell(ask, heard)

    def see(self, shown: Shown) -> None:
        new, old = shown.view, self.shown.view if self.shown is not None else None
        if old is None or (new.generation, new.revision) > (old.generation, old.revision):
            self.shown = shown

    # -- what it does next ------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.later(self.kernel.between(0.05, 0.15), self._tick)
        if not self._joined:
            member = pb.Member(rank=self.rank, incarnation=self.name, pid=1, host=self.name)
            join = pb.JoinRequest(member=member, world_size=self.world.ranks)
            self._joined = self.say("join", m.Join(join))
            return
        if self.shown is None:
            return
        view = self.shown.view
        if self.name in self.shown.fenced:
            self.kernel.count("fenced process has seen it")
            self.alive = False
            return
        if view.generation != self._generation:
            self._generation = view.generation
            self._stage = 0
            self._recovering = False
            self._readers.clear()
            self._digests_wanted.clear()
            self._damaged.clear()
            self._to_say = None
        if self._refused_in == self._generation:
            self.say("refuse", pb.RefuseRequest(**self.sender, generation=self._generation, reason="refused"))
            return
        if view.state == coordinator_pb2.FORMING:
            self._form()
        elif view.state == coordinator_pb2.PLANNING:
            self._report()
        elif view.state == coordinator_pb2.RECOVERING:
            self._recover(view.plan)
        elif view.state == coordinator_pb2.RUNNING and self.version is not None:
            self._open_log()
            self._train(self.version)
        elif view.state in (coordinator_pb2.FINISHED, coordinator_pb2.FAILED, coordinator_pb2.STOPPED):
            self.alive = False

    def _refuse(self, why: str) -> None:
        self.kernel.count(f"refused: {why}")
        self.kernel.note("{} refuses in generation {}: {}", self.name, self._generation, why)
        self._refused_in = self._generation

    def _form(self) -> None:
        self.version, self.state = 0, first_state(self.rank)
        self._save_checkpoint()
        if self._say_saved(0):
            self._ready()

    def _ready(self) -> None:
        assert self.version is not None
        assert self.shown is not None
        self.world.checkers.ready(self.name, self.rank, self.version, self.shown.history, self.state)
        ready = pb.ReadyRequest(
            **self.sender,
            generation=self._generation,
            version=self.version,
            stages=(self.rank,),
            num_stages=self.world.ranks,
        )
        self.say("ready", ready)

    def _report(self) -> None:
        self._open_log()
        if self.writer.has_failed():
            # As a trainer whose flush raises: it ends, and its successor reports that it holds nothing.
            self.world.trainer_failed(self)
            return
        self.writer.declare_all()
        if not self.writer.backlog:
            self.say(
                "report",
                pb.ReportRequest(
                    **self.sender,
                    generation=self._generation,
                    has_state=self.version is not None,
                    version=self.version,
                ),
            )

    # -- training ---------------------------------------------------------------------------------------

    def _train(self, step: int) -> None:
        world = self.world
        assert self.shown is not None
        history = self.shown.history
        if self.writer.has_failed(may_drop=bool(self.writer.dropping.queue)):
            return
        if self._to_say is not None and self._say_saved(self._to_say):
            self._to_say = None
        if step == STEPS:
            self.writer.declare_all()
            if not self.writer.backlog:
                self.say("finish", pb.FinishRequest(**self.sender, version=step))
            return
        if not self.writer.dropping.queue and self.writer.backlog > BACKLOG_MAX:
            self.kernel.count("writer blocked by its queue")
            return
        if self._stage == 0:
            received = self._received("F", self.rank - 1, step) if self.rank else 0
            if received is None:
                return
            self._forward = received
            if self.rank + 1 < world.ranks:
                self._send("F", step, output(self.state, history, received))
            self._stage = 1
        elif self._stage == 1:
            received = self._received("B", self.rank + 1, step) if self.rank + 1 < world.ranks else 0
            if received is None:
                return
            self._backward = received
            if self.rank:
                self._send("B", step, output(self.state, -1 - history, received))
            self._stage = 2
        else:
            self._finish_step(step)

    def _finish_step(self, step: int) -> None:
        self.state = next_state(self.state, self._forward, self._backward)
        self.version = step + 1
        self._stage = 0
        assert self.shown is not None
        if self.writer.dropping.saves(self.shown.view, self.version) or self.version % CHECKPOINT_EVERY == 0:
            self._save_checkpoint()
        self.writer.dropping.after_step(step)

    def _save_checkpoint(self) -> None:
        assert self.version is not None
        self.world.checkers.saved(self.rank, self.version, self.state)
        saved = self.world.checkpoints.setdefault((self.rank, self.version), [])
        if (self._generation, self.state) not in saved:
            saved.append((self._generation, self.state))
        self._to_say = self.version

    def _say_saved(self, version: int) -> bool:
        durable = pb.CheckpointRequest(**self.sender, version=version, generation=self._generation)
        return self.say(f"checkpoint {version}", durable)

    def _received(self, kind: str, rank: int, step: int) -> int | None:
        return self.world.mail.get((self._generation, kind, rank, step))

    def _send(self, kind: str, step: int, value: int) -> None:
        self.world.mail[self._generation, kind, self.rank, step] = value
        self._log(kind, step, value)

    # -- its log ----------------------------------------------------------------------------------------

    def _open_log(self) -> None:
        assert self.shown is not None
        self.writer.open(self._generation, own_servers(self.shown.view, self.rank))

    def _log(self, kind: str, step: int, value: int, keep: bool = False) -> None:
        body = body_of(value, self.world.checkers.truth.repeats)
        self.writer.append(boundary(self.rank, kind), step, body, keep)

    # -- recovery ---------------------------------------------------------------------------------------

    def _recover(self, plan: coordinator_pb2.Plan) -> None:
        mine, target = plan.ranks[self.rank], plan.target_version
        self._open_log()
        if not self._recovering:
            if not self._begin_recovery(mine, plan):
                return
            self._recovering = True
        if self.version is None:
            raise Violation("plan", f"{self.name} holds nothing and is to {mine.strategy}")
        if self._digests_wanted:
            self._ask_digests(mine.from_version)
        elif self.version < target:
            self._replay_step(mine.from_version)
        elif not self.writer.has_failed() and (mine.from_version == target or not self.writer.backlog):
            self._readers.clear()
            self._ready()

    def _begin_recovery(self, mine: coordinator_pb2.RankPlan, plan: coordinator_pb2.Plan) -> bool:
        self.kernel.count(f"recovery: {coordinator_pb2.Strategy.Name(mine.strategy)}")
        self._stage = 0
        if mine.strategy in (coordinator_pb2.REPLAY, coordinator_pb2.CHECKPOINT):
            saved = self.world.checkpoints.get((self.rank, mine.from_version))
            if not saved:
                raise Violation("plan", f"{self.name} is to load a checkpoint that was never saved")
            self.version = None
            if self.kernel.chance(0.02):
                self._refuse(UNLOADABLE)
                return False
            self.version, self.state = mine.from_version, max(saved)[1]
        elif self.version != mine.from_version:
            raise Violation("plan", f"{self.name} is to go on from {mine.from_version}, holds {self.version}")
        if all(other.strategy == coordinator_pb2.CHECKPOINT for other in plan.ranks):
            self.writer.restart(self._generation)
        if mine.from_version < plan.target_version:
            self._check_gaps(mine, plan)
        if mine.strategy == coordinator_pb2.REPLAY:
            kinds = [
                k for k, there in (("F", self.rank + 1 < self.world.ranks), ("B", self.rank > 0)) if there
            ]
            self._digests_wanted = {
                (boundary(self.rank, kind), name) for kind in kinds for name in self.writer.servers
            }
            if self.careless and self.kernel.chance(0.5):
                self.kernel.count("careless: did not ask for digests")
                self._digests_wanted.clear()
        return True

    def _check_gaps(self, mine: coordinator_pb2.RankPlan, plan: coordinator_pb2.Plan) -> None:
        """What it is to read: its neighbours' streams up to where these are written again. And what it will write."""
        needed = [(self.rank, kind, plan.target_version) for kind in "FB"]
        for rank, kind in ((self.rank - 1, "F"), (self.rank + 1, "B")):
            if 0 <= rank < self.world.ranks:
                needed.append((rank, kind, min(plan.target_version, plan.ranks[rank].from_version)))
        sources = {entry.stream: entry.servers for entry in plan.sources}
        for rank, kind, until in needed:
            stream = boundary(rank, kind)
            for server in list(sources.get(stream, ()))[:1]:
                where = at(server, stream)
                self.world.checkers.replays(self.name, where, mine.from_version, until)
                if rank != self.rank:
                    self.world.checkers.reads(self.name, server, where, mine.from_version, until)

    def _ask_digests(self, from_step: int) -> None:
        for stream, name in sorted(self._digests_wanted):
            server = self.world.servers()[name]
            key = f"digests {stream} {name}"
            if server is None or self.kernel.now - self._said.get(key, -RESAY_S) < RESAY_S:
                continue
            self._said[key] = self.kernel.now
            self.network.send(
                self.name, server, self._serve_digests, server, stream, from_step, self._generation
            )

    def _serve_digests(self, server: ServerProcess, stream: str, from_step: int, generation: int) -> None:
        """(at the server)"""
        records, refusal = server.digests(stream, from_step)
        answer = (stream, server.name)
        self.network.send(server.name, self, self._take_digests, answer, generation, records, refusal)

    def _take_digests(
        self,
        answer: tuple[str, str],
        generation: int,
        records: list[log_pb2.RecordDigest],
        refusal: LogRefusal | None,
    ) -> None:
        if generation != self._generation or answer not in self._digests_wanted:
            return
        stream, server = answer
        if refusal is not None:
            self._damaged.add(answer)
        if all((stream, name) in self._damaged for name in self.writer.servers):
            assert refusal is not None
            self._refuse(f"digests: {refusal.reason}")
            return
        digests = {
            RecordKey(record.step, record.microbatch, record.slot): record.digest for record in records
        }
        self.writer.expect(stream, digests, server)
        self._digests_wanted.discard(answer)
        if not self._digests_wanted:
            for damaged, name in self._damaged:
                self.writer.writes_nothing_over(damaged, name)

    def _replay_step(self, from_step: int) -> None:
        """The step again: its inputs out of the log, what it sends compared or filled in."""
        assert self.version is not None
        assert self.shown is not None
        step, history = self.version, self.shown.history
        if self.writer.has_failed():
            return
        forward = self._logged("F", self.rank - 1, step, from_step) if self.rank else 0
        if forward is None:
            return
        if self._stage == 0:
            if self.rank + 1 < self.world.ranks:
                self._log("F", step, output(self.state, history, forward), keep=True)
            self._stage = 1
        last = self.rank + 1 == self.world.ranks
        backward = 0 if last else self._logged("B", self.rank + 1, step, from_step)
        if backward is None or self._refused_in == self._generation:
            return
        if self.rank:
            self._log("B", step, output(self.state, -1 - history, backward), keep=True)
        self.state = next_state(self.state, forward, backward)
        self.version = step + 1
        self._stage = 0
        self.kernel.count("step replayed")

    def _logged(self, kind: str, rank: int, step: int, from_step: int) -> int | None:
        stream = boundary(rank, kind)
        reader = self._readers.get(stream)
        if reader is None:
            assert self.shown is not None
            sources = next(e.servers for e in self.shown.view.plan.sources if e.stream == stream)
            reader = self._readers[stream] = _Reader(stream, list(sources), from_step, self.kernel.now)
        body = reader.records.get(step)
        if body is not None:
            assert self.shown is not None
            self.world.checkers.replayed(self.name, kind, rank, self.shown.history, step, body)
            reader.waits_since = self.kernel.now
            return int.from_bytes(body[:8], "little")
        if any(steps.first <= step <= steps.last for steps in reader.marks):
            self._refuse("a record was dropped")
        elif self.kernel.now - reader.waits_since > MISSING_S:
            self._refuse("a record is missing")
        elif self.kernel.now - reader.asked_at > RESAY_S:
            server = self.world.servers()[reader.copies[0]]
            if server is None and len(reader.copies) > 1:
                self._next_copy(reader, refused=False)
            elif server is not None:
                reader.asked_at = self.kernel.now
                reader.request += 1
                self.network.send(self.name, server, self._serve_read, server, reader, reader.request)
        return None

    def _next_copy(self, reader: _Reader, *, refused: bool) -> bool:
        """As `StreamCursor`. False: there is none."""
        left = reader.copies.pop(0)
        if not refused:
            reader.copies.append(left)
        reader.next_sequence = 0  # each server has its own
        self.kernel.count("replay goes on with another copy")
        return bool(reader.copies)

    def _serve_read(self, server: ServerProcess, reader: _Reader, request: int) -> None:
        """(at the server)"""
        messages, refusal = server.read(reader.stream, reader.from_step, reader.next_sequence)
        self.network.send(server.name, self, self._take_read, reader, request, messages, refusal)

    def _take_read(
        self, reader: _Reader, request: int, messages: list[bytes], refusal: LogRefusal | None
    ) -> None:
        if self._readers.get(reader.stream) is not reader or reader.request != request:
            return
        reader.asked_at = -RESAY_S
        for message in messages:
            frames = split_frames(message)
            assert frames is not None
            at = 0
            while at < len(frames):
                try:
                    header = decode_header(frames, at)
                    record = decode_record(header, frames[at + header.header_bytes : at + header.frame_bytes])
                except LogError:
                    self._refuse("a record came damaged")
                    return
                reader.next_sequence = record.sequence + 1
                steps = declared(record.key)
                if steps is None:
                    reader.records[record.key.step] = bytes(record.body)
                else:
                    reader.marks.append(steps)
                at += header.frame_bytes
        refused = refusal is not None and refusal.reason is not Reason.DRAINING
        if refused and (len(reader.copies) == 1 or not self._next_copy(reader, refused=True)):
            assert refusal is not None
            self._refuse(f"read: {refusal.reason}")
        reader.asked_at = self.kernel.now - RESAY_S + 0.2
