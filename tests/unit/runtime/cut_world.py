"""Replicas in threads, of which some die in the reduction of a step: real updates, reducer, agreement and planner.

What is played is the network and the coordinator. A collective of a generation is complete once all its members have
given their part; who gets its result before the notice is the script's.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from swift_ft.comm.worker_thread import Task
from swift_ft.planner import Assignment, PlanConfig, Report, plan
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.train.config import SessionConfig
from swift_ft.train.lossy import CutStep, World
from swift_ft.train.reducer import Reducer
from tests.unit.runtime.wired import updates_of

LAYERS, WIDTH = 5, 3
PATIENCE_S = 30.0
NEVER = 1 << 20


class Lost(RuntimeError):
    """A connection of a generation that is over."""


class Dead(BaseException):
    """The rank is killed here."""


class Dropped(Exception):
    """The plan drops the step."""


@dataclass(frozen=True)
class Script:
    """Of one generation, in numbers of collectives: `LAYERS` reductions and the vote, if nothing was cut before."""

    victim: int | None = None
    dies_at: int = NEVER
    """It has taken part in so many."""
    gets: dict[int, int] = field(default_factory=dict)
    """Rank -> so many results reach it before the notice."""
    idle: frozenset[int] = frozenset()
    """These are between two steps when the victim dies, at version `idle_at`."""
    idle_at: int = 0


class Generation:
    """One network. Every member's collectives are counted."""

    def __init__(self, number: int, members: Sequence[int], script: Script) -> None:
        self.number, self.members, self.script = number, tuple(members), script
        self._parts: dict[int, dict[int, Any]] = {}
        self._calls = dict.fromkeys(members, 0)
        self._over = False
        self._stopped: set[int] = set()
        self._changed = threading.Condition()

    def exchange(self, rank: int, part: Any) -> dict[int, Any]:
        """Of all members, once each has given its part. Raises Lost, Dead."""
        with self._changed:
            number = self._calls[rank]
            self._calls[rank] += 1
            if rank == self.script.victim and number >= self.script.dies_at:
                self.end()
                raise Dead
            if not self._over or number >= self.script.gets.get(rank, NEVER):
                self._parts.setdefault(number, {})[rank] = part
                self._changed.notify_all()
            if number >= self.script.gets.get(rank, NEVER):
                raise Lost("Connection closed by peer")
            dies = rank == self.script.victim
            assert self._changed.wait_for(
                lambda: self._whole(number) or self._over or (dies and self._in_vain(number)), PATIENCE_S
            ), "a collective hangs"
            if self._whole(number):
                return self._parts[number]
            self.end()
            raise Dead if dies else Lost("Connection closed by peer")

    def _whole(self, number: int) -> bool:
        return len(self._parts.get(number, {})) == len(self.members)

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _in_vain(self, number: int) -> bool:
        return not self._stopped.isdisjoint(set(self.members) - set(self._parts.get(number, {})))

    def await_end(self, rank: int) -> None:
        """It takes part in nothing more."""
        with self._changed:
            self._stopped.add(rank)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._over, PATIENCE_S), "nobody dies"

    @property
    def over(self) -> bool:
        return self._over


class Collectives:
    """Of one member in one generation. Sums are in the order of ranks."""

    def __init__(self, generation: Generation, rank: int) -> None:
        self._generation, self._rank = generation, rank

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = self._generation.exchange(self._rank, tensor.clone())
        return [parts[member] for member in self._generation.members]

    def unordered_sum(self, tensor: torch.Tensor) -> None:
        first, *others = self._all(tensor)
        total = first.clone()
        for other in others:
            total.add_(other)
        tensor.copy_(total)

    def all_reduce(self, tensor: torch.Tensor, add: Any) -> None:
        self.unordered_sum(tensor)

    def all_gather(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        for part, given in zip(parts, self._all(own), strict=True):
            part.copy_(given)

    def broadcast(self, tensor: torch.Tensor, place: int) -> None:
        tensor.copy_(self._all(tensor)[place])


class Group:
    """As `ReconfigurableGroup`, for what a reducer asks of it."""

    def __init__(self, job: "Job", rank: int) -> None:
        self._job, self._rank = job, rank

    def submit(self, run: Callable[[Any], None]) -> Task:
        collectives = Collectives(self._job.generation, self._rank)
        task = Task(lambda: run(collectives))
        task.carry_out()
        return task

    def run(self, run: Callable[[Any], None]) -> None:
        self.submit(run).wait()

    def gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in self._job.generation.members]
        self.run(lambda collectives: collectives.all_gather(parts, tensor))
        return parts


