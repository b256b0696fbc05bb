"""Puts a step in an order: a list scheduler, run with several rules; the shortest step wins.

A worker that is free takes, of what it could begin now: a backward first, because others wait for it and it frees
activations; then a forward, if it may hold more activations; then gradients of weights, for which nobody waits. Without
failures and with 1F1B's activations this is 1F1B.

It always comes to an end. A worker of several stages begins a forward only if there is room left for one microbatch at
each later stage of its own that holds none (a *lane* is a worker's stage). Suppose that nobody can go on. Take the last
stage at which anything is held. At the pipeline's last stage its backward waits for nobody. At another one its forward
at the next stage has not begun, so that stage's worker has no room; but what it keeps free for later stages is there.

A step may have a million actions. So the loop knows them as whole numbers: what is done with one microbatch at one
stage is a *cell*, ``(stage * origins + origin) * microbatches + microbatch``, and an event is a cell and a code.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

# One step of all data-parallel ranks, before anybody has put it in an order.
#
# A *worker* is a rank, by its slot's number. It runs the stages of its stage group, for the microbatches of its own
# *origin* (its data-parallel rank's batch) and for those that it has adopted. Times are in any one unit.

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""A forward; a whole backward; the two parts of a split one, for inputs and for weights."""


class Action(NamedTuple):
    """What a worker does at a time."""

    kind: str
    stage: int
    origin: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}@{self.origin}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """What each part takes for one microbatch, by stage; one number stands for all stages."""

    forward: Sequence[float] = (1.0,)
    backward_input: Sequence[float] = (1.0,)
    backward_weight: Sequence[float] = (1.0,)
    transfer: float = 0.0
    """Between two stages on different workers. A worker computes meanwhile."""

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
    """Raises ValueError if it can be nobody's."""

    stages: int
    origins: int
    microbatches: int
    """Of each origin."""
    owners: Owners
    """Of every stage and origin."""
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
        """Worker -> the stages that it computes anything of, ascending; workers ascending."""
        found: dict[int, set[int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker in owners:
                found.setdefault(worker, set()).add(stage)
        return {worker: tuple(sorted(found[worker])) for worker in sorted(found)}

    def kinds(self) -> tuple[str, ...]:
        """What is done with each microbatch at each stage, in this order."""
        return (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)

    def adds(self) -> str:
        """The kind that adds to gradients of weights."""
        return BACKWARD_WEIGHT if self.split else BACKWARD

    def actions(self) -> Iterator[tuple[int, Action]]:
        """(worker, action) of all that is to be done."""
        kinds = self.kinds()
        for (stage, origin), owners in self.owners.items():
            for microbatch, worker in enumerate(owners):
                for kind in kinds:
                    yield worker, Action(kind, stage, origin, microbatch)

    def bound(self) -> float:
        """No order is quicker. Each worker waits for the first microbatch to come to it, computes all of its own, and
        the last one has to go back to the first stage; and it has no more activations at a time than its cap: if each
        is held for L at least, n of them take n * L / cap."""
        head, tail, _ = self._ways()
        longest = head[-1] + self.costs.of(FORWARD, self.stages - 1)
        longest += self.costs.of(self.kinds()[1], self.stages - 1) + tail[-1]
        for first, busy, weights, span in self._loads():
            longest = max(longest, head[first] + busy - weights + tail[first], head[first] + busy)
            longest = max(longest, head[first] + span + (0.0 if self.split else tail[first]))
        return longest

    def period_bound(self) -> float:
        """The same of the time from one step to the next, if they may overlap: a worker waits for nobody."""
        return max(max(busy, span) for _, busy, _, span in self._loads())

    def _loads(self) -> Iterator[tuple[int, float, float, float]]:
        """Of each worker: its first stage; what it computes, and how much of that are gradients of weights alone; and
        how long its activations need room (0: it has any)."""
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
        """Worker -> stage -> of how many microbatches it computes it."""
        found: dict[int, dict[int, int]] = {}
        for (stage, _), owners in self.owners.items():
            for worker, count in Counter(owners).items():
                of = found.setdefault(worker, {})
                of[stage] = of.get(stage, 0) + count
        return found

    def _ways(self) -> tuple[list[float], list[float], list[float]]:
        """By stage, at least: until the first forward can begin; from the end of a backward (of its part for inputs) to
        the end of the step; and for how long an activation is held."""
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


def shared(
    *, group_stages: Sequence[Sequence[int]], origins: int, microbatches: int, lost: Sequence[tuple[int, int]]
) -> Owners:
    """A job of `group_stages` (the stages of each stage group) in which these (stage group, origin) are lost: their
    microbatches go to the peers that are left, in turn. Worker numbers are group * origins + origin.

    Raises ValueError if a stage group has nobody left.
    """
    gone = set(lost)
    owners: dict[tuple[int, int], tuple[int, ...]] = {}
    for group, stages in enumerate(group_stages):
        left = [group * origins + origin for origin in range(origins) if (group, origin) not in gone]
        if not left:
            raise ValueError(f"stage group {group} has nobody left")
        turn = 0
        for origin in range(origins):
            own = group * origins + origin
            if (group, origin) not in gone:
                mine = (own,) * microbatches
            else:
                mine = tuple(left[(turn + mb) % len(left)] for mb in range(microbatches))
                turn = (turn + microbatches) % len(left)
            owners |= {(stage, origin): mine for stage in stages}
    return owners


# A step that has been put in an order.


class Timed(NamedTuple):
    """When a worker does something."""

    begin: float
    end: float
    action: Action


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Who does what, when. The times are as the costs say; what counts for a run is the order."""

    slots: Mapping[int, Sequence[Timed]]
    """By worker, in its order."""

    @property
    def length(self) -> float:
        """From the first begin to the last end."""
        return max((slots[-1].end for slots in self.slots.values() if slots), default=0.0)

    def orders(self) -> dict[int, tuple[Action, ...]]:
        """By worker: what it does, one after the other. Walked so by all, whatever each part takes, they come to the
        end: each action waits only for such as began earlier here."""
        return {worker: tuple(slot.action for slot in slots) for worker, slots in self.slots.items()}


# Whether a step does its work: rules of their own, which any order is held to.

_SLACK = 1e-9


def problems(work: Work, step: Step) -> list[str]:
    """What is wrong with it, a line each; none: every action is done once, by its owner, when it can be."""
    found = []
    wanted = Counter(work.actions())
    done = Counter((worker, slot.action) for worker, slots in step.slots.items() for slot in slots)
    found += [f"worker {worker} has not to do {action}" for worker, action in done - wanted]
    found += [f"worker {worker} does not do {action}" for worker, action in wanted - done]
    if found:
        return found
    at = {slot.action: (worker, slot) for worker, slots in step.slots.items() for slot in slots}
    for worker, slots in step.slots.items():
        for before, behind in itertools.pairwise(slots):
            if behind.begin < before.end - _SLACK:
                found.append(f"worker {worker} begins {behind.action} before {before.action} is over")
        found += _of_activations(work, worker, [slot.action for slot in slots])
    for action, (worker, slot) in at.items():
        if slot.end - slot.begin < work.costs.of(action.kind, action.stage) - _SLACK:
            found.append(f"{action} takes too little time")
        for needed in needs(work, action):
            source, given = at[needed]
            arrives = given.end + (work.costs.transfer if source != worker else 0.0)
            if slot.begin < arrives - _SLACK:
                found.append(f"{action} begins at {slot.begin:g}, and {needed} is there at {arrives:g}")
    return found


def out_of_order(work: Work, step: Step) -> list[tuple[int, int, int]]:
    """(worker, stage, origin) whose gradients are not added in the order of microbatches. These may come to the worker
    by several ways. Their sum has other bits, unless the run keeps those that come early apart."""
    found = []
    for worker, order in step.orders().items():
        newest: dict[tuple[int, int], int] = {}
        for kind, stage, origin, microbatch in order:
            if kind == work.adds():
                if newest.get((stage, origin), -1) > microbatch:
                    found.append((worker, stage, origin))
                newest[stage, origin] = microbatch
    return sorted(set(found))


def needs(work: Work, action: Action) -> list[Action]:
    """What must be over before it begins."""
    kind, stage, origin, microbatch = action
    backward = BACKWARD_INPUT if work.split else BACKWARD
    if kind == FORWARD:
        return [Action(FORWARD, stage - 1, origin, microbatch)] if stage else []
    if kind == BACKWARD_WEIGHT:
        return [Action(BACKWARD_INPUT, stage, origin, microbatch)]
    own = [Action(FORWARD, stage, origin, microbatch)]
    return own + ([Action(backward, stage + 1, origin, microbatch)] if stage + 1 < work.stages else [])


def _of_activations(work: Work, worker: int, order: list[Action]) -> list[str]:
    if work.cap is None:
        return []
    held = most = 0
    for action in order:
        held += (action.kind == FORWARD) - (action.kind == work.adds())
        most = max(most, held)
    cap = work.cap[worker]
    return [f"worker {worker} holds {most} activations, and may hold {cap}"] if most > cap else []


ACTIONS_MAX = 200_000
"""Of all runs of one plan together, but for the first rule's, which every work gets: what bounds the time of a plan."""

_FORWARD, _BACKWARD, _WEIGHT, _FORWARD_COMES, _BACKWARD_COMES = range(5)
"""Codes of events: three ends, two arrivals from another worker. A backward is a whole one or the part for inputs."""
_SHIFT = 3
_CODES, _MASK = 1 << _SHIFT, (1 << _SHIFT) - 1


class _Rule(NamedTuple):
    """How a worker chooses where it may."""

    sooner: int
    """Adopted microbatches count as so many halves of a microbatch earlier."""
    patience: float
    """Gradients of weights are put off if a backward comes within so much of their own time."""
    shuffle: int = 0
    """Origins take turns in another order, a different one for each number. 0: microbatch by microbatch."""


_SOONER_MAX = 15
_RULES = (
    *(_Rule(sooner, patience) for sooner in (0, 3, -3, 7, -7, _SOONER_MAX) for patience in (0.0, 0.5)),
    *(_Rule(0, patience, shuffle) for shuffle in range(1, 9) for patience in (0.0, 0.5)),
)


def plan_step(work: Work, *, thorough: bool = True, actions_max: int = ACTIONS_MAX) -> Step:
    """The shortest step that the rules find, the same for the same work wherever it is asked for. `thorough`: with as
    many rules as `actions_max` lets it, until a step is as short as the bound; else with the first one."""
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
    """What each rule finds, however long; as many rules as `ACTIONS_MAX` lets it."""
    scheduler = _Scheduler(work)
    for rule in scheduler.rules(ACTIONS_MAX):
        yield scheduler.step(scheduler.run(rule))


class _Found(NamedTuple):
    """What a rule makes of a work."""

    begins: list[list[float]]
    """By worker's index, in its order."""
    ends: list[list[float]]
    order: list[list[int]]
    """Events that end what it does."""

    def length(self) -> float:
        return max((row[-1] for row in self.ends if row), default=0.0)


class _Scheduler:
    """A work as lists of numbers, and runs over it in the time that the costs say."""

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
        """Those that may differ here, as many as are allowed for so much work."""
        rules = [rule for rule in _RULES if self._work.split or not rule.patience]
        return rules[: max(1, actions_max // (len(self._owner) * len(self._takes)))]

    def _lanes_of(self, index: dict[int, int]) -> tuple[list[list[int]], list[int]]:
        """By worker: its lanes, the last stage's first. By cell: its lane."""
        number: dict[tuple[int, int], int] = {}
        lanes: list[list[int]] = []
        for worker, stages in self._work.stages_of().items():
            lanes.append([len(number) + n for n in range(len(stages))])
            for stage in reversed(stages):
                number[index[worker], stage] = len(number)
        return lanes, [number[owner, cell // self._across] for cell, owner in enumerate(self._owner)]

    def _what_is_adopted(self) -> list[bool]:
        """By cell: whether its worker computes more of another origin at this stage, or as much of an earlier one."""
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
        """By origin and microbatch: when its turn is, in halves of a microbatch. Those of one origin stay in order."""
        work, state = self._work, shuffle
        most = 4 if shuffle % 2 else 8
        turns = []
        for _ in range(work.origins):
            row = [_SOONER_MAX]
            for _ in range(work.microbatches):
                state = (state * 1103515245 + 12345) % 2**31  # the C library's example
                row.append(row[-1] + ((state >> 16) % (most + 1) if shuffle else 2))
            turns.append(row[1:])
        return turns

    def _keys(self, rule: _Rule) -> list[int]:
        """By cell: its key in a heap, of which the cell is the remainder."""
        work, keys, cell = self._work, [], 0
        cells, turns = len(self._owner), self._turns(rule.shuffle)
        for stage in range(work.stages):
            # Of a worker's several stages: forwards of later ones first, as in interleaved schedules.
            behind = work.stages - 1 - stage
            for origin in range(work.origins):
                for turn in turns[origin]:
                    at = turn - rule.sooner if self._adopted[cell] else turn
                    keys.append(((at * work.origins + origin) * work.stages + behind) * cells + cell)
                    cell += 1
        return keys

    def step(self, found: _Found) -> Step:
        """In full."""
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
        """In the time that the costs say: at each moment something ends or arrives, then free workers choose."""
        split, patience = self._work.split, rule.patience
        owner, keys, across, room = self._owner, self._keys(rule), self._across, list(self._room)
        cells, transfer = len(owner), self._work.costs.transfer
        takes, kinds, lane, lanes = self._takes, len(self._takes), self._lane, self._lanes
        held, busy = [0] * sum(map(len, lanes)), [False] * len(room)
        found = _Found(self._rows(), self._rows(), self._rows())
        # Heaps of keys by lane and by worker; and of the times when backwards become ready.
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
        """One a worker."""
        return [[] for _ in self._room]


def _allowed(lanes: list[int], forwards: list[list[int]], held: list[int], room: int) -> list[int]:
    """Where the forward is that a worker may begin; an empty heap: none."""
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
    """Makes it happen then."""
    if when in calendar:
        calendar[when].append(event)
    else:
        calendar[when] = [event]
        heappush(moments, when)


def _soon(times: list[float], now: float, within: float) -> bool:
    """Whether one of a heap of times comes; those that are over are taken out."""
    while times and times[0] <= now:
        heappop(times)
    return bool(times) and times[0] - now < within


# What a step takes if the next one follows: all stages at once, or each as soon as its own gradients are there.
#
# A stage has all gradients of a step when the last of its replicas has added its last one. Then they are reduced, and
# the stage steps. *Staggered*, it begins the next step at once; else it waits until all stages have stepped. So
# staggered steps overlap: what counts is the time from one step to the next, once it is the same for each.
#
# This is a model; `swift_ft.train.staggering` is how a run does it.

STEPS_MAX = 64


def period(work: Work, step: Step, *, staggered: bool, reduction: float = 0.0) -> float:
    """From one step's end to the next one's, in the steady state; every worker keeps to its order. `reduction` is what
    it takes to reduce a stage's gradients and to step.

    Raises ValueError if the orders come to no end.
    """
    walk = _Walk(work, step)
    begin = [0.0] * work.stages
    clocks = [0.0] * len(step.slots)
    ends = [0.0]
    for _ in range(STEPS_MAX if staggered else 1):
        before, clocks_before = begin, clocks
        clocks, stepped = walk.once(begin, clocks)
        begin = [end + reduction for end in stepped]
        ends.append(max(begin))
        if not staggered:
            return ends[-1]
        moved = [new - old for new, old in zip([*begin, *clocks], [*before, *clocks_before], strict=True)]
        if max(moved) - min(moved) < _SLACK:
            return moved[0]
    half = STEPS_MAX // 2  # it may come again after several steps only
    return (ends[-1] - ends[-1 - half]) / half


def shortest_period(work: Work, *, staggered: bool, reduction: float = 0.0) -> float:
    """Of the steps that the rules find."""
    return min(period(work, step, staggered=staggered, reduction=reduction) for step in found_steps(work))


class _Part(NamedTuple):
    worker: int
    stage: int
    takes: float
    adds: bool
    waits: tuple[tuple[int, float], ...]
    """(part's number, what its message takes)."""


class _Walk:
    """All workers' orders as one, in which nothing comes before what it waits for."""

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
        """(by worker: when it is free, by stage: when its last gradient is added)."""
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
