"""The members of a communicator and their coordinator, with every message between them in the test's hand.

A member here does what `swift_ft.train.communicator` does, without tensors: it votes, and votes again, until the View
shows the decision. A run is repeated by its seed. Checked in all of them: whoever is told of a decision is told the
same; nothing is shown before it is durable; a value agreed on comes from those who took part; and at the end all that
live have finished, whoever was lost, and wherever the coordinator was ended in between.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from swift_ft._pb import coordinator_pb2 as pb
from swift_ft_services.coordinator import commands as m
from swift_ft_services.coordinator.commands import Fenced, Refusal, Taken
from swift_ft_services.coordinator.communicators import CONFIG, CommunicatorJob, job_class
from swift_ft_services.coordinator.job import Job
from swift_ft_services.coordinator.job_record import LogServer, State
from swift_ft_services.coordinator.timeouts import Timing
from swift_ft_services.coordinator.views import view_of
from tests.unit.coordinator.driver_world import join
from tests.unit.coordinator.rows import read, write_changes

TIMING = Timing(heartbeat_s=1.0, lease_s=5.0, step_bound_s=20.0)
ROUNDS = 4
"""Agreements of a member's program before it leaves."""


@dataclass
class Member:
    """One process, which carries out `program`: each step of it ends where it waits."""

    rank: int
    incarnation: str
    value: int
    alive: bool = True
    done: bool = False
    program: Iterator[None] = field(init=False)


