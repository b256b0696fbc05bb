"""Plans for the loss that may come next, made before it comes.

To put a step in an order takes milliseconds in a small job and seconds in a large one (docs/adaptive.md), and after a
loss all would wait for it. So each rank makes one plan while it trains, in a thread of its own: for the loss of the
rank that follows it. Together they have one for every loss. After a loss whoever has the plan sends it to all.

    (trainer's thread)  ``begin`` of a generation → ``agree`` if it lacks ranks → ``prepare`` → ``routes`` in each call;
                        ``go_on`` before each step

The thread takes turns with the trainer's own: while it plans, Python code of the trainer takes longer. So it plans
seldom (`transfers.measures`), and not again for what takes about as long as before.

Two ranks that are lost at once, or the loss of a rank whose plan is lost with it, are planned for when it happens.
"""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
import xxhash

from swift import events
from swift.recovery import Assignment
from swift.recovery.adaptive import Action
from swift.recovery.adaptive.work import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from swift.runtime.backends.base import Collectives
from swift.runtime.groups import ReconfigurableGroup
from swift.runtime.routes import Call, Orders, Routes, Seconds, plan, planned

KEPT = 8
"""Plans that a rank keeps, at most. It makes one for each schedule of the trainer and each loss."""
_KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


class PlansAhead:
    """One rank's."""

    def __init__(self, slot: int, world: ReconfigurableGroup) -> None:
        self._slot = slot
        self._world = world
        self._kept: dict[Call, tuple[Seconds | None, Orders]] = {}
        """That this rank has, the newest last; it may be alone with one. None: another one has made it."""
        self._agreed: dict[Call, Orders] = {}
        """That all ranks of this generation have."""
        self._made: SimpleQueue[tuple[Call, Seconds, Orders]] = SimpleQueue()
        """By the thread."""
        self._thread: threading.Thread | None = None
        self._due: tuple[Assignment, Callable[[Assignment], Sequence[Call]], Seconds] | None = None
        """What the thread is to be begun for, once it has done something else."""

    def begin(self) -> None:
        """Another generation does: whatever its ranks have agreed on before, a process that is new has not."""
        self._agreed, self._due = {}, None

    def prepare(
        self, assignment: Assignment, calls: Callable[[Assignment], Sequence[Call]], seconds: Seconds
    ) -> None:
        """Plans for the loss of the rank that follows, from here on or later (`go_on`). `calls`: of the trainer's
        schedules, in a world."""
        self._due = assignment, calls, seconds
        self.go_on()

    def go_on(self) -> None:
        """(before a step) Begins what is due."""
        if self._due is None or (self._thread is not None and self._thread.is_alive()):
            return
        (assignment, calls, seconds), self._due = self._due, None
        self._take_made()
        lost = next_lost(assignment, self._slot)
        if lost is None:
            return
        members = {slot: member for slot, member in assignment.members.items() if slot != lost}
        of_loss = calls(assignment.held_by(members).rerouted())
        wanted = [call for call in of_loss if not self._has(call, seconds)]
        if wanted:
            self._thread = threading.Thread(
                target=self._plan, args=(lost, wanted, seconds), name="swift-plans-ahead", daemon=True
            )
            self._thread.start()

    def agree(self, calls: Sequence[Call]) -> bool:
        """(all ranks, with the same calls) Everybody gets what somebody has. Whether that is all of them."""
        self._take_made()
        calls = calls[:KEPT]
        mine = {call: packed(self._kept[call][1]) for call in calls if call in self._kept}
        own = torch.zeros(KEPT, 2, dtype=torch.int64)  # of one size, whatever a rank knows of
        for row, call in enumerate(calls):
            own[row, 0] = _digest(call)
            own[row, 1] = len(mine[call]) if call in mine else 0
        told = self._world.gathered(own)
        for row, call in enumerate(calls):
            place = next((place for place, rows in enumerate(told) if rows[row, 1]), None)
            if place is None or any(rows[row, 0] != own[row, 0] for rows in told):
                continue
            numbers = mine.get(call)
            if numbers is None or len(numbers) != told[place][row, 1]:
                numbers = torch.empty(int(told[place][row, 1]), dtype=torch.int32)
            self._world.run(partial(_broadcast, numbers, place))
            self._agreed[call] = unpacked(numbers)
            if call not in mine:
                self._keep(call, None, self._agreed[call])
        return len(self._agreed) == len(set(calls))

    def routes(self, call: Call, seconds: Seconds) -> Routes:
        """By the plan that all have agreed on, or else by one that is made now."""
        orders = self._agreed.get(call)
        return plan(call, seconds) if orders is None else Routes(call.work(seconds), orders)

    # --- ---

    def _plan(self, lost: int, calls: Sequence[Call], seconds: Seconds) -> None:
        """(a thread)"""
        for call in calls:
            began = time.thread_time()
            self._made.put((call, seconds, planned(call, seconds).orders))
            events.emit("planned_ahead", rank=self._slot, lost=lost, cpu_s=time.thread_time() - began)

    def _take_made(self) -> None:
        while not self._made.empty():
            self._keep(*self._made.get())

    def _has(self, call: Call, seconds: Seconds) -> bool:
        made = self._kept[call][0] if call in self._kept else None
        return made is not None and alike(made, seconds)

    def _keep(self, call: Call, seconds: Seconds | None, orders: Orders) -> None:
        self._kept.pop(call, None)
        self._kept[call] = seconds, orders
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]


def next_lost(assignment: Assignment, slot: int) -> int | None:
    """The rank whose loss this one plans for: the next one that has a peer. None: there is none."""
    there = assignment.occupied
    behind = there[there.index(slot) + 1 :] + there[: there.index(slot)]
    return next((other for other in behind if len(assignment.group(other)) > 1), None)


def alike(one: Seconds, other: Seconds) -> bool:
    """Nothing takes a fifth of a forward more or less than there: a plan by the one is as good by the other."""
    pairs = zip([*_flat(one), one.transfer], [*_flat(other), other.transfer], strict=True)
    return all(abs(before - now) <= 0.2 for before, now in pairs)


def _flat(seconds: Seconds) -> list[float]:
    return [part for stage in seconds.stages for part in stage]


def packed(orders: Orders) -> torch.Tensor:
    """As whole numbers: for each slot its number, that of its actions, and four for each action."""
    numbers: list[int] = []
    for slot, actions in orders.items():
        numbers += (slot, len(actions))
        for kind, stage, origin, microbatch in actions:
            numbers += (_KINDS.index(kind), stage, origin, microbatch)
    return torch.tensor(numbers, dtype=torch.int32)


def unpacked(numbers: torch.Tensor) -> Orders:
    """What `packed` was given."""
    orders: dict[int, tuple[Action, ...]] = {}
    rest = iter(numbers.tolist())
    for slot in rest:
        count = next(rest)
        orders[slot] = tuple(
            Action(_KINDS[next(rest)], next(rest), next(rest), next(rest)) for _ in range(count)
        )
    return orders


def _broadcast(numbers: torch.Tensor, root: int, collectives: Collectives) -> None:
    collectives.broadcast(numbers, root)


def _digest(call: Call) -> int:
    """Equal calls, at all ranks, have equal ones."""
    return xxhash.xxh3_64_intdigest(repr(tuple(call)).encode()) >> 1
