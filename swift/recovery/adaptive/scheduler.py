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

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from swift.recovery.adaptive.steps import Step, Timed
from swift.recovery.adaptive.work import Action, Work

ACTIONS_MAX = 200_000
"""Of all runs of one plan together, but for the first rule's, which every work gets: what bounds the time of a plan."""
_SLACK = 1e-9
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