class World:
    """A job of `size` members. `seed` orders all that happens."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.now = 0.0
        self.job: Job | None = None
        self.stored: dict[str, str] = {}
        self.view: pb.View | None = None
        self.told: dict[tuple[int, int], bytes] = {}
        """(generation, number) -> the decision that the first member was told."""
        self.votes: dict[tuple[int, int], dict[int, int]] = {}
        self.built: dict[int, frozenset[int]] = {}
        self.unconnected: set[int] = set()
        """Generations in which a member could not connect."""
        self.messages = 0
        self.effects = 0
        self.kill_at: tuple[int, int] | None = None
        """(message, rank): the rank dies when that message has been taken."""
        self.crash_at: int | None = None
        """The coordinator ends before it carries out this effect."""
        self.spawned = 0
        self.members = [self.spawn(rank) for rank in range(size)]

    # --- processes ---

    def spawn(self, rank: int) -> Member:
        self.spawned += 1
        value = self.random.getrandbits(63) | 1
        member = Member(rank=rank, incarnation=f"{rank}.{self.spawned}", value=value)
        member.program = self.run_program(member)
        return member

    def kill(self, rank: int, *, replaced: bool) -> None:
        victim = next((member for member in self.members if member.rank == rank and member.alive), None)
        if victim is None or victim.done:
            return
        victim.alive = False
        exited = pb.ExitRequest(rank=rank, incarnation=victim.incarnation, pid=1, exit_code=-9)
        while not self.say(exited):
            pass  # a launcher says it until it is acknowledged
        if replaced:
            self.members.append(self.spawn(rank))

    def run_program(self, me: Member) -> Iterator[None]:
        """As a careful user writes it: every turn of what follows comes of what all have agreed on."""
        yield from self.join(me)
        generation = yield from self.enter(me, 0)
        rounds = 0
        number = 1
        while rounds < ROUNDS:
            seen = self.view
            assert seen is not None
            well = not seen.revoked and not seen.lost
            if not well and self.random.random() < 0.5:
                self.tell(me, pb.RevokeRequest(**self.sender(me), generation=generation, reason="lost"))
            decision = yield from self.decide(me, generation, number, pb.AGREE, me.value if well else 0)
            number += 1
            assert decision is not None
            if decision.failed or not decision.value:
                shrunk = yield from self.decide(me, generation, number, pb.SHRINK)
                assert shrunk is None
                generation, number = (yield from self.enter(me, generation)), 1
                continue
            rounds += 1
            grown = yield from self.decide(me, generation, number, pb.GROW)
            number += 1
            if grown is None:
                generation, number = (yield from self.enter(me, generation)), 1
                rounds = 0  # whoever is new begins at the beginning
        self.tell(me, pb.FinishRequest(**self.sender(me), version=0))
        while self.holder_of(me) is not None and me.rank not in self.row.finished:
            yield
            self.tell(me, pb.FinishRequest(**self.sender(me), version=0))
        me.done = True

    def join(self, me: Member) -> Iterator[None]:
        while self.holder_of(me) is None and not self.over():
            try:
                request = join(me.rank, me.incarnation, world_size=self.size, config={CONFIG: "1"})
                self.tell(me, m.Join(request))
            except Refusal as refusal:
                if not isinstance(refusal, Taken) and not self.over():
                    raise
            yield

    def enter(self, me: Member, generation: int) -> Iterator[None]:
        while True:
            while not (self.view is not None and self.view.generation > generation and self.takes_part(me)):
                if self.over():
                    raise Left
                yield
            assert self.view is not None
            generation = self.view.generation
            taking_part = frozenset(seat.slot for seat in self.view.taking_part)
            built = self.random.random() < 0.95
            if not built:
                self.unconnected.add(generation)
            elif generation in self.unconnected and self.random.random() < 0.5:
                while self.view.generation == generation and not self.over():
                    yield  # it waits for connections that the other has given up
                continue
            decision = yield from self.decide(me, generation, 0, pb.BUILT, int(built))
            if decision is not None and decision.value:
                assert self.built.setdefault(generation, taking_part) == taking_part
                return generation

    def decide(
        self, me: Member, generation: int, number: int, kind: "pb.VoteKind.ValueType", value: int = 0
    ) -> Iterator[None]:
        """As `Communicator._decide`: the decision, or None for another generation."""
        vote = pb.VoteRequest(**self.sender(me), generation=generation, number=number, kind=kind, value=value)
        self.votes.setdefault((generation, number), {})[me.rank] = value
        while True:
            self.tell(me, vote)
            yield
            view = self.view
            assert view is not None
            if self.over() and view.state != pb.RUNNING:
                raise Left
            if view.generation > generation:
                return None
            for decision in view.decisions:
                if decision.number == number:
                    said = decision.SerializeToString(deterministic=True)
                    assert self.told.setdefault((generation, number), said) == said, (
                        "two were told different things"
                    )
                    assert decision.kind != pb.MISMATCH
                    if decision.kind == pb.AGREE:
                        self.check_value(generation, number, decision.value)
                    return decision

    def check_value(self, generation: int, number: int, value: int) -> None:
        """It is the bits of all whose votes could count: of all that voted, or of all but those that were lost."""
        votes = self.votes[generation, number].values()
        whole = -1
        for one in votes:
            whole &= one
        assert value & whole == whole

    # --- the line ---

    def sender(self, me: Member) -> dict[str, Any]:
        return {"rank": me.rank, "incarnation": me.incarnation}

    def tell(self, me: Member, command: m.Command) -> None:
        """A message that may not arrive, or arrive twice."""
        self.messages += 1
        count = self.messages
        for _ in range(self.random.choice((0, 1, 1, 1, 2))):
            self.say(command)
        if self.kill_at is not None and count == self.kill_at[0]:
            self.kill(self.kill_at[1], replaced=self.random.random() < 0.7)

    def say(self, command: m.Command) -> bool:
        """False: the coordinator has ended before it acknowledged it."""
        self.now += 0.001
        if self.job is None:
            if not isinstance(command, m.Join):
                return True
            self.job = job_class(command.request.config).create("c", [], command, TIMING, self.now)
        sender = getattr(command, "sender", None)
        try:
            effects = self.job.step(command, self.now)
        except Refusal as refusal:
            if sender is not None and isinstance(refusal, Fenced):
                return True  # it hears that it is lost
            raise
        for effect in effects:
            self.effects += 1
            if self.crash_at == self.effects:
                self.restart()
                return False
            match effect:
                case m.Persist():
                    write_changes(self.job, self.stored)
                case m.PublishView():
                    assert read(self.stored) == self.job.row, "shown before it was durable"
                    self.view = view_of(self.job.row)
                case m.Emit():
                    pass
                case _:
                    raise AssertionError(f"{effect} is nothing for a communicator")
        return True

    def restart(self) -> None:
        """The coordinator's process ends; another one reads what is durable."""
        if not self.stored:
            self.job = None
            return
        self.job = CommunicatorJob(read(self.stored), TIMING, self.now, stored=True)
        self.view = view_of(self.job.row)
        assert self.job.resume() == []

    @property
    def row(self):
        assert self.job is not None
        return self.job.row

    def holder_of(self, me: Member):
        holder = None if self.job is None else self.row.holders.get(me.rank)
        return holder if holder is not None and holder.incarnation == me.incarnation else None

    def takes_part(self, me: Member) -> bool:
        assert self.view is not None
        ids = {member.rank: member.id for member in self.view.members if member.incarnation == me.incarnation}
        return any(ids.get(seat.slot) == seat.member for seat in self.view.taking_part)

    def over(self) -> bool:
        return self.job is not None and self.row.state.is_over

    # --- a whole run ---

    def run(self, deaths: int = 0, crashes: int = 0, steps: int = 6000) -> None:
        for _step in range(steps):
            able = [member for member in self.members if member.alive and not member.done]
            if not able or self.over():
                break
            if (
                self.job is not None and self.row.state is State.FORMING
            ):  # it waits for all, as its launcher knows
                here = {member.rank for member in able}
                self.members += [self.spawn(rank) for rank in range(self.size) if rank not in here]
            chosen = self.random.choice(able)
            try:
                next(chosen.program)
            except (StopIteration, Left):
                chosen.done = True
            if deaths and self.random.random() < 0.01:
                deaths -= 1
                self.kill(self.random.choice(able).rank, replaced=self.random.random() < 0.5)
            if crashes and self.random.random() < 0.01:
                crashes -= 1
                self.restart()
        else:
            raise AssertionError(f"no end: {self.row.state} {self.row.taking_part} {self.row.decisions}")
        if self.job is None or not any(member.alive for member in self.members):
            return
        left = [member for member in self.members if member.alive and not member.done]
        assert self.row.state is State.FINISHED or not left, (self.row.state, self.row.reason)


