"""Orders the actions of a step: a list scheduler, run with several rules; the shortest step wins.

A free worker chooses, among the actions that it could begin now: a backward first, because others wait for it and it
frees activations; then a forward, if it may hold more activations; then gradients of weights, for which no worker
waits. Without failures and with 1F1B's activations this is 1F1B.

It always terminates. A worker of several stages begins a forward only if there is room left for one microbatch at each
later stage of its own that holds none (a *lane* is a worker's stage). Suppose that no worker can proceed. Take the last
stage at which any activation is held. At the pipeline's last stage its backward waits for no other. At another one its
forward at the next stage has not begun, so that stage's worker has no room; but its room reserved for later stages is
free.

A step may have a million actions. So the loop represents them as integers: the work for one microbatch at one stage is
a *cell*, ``(stage * origins + origin) * microbatches + microbatch``, and an event is a cell and a code.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

from swift_ft.planner.assignment import Assignment

# One step of all data-parallel ranks, before it is ordered.
#
# A *worker* is a rank, by its slot's number. It runs the stages of its stage group, for the microbatches of its own
# *origin* (its data-parallel rank's batch) and for those that it has adopted. Times are in any one unit.

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""A forward; a whole backward; the two parts of a split one, for inputs and for weights."""


class Action(NamedTuple):
    """One indivisible piece of a worker's work."""

    kind: str
    stage: int
    origin: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}@{self.origin}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Time of each part for one microbatch, by stage; one number stands for all stages."""

    forward: Sequence[float] = (1.0,)
    backward_input: Sequence[float] = (1.0,)
    backward_weight: Sequence[float] = (1.0,)
    transfer: float = 0.0
    """Time of a transfer between two stages on different workers, which compute meanwhile."""

    def of(self, kind: str, stage: int) -> float:
        if kind == FORWARD:
            return self.forward[stage % len(self.forward)]
        inputs = self.backward_input[stage % len(self.backward_input)]
        weights = self.backward_weight[stage % len(self.backward_weight)]
        return {BACKWARD: inputs + weights, BACKWARD_INPUT: inputs, BACKWARD_WEIGHT: weights}[kind]


Owners = Mapping[tuple[int, int], Sequence[int]]
"""(stage, origin) -> the worker that computes each of its microbatches, in their order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of one step. Raises ValueError if it cannot be done."""

    stages: int
    origins: int
    microbatches: int
    """Microbatches of each origin."""
    owners: Owners
    """An entry for every stage and origin."""
    split: bool = False
    """Backwards are split: gradients of weights may be computed later."""
    costs: Costs = Costs()
    cap: Mapping[int, int] | None = None
    """Worker -> how many microbatches' activations it may hold at a time, over all its stages. None: any number."""

    def __post_init__(self) -> None:
        costs = self.costs
        parts = (*costs.forward, *costs.backward_input, *costs.backward_weight, costs.transfer)
        if not all(0 <= part < math.inf for part in parts):
            raise ValueError("what a part of a step takes is a number of at least 0")
        if min(self.stages, self.origins, self.microbatches) < 1:
            raise ValueError("a step has at least one stage, one origin and one microbatch")
        for stage in range(self.stages):
            for origin in range(self.origins):
                if len(self.owners.get((stage, origin), ())) != self.microbatches:
                    raise ValueError(
                        f"stage {stage} of origin {origin} has not one owner for each microbatch"
                    )
        if self.cap is not None and any(
            self.cap.get(worker, 0) < len(stages) for worker, stages in self.stages_of().items()
        ):
            raise ValueError(
                "a worker must be able to hold the activations of one microbatch at each of its stages"
            )

    def stages_of(self) -> dict[int, tuple[int, ...]]:
        """Returns worker -> the stages of which it computes any part, ascending; workers ascending."""
        found: dict[int, set[int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker in owners:
                found.setdefault(worker, set()).add(stage)
        return {worker: tuple(sorted(found[worker])) for worker in sorted(found)}

    def kinds(self) -> tuple[str, ...]:
        """The actions for each microbatch at each stage, in this order."""
        return (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)

    def adds(self) -> str:
        """The kind of action that adds to gradients of weights."""
        return BACKWARD_WEIGHT if self.split else BACKWARD

    def actions(self) -> Iterator[tuple[int, Action]]:
        kinds = self.kinds()
        for (stage, origin), owners in self.owners.items():
            for microbatch, worker in enumerate(owners):
                for kind in kinds:
                    yield worker, Action(kind, stage, origin, microbatch)

    def bound(self) -> float:
        """Returns a lower bound of the length of any order. Each worker waits for its first microbatch and computes all
        of its own, and the last one has to go back to the first stage. Its cap limits its activations: if each is held
        for L at least, n of them take n * L / cap."""
        head, tail, _ = self._ways()
        longest = head[-1] + self.costs.of(FORWARD, self.stages - 1)
        longest += self.costs.of(self.kinds()[1], self.stages - 1) + tail[-1]
        for first, busy, weights, span in self._loads():
            longest = max(longest, head[first] + busy - weights + tail[first], head[first] + busy)
            longest = max(longest, head[first] + span + (0.0 if self.split else tail[first]))
        return longest

    def period_bound(self) -> float:
        """Returns a lower bound of the time from one step to the next, if they may overlap, so that a worker waits for
        no other."""
        return max(max(busy, span) for _, busy, _, span in self._loads())

    def _loads(self) -> Iterator[tuple[int, float, float, float]]:
        """Yields, for each worker: its first stage; its computing time, and how much of that is for gradients of
        weights alone; and how long its activations need room (0: no cap)."""
        held = self._ways()[2]
        for worker, counts in self.counts().items():
            load = [
                sum(n * self.costs.of(kind, stage) for stage, n in counts.items()) for kind in self.kinds()
            ]
            span = 0.0
            if self.cap is not None:
                span = sum(n * held[stage] for stage, n in counts.items()) / self.cap[worker]
            yield min(counts), sum(load), load[-1] if self.split else 0.0, span

    def counts(self) -> dict[int, dict[int, int]]:
        """Returns worker -> stage -> the number of microbatches that it computes there."""
        found: dict[int, dict[int, int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker, count in Counter(owners).items():
                of = found.setdefault(worker, {})
                of[stage] = of.get(stage, 0) + count
        return found

    def _ways(self) -> tuple[list[float], list[float], list[float]]:
        """Returns lower bounds by stage: until the first forward can begin; from the end of a backward (of its part for
        inputs) to the end of the step; and for how long an activation is held."""
        costs, backward = self.costs, self.kinds()[1]
        crosses = [0.0]  # into each stage
        for stage in range(1, self.stages):
            stays = any(
                before == behind
                for origin in range(self.origins)
                for before, behind in zip(
                    self.owners[stage - 1, origin], self.owners[stage, origin], strict=True
                )
            )
            crosses.append(0.0 if stays else costs.transfer)
        head, tail = [0.0], [costs.of(BACKWARD_WEIGHT, 0) if self.split else 0.0]
        for stage in range(1, self.stages):
            head.append(head[-1] + costs.of(FORWARD, stage - 1) + crosses[stage])
            tail.append(tail[-1] + costs.of(backward, stage - 1) + crosses[stage])
        held, through = [0.0] * self.stages, 0.0
        for stage in reversed(range(self.stages)):
            through += costs.of(FORWARD, stage) + costs.of(backward, stage)
            held[stage] = through + (costs.of(BACKWARD_WEIGHT, stage) if self.split else 0.0)
            through += 2 * crosses[stage]
        return head, tail, held


def owners_of(assignment: Assignment, microbatches: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the owners of the microbatches of each origin, by (stage, origin)."""
    owners = {}
    for stage in range(assignment.num_stages):
        for origin in range(assignment.dp_size):
            found = (assignment.owner(stage, origin, mb) for mb in range(microbatches))
            owners[stage, origin] = tuple(owner for owner in found if owner is not None)
    return owners


# A step that has been ordered.


class Timed(NamedTuple):
    """An action with its times."""

    begin: float
    end: float
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The timed actions of all workers. The times follow from the costs; a run uses only the order."""

    slots: Mapping[int, Sequence[Timed]]
    """Each worker's actions, in its order."""

    @property
    def length(self) -> float:
        """The time from the first begin to the last end."""
        return max((slots[-1].end for slots in self.slots.values() if slots), default=0.0)

    def orders(self) -> dict[int, tuple[Action, ...]]:
        """Returns each worker's actions in order. Executed in these orders, the step completes whatever each part
        takes: each action waits only for actions that began earlier here."""
        return {worker: tuple(slot.action for slot in slots) for worker, slots in self.slots.items()}


_SLACK = 1e-9


def needs(work: Work, action: Action) -> list[Action]:
    """Returns the actions that must end before this one begins."""
    kind, stage, origin, microbatch = action
    backward = BACKWARD_INPUT if work.split else BACKWARD
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, origin, microbatch)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, stage, origin, microbatch)]
    own = [Action(FORWARD, stage, origin, microbatch)]
    return own + ([Action(backward, stage + 1, origin, microbatch)] if stage + 1 < work.stages else [])


ACTIONS_MAX = 200_000
"""Limit of the actions in all runs of one plan, which bounds its time. The first rule always runs."""

_FORWARD, _BACKWARD, _WEIGHT, _FORWARD_COMES, _BACKWARD_COMES = range(5)
"""Codes of events: three ends, two arrivals from another worker. A backward is a whole one or the part for inputs."""
_SHIFT = 3
_CODES, _MASK = 1 << _SHIFT, (1 << _SHIFT) - 1


class _Rule(NamedTuple):
    """A worker's preferences among the actions that it may begin."""

    sooner: int
    """Half microbatches by which adopted microbatches are preferred."""
    patience: float
    """Gradients of weights are delayed if a backward comes within this fraction of their own time."""
    shuffle: int = 0
    """Nonzero: the seed of another order in which origins take turns. 0: microbatch by microbatch."""


_SOONER_MAX = 15
_RULES = (
    *(_Rule(sooner, patience) for sooner in (0, 3, -3, 7, -7, _SOONER_MAX) for patience in (0.0, 0.5)),
    *(_Rule(0, patience, shuffle) for shuffle in range(1, 9) for patience in (0.0, 0.5)),
)


def plan_step(work: Work, *, thorough: bool = True, actions_max: int = ACTIONS_MAX) -> Step:
    """Returns the shortest step that the rules find; deterministic for the same work. `thorough`: tries as many rules
    as `actions_max` permits, until a step is as short as the bound; else only the first."""
    scheduler = _Scheduler(work)
    least = work.bound() + _SLACK
    best: _Found | None = None
    for rule in scheduler.rules(actions_max if thorough else 0):
        found = scheduler.run(rule)
        if best is None or found.length() < best.length() - _SLACK:  # the first of equals
            best = found
        if best.length() <= least:
            break
    assert best is not None
    return scheduler.step(best)


def found_steps(work: Work) -> Iterator[Step]:
    """Yields the step of each rule, whatever its length; as many rules as `ACTIONS_MAX` permits."""
    scheduler = _Scheduler(work)
    for rule in scheduler.rules(ACTIONS_MAX):
        yield scheduler.step(scheduler.run(rule))


class _Found(NamedTuple):
    begins: list[list[float]]
    """By the worker's index, in its order."""
    ends: list[list[float]]
    order: list[list[int]]
    """Events that end its actions."""

    def length(self) -> float:
        return max((row[-1] for row in self.ends if row), default=0.0)


class _Scheduler:
    """Simulates a work, stored as lists of numbers, with the times of its costs."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._across = work.origins * work.microbatches
        """Cells of one stage."""
        self._workers = list(work.stages_of())
        index = {worker: n for n, worker in enumerate(self._workers)}
        self._owner: list[int] = []
        for stage in range(work.stages):
            for origin in range(work.origins):
                self._owner += [index[worker] for worker in work.owners[stage, origin]]
        kinds = work.kinds()
        self._takes = [
            [work.costs.of(kind, stage) for stage in range(work.stages) for _ in range(self._across)]
            for kind in kinds
        ]
        cap = work.cap
        self._lanes, self._lane = self._lanes_of(index)
        self._room = [len(self._owner) if cap is None else cap[worker] for worker in self._workers]
        self._adopted = self._what_is_adopted()

    def rules(self, actions_max: int) -> list[_Rule]:
        """Returns the rules that may differ for this work, as many as `actions_max` permits."""
        rules = [rule for rule in _RULES if self._work.split or not rule.patience]
        return rules[: max(1, actions_max // (len(self._owner) * len(self._takes)))]

    def _lanes_of(self, index: dict[int, int]) -> tuple[list[list[int]], list[int]]:
        """Returns, by worker, its lanes, the last stage's first; and, by cell, its lane."""
        number: dict[tuple[int, int], int] = {}
        lanes: list[list[int]] = []
        for worker, stages in self._work.stages_of().items():
            lanes.append([len(number) + n for n in range(len(stages))])
            for stage in reversed(stages):
                number[index[worker], stage] = len(number)
        return lanes, [number[owner, cell // self._across] for cell, owner in enumerate(self._owner)]

    def _what_is_adopted(self) -> list[bool]:
        """Returns, by cell, whether its worker computes more of another origin at this stage, or as much of an earlier
        one."""
        work, adopted = self._work, []
        for stage in range(work.stages):
            home: dict[int, tuple[int, int]] = {}
            for origin in range(work.origins):
                owners = work.owners[stage, origin]
                for worker in set(owners):
                    count = owners.count(worker)
                    if worker not in home or count > home[worker][0]:
                        home[worker] = count, origin
            for origin in range(work.origins):
                adopted += [home[worker][1] != origin for worker in work.owners[stage, origin]]
        return adopted

    def _turns(self, shuffle: int) -> list[list[int]]:
        """Returns, by origin and microbatch, its turn in half microbatches. Turns of one origin ascend."""
        work, state = self._work, shuffle
        most = 4 if shuffle % 2 else 8
        turns = []
        for _ in range(work.origins):
            row = [_SOONER_MAX]
            for _ in range(work.microbatches):
                state = (state * 1103515245 + 12345) % 2**31  # the C standard's example
                row.append(row[-1] + ((state >> 16) % (most + 1) if shuffle else 2))
            turns.append(row[1:])
        return turns

    def _keys(self, rule: _Rule) -> list[int]:
        """Returns, by cell, its key in a heap; the cell is the key modulo the number of cells."""
        work, keys, cell = self._work, [], 0
        cells, turns = len(self._owner), self._turns(rule.shuffle)
        for stage in range(work.stages):
            # Among a worker's several stages: forwards of later ones first, as in interleaved schedules.
            behind = work.stages - 1 - stage
            for origin in range(work.origins):
                for turn in turns[origin]:
                    at = turn - rule.sooner if self._adopted[cell] else turn
                    keys.append(((at * work.origins + origin) * work.stages + behind) * cells + cell)
                    cell += 1
        return keys

    def step(self, found: _Found) -> Step:
        work = self._work
        kinds = work.kinds()
        slots: dict[int, Sequence[Timed]] = {}
        for n, worker in enumerate(self._workers):
            row = []
            for begin, end, event in zip(found.begins[n], found.ends[n], found.order[n], strict=True):
                rest, microbatch = divmod(event // _CODES, work.microbatches)
                stage, origin = divmod(rest, work.origins)
                row.append(Timed(begin, end, Action(kinds[event % _CODES], stage, origin, microbatch)))
            slots[worker] = row
        return Step(slots=slots)

    def run(self, rule: _Rule) -> _Found:
        """Simulates one rule: at each moment actions end or messages arrive, then free workers choose."""
        split, patience = self._work.split, rule.patience
        owner, keys, across, room = self._owner, self._keys(rule), self._across, list(self._room)
        cells, transfer = len(owner), self._work.costs.transfer
        takes, kinds, lane, lanes = self._takes, len(self._takes), self._lane, self._lanes
        held, busy = [0] * sum(map(len, lanes)), [False] * len(room)
        found = _Found(self._rows(), self._rows(), self._rows())
        # Heaps of keys by lane and by worker, and heaps of the times when backwards become ready.
        forwards: list[list[int]] = [[] for _ in held]
        backwards, weights, coming = self._rows(), self._rows(), self._rows()
        begins, ends, order = found
        calendar = {0.0: [cell * _CODES + _FORWARD_COMES for cell in range(across)]}
        moments = [0.0]
        while moments:
            now = heappop(moments)
            touched = set()
            for event in calendar.pop(now):
                cell, code = event >> _SHIFT, event & _MASK
                worker = owner[cell]
                touched.add(worker)
                if code == _FORWARD_COMES:
                    heappush(forwards[lane[cell]], keys[cell])
                    continue
                if code == _BACKWARD_COMES:
                    heappush(backwards[worker], keys[cell])
                    continue
                busy[worker] = False
                if code == _FORWARD:
                    follower, arrival = cell + across, _FORWARD_COMES
                    if follower >= cells:
                        heappush(backwards[worker], keys[cell])
                        continue
                elif code == _BACKWARD:
                    follower, arrival = cell - across, _BACKWARD_COMES
                    if split:
                        heappush(weights[worker], keys[cell])
                if code == _WEIGHT or follower < 0:
                    continue
                to = owner[follower]
                if transfer and to != worker:
                    _enter(calendar, moments, now + transfer, follower * _CODES + arrival)
                    continue
                heappush(forwards[lane[follower]] if code == _FORWARD else backwards[to], keys[follower])
                touched.add(to)
            for worker in touched:
                if busy[worker]:
                    continue
                if backwards[worker]:
                    code, heap = _BACKWARD, backwards[worker]
                elif room[worker] and (heap := _allowed(lanes[worker], forwards, held, room[worker])):
                    code = _FORWARD
                elif weights[worker]:
                    code, heap = _WEIGHT, weights[worker]
                    if patience and _soon(coming[worker], now, patience * takes[_WEIGHT][heap[0] % cells]):
                        continue
                else:
                    continue
                cell = heappop(heap) % cells
                end = now + takes[code][cell]
                if code == _FORWARD:
                    room[worker] -= 1
                    held[lane[cell]] += 1
                elif code == kinds - 1:
                    room[worker] += 1
                    held[lane[cell]] -= 1
                if patience and code == _BACKWARD and cell >= across:
                    to = owner[cell - across]
                    heappush(coming[to], end + (transfer if to != worker else 0.0))
                busy[worker] = True
                begins[worker].append(now)
                ends[worker].append(end)
                order[worker].append(cell * _CODES + code)
                _enter(calendar, moments, end, cell * _CODES + code)
        return found

    def _rows(self) -> list[list[Any]]:
        return [[] for _ in self._room]


def _allowed(lanes: list[int], forwards: list[list[int]], held: list[int], room: int) -> list[int]:
    """Returns the heap with the forward that a worker may begin; empty if there is none."""
    if len(lanes) == 1:
        return forwards[lanes[0]]
    best: list[int] = []
    kept = 0
    for lane in lanes:
        heap = forwards[lane]
        if heap and room > kept and (not best or heap[0] < best[0]):
            best = heap
        kept += not held[lane]
    return best


def _enter(calendar: dict[float, list[int]], moments: list[float], when: float, event: int) -> None:
    if when in calendar:
        calendar[when].append(event)
    else:
        calendar[when] = [event]
        heappush(moments, when)


def _soon(times: list[float], now: float, within: float) -> bool:
    """Returns whether a time of the heap lies within `within` of now; removes past times."""
    while times and times[0] <= now:
        heappop(times)
    return bool(times) and times[0] - now < within


# The time of a step followed by another: all stages update at once, or each as soon as its own gradients are complete.
#
# A stage has all gradients of a step when the last of its replicas has added its last one. Then they are reduced, and
# the stage updates. *Staggered*, it begins the next step at once; else it waits until all stages have updated. So
# staggered steps overlap: the relevant time is from one step to the next, in the steady state.
#
# This is a model; `swift_ft.train.staggering` implements it.

STEPS_MAX = 64


def period(work: Work, step: Step, *, staggered: bool) -> float:
    """Returns the time from one step's end to the next one's, in the steady state; every worker keeps its order.
    Raises ValueError if the orders deadlock.
    """
    walk = _Walk(work, step)
    begin = [0.0] * work.stages
    clocks = [0.0] * len(step.slots)
    ends = [0.0]
    for _ in range(STEPS_MAX if staggered else 1):
        before, clocks_before = begin, clocks
        clocks, begin = walk.once(begin, clocks)
        ends.append(max(begin))
        if not staggered:
            return ends[-1]
        moved = [new - old for new, old in zip([*begin, *clocks], [*before, *clocks_before], strict=True)]
        if max(moved) - min(moved) < _SLACK:
            return moved[0]
    half = STEPS_MAX // 2  # the state may repeat only after several steps
    return (ends[-1] - ends[-1 - half]) / half


def shortest_period(work: Work, *, staggered: bool) -> float:
    return min(period(work, step, staggered=staggered) for step in found_steps(work))


class _Part(NamedTuple):
    worker: int
    stage: int
    takes: float
    adds: bool
    waits: tuple[tuple[int, float], ...]
    """(part's number, time of its message)."""


class _Walk:
    """All workers' orders merged into one, in which every part follows those that it waits for."""

    def __init__(self, work: Work, step: Step) -> None:
        self._stages = work.stages
        self._parts: list[_Part] = []
        workers = list(step.slots)
        index = {worker: n for n, worker in enumerate(workers)}
        orders = step.orders()
        number: dict[Action, tuple[int, int]] = {}  # (part's number, worker)
        at, waiting = dict.fromkeys(workers, 0), list(workers)
        blocked: dict[Action, list[int]] = {}
        while waiting:
            worker = waiting.pop()
            while at[worker] < len(orders[worker]):
                action = orders[worker][at[worker]]
                needed = needs(work, action)
                missing = next((other for other in needed if other not in number), None)
                if missing is not None:
                    blocked.setdefault(missing, []).append(worker)
                    break
                waits = tuple(
                    (part, work.costs.transfer if source != worker else 0.0)
                    for part, source in map(number.__getitem__, needed)
                )
                takes, adds = work.costs.of(action.kind, action.stage), action.kind == work.adds()
                number[action] = len(self._parts), worker
                self._parts.append(_Part(index[worker], action.stage, takes, adds, waits))
                at[worker] += 1
                waiting += blocked.pop(action, [])
        if blocked:
            raise ValueError(f"{next(iter(blocked))} is waited for and never comes")

    def once(self, begin: list[float], clocks: list[float]) -> tuple[list[float], list[float]]:
        """Returns (by worker: when it is free, by stage: when its last gradient is added)."""
        clocks = list(clocks)
        over: list[float] = []
        last = [0.0] * self._stages
        for worker, stage, takes, adds, waits in self._parts:
            end = max(clocks[worker], begin[stage])
            for part, message in waits:
                end = max(end, over[part] + message)
            end += takes
            clocks[worker] = end
            over.append(end)
            if adds:
                last[stage] = max(last[stage], end)
        return clocks, last