class Job:
    """All ranks, and the coordinator that they report to."""

    def __init__(self, ranks: int, scripts: Sequence[Script], *, wait_free: bool, steps: int) -> None:
        self.full = Assignment.grid(ranks, replicas=ranks)
        self.scripts, self.steps = list(scripts), steps
        self.generation = Generation(1, range(ranks), self._script(1))
        self.plans: list[Any] = []
        self.told: dict[int, dict[int, Any]] = {}
        """Step -> rank -> its buckets."""
        self._reports: dict[int, Report] = {}
        self._lock = threading.Condition()
        self._errors: list[BaseException] = []
        updates = "wait_free" if wait_free else "after_backward"
        config = SessionConfig(
            replicas=ranks, bucket_bytes=1, updates=updates, strategy="lossy-forward", allow_inexact=True
        )
        self.ranks = [Rank(self, rank, config) for rank in range(ranks)]

    def _script(self, number: int) -> Script:
        return self.scripts[number - 1] if number <= len(self.scripts) else Script()

    def assignment(self) -> Assignment:
        return self.full.held_by({rank: rank for rank in self.generation.members})

    def run(self) -> list["Rank"]:
        """Those that are left."""
        threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), self._errors or "a rank hangs"
        if self._errors:
            raise self._errors[0]
        return [rank for rank in self.ranks if not rank.dead]

    def _live(self, rank: "Rank") -> None:
        try:
            rank.live()
        except Dead:
            rank.dead = True
        except BaseException as error:
            self._errors.append(error)
            self.generation.end()
            raise

    def recover(self, report: Report) -> Any:
        """(a rank that is left) Its part of the plan, and the plan, once all have reported."""
        self.generation.await_end(report.rank)
        with self._lock:
            old = self.generation
            left = [member for member in old.members if member != old.script.victim]
            self._reports[report.rank] = report
            if set(self._reports) == set(left):
                reports, self._reports = list(self._reports.values()), {}
                assignment = self.full.held_by({member: member for member in left})
                chosen, reason = plan(reports, assignment, {}, (), PlanConfig(strategy="lossy-forward"))
                assert chosen is not None, reason
                self.plans.append(chosen)
                self.generation = Generation(old.number + 1, left, self._script(old.number + 1))
                self._lock.notify_all()
            assert self._lock.wait_for(lambda: self.generation is not old, PATIENCE_S), "no plan"
            return self.plans[-1]


class Rank:
    """One replica: a model, an optimizer, and the engine's loop as far as steps and losses go."""

    def __init__(self, job: Job, number: int, config: SessionConfig) -> None:
        torch.manual_seed(3)
        self.job, self.number, self.version, self.dead = job, number, 0, False
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        nothing = cast(Any, None)
        reducer = Reducer(
            cast(Any, Group(job, number)),
            lambda: job.assignment().contributions(0),
            ordered=True,
            shares=lambda: nothing,
        )
        self.cut_step = CutStep(True, number, reducer, self._world)
        self.cut_step.held_over = self._held_over
        self.updates = updates_of(config, reducer, cut_step=self.cut_step, vote=self._vote)
        self.unit = WholeModule(self.model)
        if self.updates.wait_free:
            self.updates.awaited.add(self.unit)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.updates.add(self.optimizer)

    def _world(self) -> World:
        return World.of(self.job.generation.number, self.job.assignment(), self.number)

    def live(self) -> None:
        while self.version < self.job.steps:
            generation = self.job.generation
            if self.number in generation.script.idle and self.version == generation.script.idle_at:
                generation.await_end(self.number)
            if generation.over:
                self._follow(self.job.recover(self._report()))
                continue
            try:
                self._step()
            except Dropped:
                self._follow(self.job.plans[-1])
        while self.job.generation.script.victim is not None:  # others may still be cut
            self.job.generation.await_end(self.number)
            self._follow(self.job.recover(self._report()))

    def _step(self) -> None:
        step = self.version
        self.updates.begin_step(step)
        self.optimizer.zero_grad()
        loss_of(self.model, step, self.number).backward()
        self.optimizer.step()
        self.updates.end_step()
        self.version += 1
        self.updates.begin_step(self.version)

    def _report(self) -> Report:
        standing = self.updates.standing(self.version)
        return Report(
            rank=self.number,
            version=standing.version,
            undo_to=standing.undo_to,
            undo_exact=standing.undo_exact,
            forward_to=standing.forward_to,
            finish_to=standing.finish_to,
        )

    def _held_over(self, error: Exception) -> bool:
        if not isinstance(error, Lost):
            raise error
        chosen = self.job.recover(self._report())
        if not chosen.of(self.number).policy.finishes_step:
            raise Dropped
        return any(each.policy.together for each in chosen.ranks)

    def _follow(self, chosen: Any) -> None:
        mine = chosen.of(self.number)
        self.updates.voting = False
        if mine.strategy == "UNDO":
            self.updates.undo()
        elif mine.strategy == "REPLICA":
            raise AssertionError("nobody's state is copied here")
        else:
            assert mine.strategy == "KEEP", mine
            assert self.version == mine.from_version
        self.updates.begin_step(self.version)

    def _vote(self) -> None:
        self.updates.voting = True
        self.job.generation.exchange(self.number, None)

    def bits(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def loss_of(model: nn.Module, step: int, origin: int) -> torch.Tensor:
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + origin))
    return cast(torch.Tensor, model(batch)).square().sum()