class Left(Exception):
    """The job is over without this process."""


@pytest.mark.parametrize("seed", range(150))
def test_members_come_to_one_answer_whoever_dies_and_whenever_the_coordinator_does(seed):
    world = World(2 + seed % 4, seed)

    world.run(deaths=seed % 5, crashes=seed % 3)


@pytest.mark.parametrize("victim", range(3))
def test_a_member_may_be_lost_after_every_message(victim):
    quiet = World(3, 7)
    quiet.run()
    assert quiet.row.state is State.FINISHED

    for message in range(1, quiet.messages + 1):
        world = World(3, 7)
        world.kill_at = (message, victim)
        world.run()


def test_the_coordinator_may_be_ended_before_every_effect():
    quiet = World(3, 11)
    quiet.kill_at = (40, 1)
    quiet.run()

    for effect in range(1, quiet.effects + 1):
        world = World(3, 11)
        world.kill_at, world.crash_at = (40, 1), effect
        world.run()


def test_a_job_whose_members_all_leave_before_their_groups_are_built_again_is_finished():
    job = CommunicatorJob.create("j", [], joined(0), TIMING, 0.0)
    for rank in range(3):
        job.step(joined(rank), 0.0)
    for rank in range(3):
        job.step(pb.VoteRequest(**said(rank), generation=1, kind=pb.BUILT, value=1), 0.0)
    job.step(pb.ExitRequest(**said(2), pid=1, exit_code=-9), 0.0)
    for rank in range(2):
        job.step(pb.VoteRequest(**said(rank), generation=1, number=1, kind=pb.SHRINK), 0.0)
    assert job.row.state is State.RECOVERING

    job.step(pb.FinishRequest(**said(0)), 0.0)
    assert job.row.state is State.RECOVERING, "the other one may build a group of itself"
    job.step(pb.FinishRequest(**said(1)), 0.0)

    assert job.row.state is State.FINISHED


def said(rank: int) -> dict[str, Any]:
    return {"rank": rank, "incarnation": str(rank)}


def joined(rank: int) -> m.Join:
    return m.Join(join(rank, str(rank), world_size=3, config={CONFIG: "1"}, run="r"))


def test_a_job_without_a_log_gets_no_log_servers_when_it_is_started_again_by_another_coordinator():
    world = World(1, 0)
    world.run()
    job = CommunicatorJob(read(world.stored), TIMING, world.now, [LogServer(address="l0")], stored=True)

    again = pb.JoinRequest(
        job="j",
        world_size=1,
        config=world.row.config,
        run="another",
        member=pb.Member(rank=0, incarnation="new", pid=2, host="h"),
    )
    job.step(m.Join(again), world.now)

    assert (job.row.state, job.row.log_servers) == (State.FORMING, [])
