"""Derives recoveries, their phases and throughput from the merged event trace. Pure.

A *recovery* begins when the coordinator leaves RUNNING and ends when it is RUNNING again. A second failure or a refused
replay within it adds generations, not recoveries. Its phases lie between milestones:

    kill -detect-> FENCING -fence-> PLANNING -plan-> RECOVERING -rebuild-> restore begins -restore-> restored
         -replay-> replayed -rejoin-> every rank has begun a step

A copy from a replica counts as a restore. A recovery of several generations spends the time from its first FENCING to
its last one in `superseded`. A coordinator that is killed may leave a state out of the trace: a milestone is the first
sign of that state or of a later one. Phases never overlap and sum to `total`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

_TOLD = {"replica": "replica_received", "undo": "undone", "roll_forward": "roll_forward"}
"""Strategy of a plan -> the event with which a rank tells that it has carried it out."""


@dataclass(kw_only=True)
class Recovery:
    """One recovery, as recorded in the trace."""

    began_t: float
    """Time of the coordinator's first FENCING."""
    ended_t: float | None = None
    """Time of the return to RUNNING; None: it never returned."""
    generations: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    faults: list[Event] = field(default_factory=list)
    """"fault" events of ranks whose loss this recovery handles."""
    servers_killed: list[Event] = field(default_factory=list)
    """"service_killed" events of the log servers given up in it."""
    window: list[Event] = field(default_factory=list)
    """All events from the end of the recovery before it to its own end."""
    planned: dict[int, Event] = field(default_factory=dict)
    """generation -> its "plan" event."""
    vacant: frozenset[int] = frozenset()
    """Slots of lost ranks that it leaves vacant."""
    returned: frozenset[int] = frozenset()
    """Ranks that were absent before it and present after it."""
    seconds: dict[str, float] | None = None
    """phase -> seconds, and their `total`; None: a milestone is missing from the trace."""
    missing: list[str] = field(default_factory=list)
    """Milestones and events missing from the trace."""
    steps_lost: int | None = None
    freed_seconds: float | None = None
    """Longest time from a survivor's new-generation notification until it left the wait it was in; None: no rank was
    waiting."""

    def named(self, name: str) -> list[Event]:
        return _named(self.window, name)

    def made(self, name: str) -> list[Event]:
        """Returns its events of this name, of the generation that produced the state (`made_in`)."""
        return [event for event in self.named(name) if event["generation"] == self.made_in]

    @property
    def generation(self) -> int:
        return self.generations[-1]

    @property
    def exits(self) -> list[Event]:
        return [event for event in self.named("child_exit") if event.get("rank") is not None]

    @property
    def kill_t(self) -> float | None:
        times = [event["t"] for event in (self.faults or self.exits or self.servers_killed)]
        if not times and self.returned:  # no failure: a rank rejoined
            return self.began_t
        return min(times) if times else None

    @property
    def target_version(self) -> int | None:
        return None if self.plan is None else self.plan.get("target_version")

    @property
    def plan(self) -> Event | None:
        """Returns the last plan; earlier ones were superseded."""
        return self.planned[max(self.planned)] if self.planned else None

    @property
    def made_in(self) -> int:
        """Returns the generation that produced the state: the last planned one, except for generations that only
        restart the log because it does not lead to that state."""
        for generation in sorted(self.planned, reverse=True):
            plan = self.planned[generation]
            before = [self.planned[other] for other in self.planned if other < generation]
            follows = plan.get("exact") is False and not _replays(plan)
            if not follows or not any(other.get("saves") for other in before):
                return generation
        return self.generation

    @property
    def made_by(self) -> Event | None:
        """Returns the plan of the generation `made_in`."""
        return self.planned.get(self.made_in, self.plan)

    @property
    def victims(self) -> set[int]:
        return {int(event["rank"]) for event in (*self.faults, *self.exits)}

    def strategies(self) -> dict[int, tuple[str, str]]:
        """Returns rank -> (strategy, reason) of the last plan. For a rank that keeps the state that an earlier
        generation of this recovery gave it, returns that generation's strategy."""
        strategies = _strategies_of(self.plan)
        restored = {e["rank"]: e["generation"] for e in self.named("restore_end")}
        for rank, generation in restored.items():
            if generation in self.planned and strategies.get(rank, ("", ""))[0] == "keep":
                strategies[rank] = _strategies_of(self.planned[generation]).get(rank, strategies[rank])
        return strategies

    def sources(self) -> dict[int, list[int]]:
        sources: dict[int, list[int]] = {}
        for event in self.named("replica_received"):
            sources[int(event["rank"])] = [int(source["rank"]) for source in event.get("sources") or ()]
        for entry in _entries(self.plan):
            if _strategy_of(entry) == "replica" and "sources" in entry:
                sources[int(entry["rank"])] = [int(rank) for rank in entry["sources"]]
        return sources

    @property
    def fell_back(self) -> str:
        """Returns why a checkpoint was restored; "" if none was."""
        if not any(name == "checkpoint" for name, _ in self.strategies().values()):
            return ""
        reasons = [
            str(plan.get("reason", ""))
            for _, plan in sorted(self.planned.items())
            if any(_strategy_of(entry) == "checkpoint" for entry in _entries(plan))
        ]
        return reasons[-1]

    @property
    def replay_expected(self) -> bool:
        return _replays(self.made_by)

    @property
    def inexact(self) -> bool:
        return any(event.get("exact") is not True for event in self.named("undone"))

    def replayed(self, name: str) -> int:
        return sum(int(event.get(name) or 0) for event in self.made("replay_end"))


def _entries(plan: Event | None) -> list[Event]:
    return (plan or {}).get("ranks") or []


def _replays(plan: Event | None) -> bool:
    target = (plan or {}).get("target_version")
    return any(entry.get("from_version", target) != target for entry in _entries(plan))


def _strategy_of(entry: Event) -> str:
    return str(entry["strategy"]).lower()


def _strategies_of(plan: Event | None) -> dict[int, tuple[str, str]]:
    return {int(e["rank"]): (_strategy_of(e), str(e.get("reason", ""))) for e in _entries(plan)}


def recoveries(events: Sequence[Event], parts: int = 1) -> list[Recovery]:
    """Returns all recoveries, by time. `parts`: the ranks that hold one replica of a stage together."""
    so_far: list[Recovery] = []
    # Before the first RUNNING there is nothing to recover from: ranks are still forming.
    runs = False
    current: Recovery | None = None
    for event in _states(events):
        state, generation = event["state"].lower(), event["generation"]
        if state == "running":
            if current is not None:
                current.ended_t = event["t"]
            runs, current = True, None
        elif runs and state in ("fencing", "planning", "recovering"):
            if current is None:
                current = Recovery(began_t=event["t"])
                so_far.append(current)
            if not current.generations or generation > current.generations[-1]:
                current.generations.append(generation)
                current.reasons.append(str(event.get("reason", "")))
    previous_end = float("-inf")
    vacant: frozenset[int] = frozenset()
    for recovery in so_far:
        end = recovery.ended_t if recovery.ended_t is not None else float("inf")
        recovery.window = [event for event in events if previous_end < event["t"] <= end]
        faults = _named(events, "fault")
        recovery.faults = [fault for fault in faults if previous_end < _noticed(fault, events) <= end]
        lost = {rank - rank % parts + part for rank in recovery.victims for part in range(parts)}
        _fill(recovery, [event for event in events if event["t"] > end], events, vacant, lost)
        previous_end, vacant = end, recovery.vacant
    return so_far


def _noticed(fault: Event, events: Sequence[Event]) -> float:
    """Returns when the coordinator has fenced the fault's process, or else the time of the kill. A process that dies as
    a recovery ends belongs to the next one."""
    rank, at = fault["rank"], fault["t"]
    later = (e["t"] for e in _named(events, "fenced") if e["rank"] == rank and e["t"] >= at)
    return float(min(later, default=at))


def _fill(
    recovery: Recovery, after: list[Event], events: Sequence[Event], vacant: frozenset[int], lost: set[int]
) -> None:
    """Fills in a recovery from its window and the events after it. `vacant`: the vacant slots before it; `lost`: the
    ranks whose slots it may leave vacant."""
    numbers = {event["server"] for event in recovery.named("log_server_lost")}
    # It may have died long before, for example in an earlier recovery.
    killed = [e for e in _named(events, "service_killed") if e.get("lost")]
    recovery.servers_killed = [event for event in killed if event.get("number") in numbers]
    recovery.planned = {event["generation"]: event for event in recovery.named("plan")}
    if recovery.plan is None:
        recovery.missing.append("plan")
        recovery.vacant = vacant
    else:  # only lost ranks can be absent: all others need a digest, whatever the plan says
        present = {int(entry["rank"]) for entry in _entries(recovery.plan)}
        recovery.vacant = (vacant | lost) - present
        recovery.returned = vacant & present
    if recovery.replay_expected and not recovery.made("replay_end"):
        recovery.missing.append("replay_end")
    for strategy, name in _TOLD.items():
        told = {event["rank"] for event in recovery.named(name) if event["generation"] == recovery.generation}
        planned = [entry["rank"] for entry in _entries(recovery.plan) if _strategy_of(entry) == strategy]
        recovery.missing += [f"{name} of rank {rank}" for rank in planned if rank not in told]
    recovery.seconds = _phases(recovery, after)
    recovery.freed_seconds = _freed(recovery.window)
    reached = [event["step"] + 1 for event in _named(events, "step_end") if event["t"] < recovery.began_t]
    if recovery.target_version is not None:
        recovery.steps_lost = max(0, max(reached, default=0) - recovery.target_version)


def _freed(window: list[Event]) -> float | None:
    """Returns the longest time between a rank's "notice" event and its next "freed" event."""
    noticed: dict[int, float] = {}
    took = []
    for event in window:
        if event["event"] == "notice":
            noticed.setdefault(event["rank"], event["t"])
        elif event["event"] == "freed" and event.get("rank") in noticed:  # a log server frees bytes
            took.append(event["t"] - noticed.pop(event["rank"]))
    return max(took, default=None)


def _phases(recovery: Recovery, after: list[Event]) -> dict[str, float] | None:
    """Returns phase -> seconds, or None. Adds missing milestones to `recovery.missing`."""
    kill_t = recovery.kill_t
    if kill_t is None:
        recovery.missing.append("fault")
        return None
    if recovery.ended_t is None:
        recovery.missing.append("state running")
        return None
    resumed = _all_ranks_stepping(recovery.window, after, recovery.vacant)
    if resumed is None:
        recovery.missing.append("step_begin after the recovery")
        return None
    last = _milestones(recovery.window, recovery.made_in)
    groups = [event["t"] for event in recovery.named("group_built") if event["t"] <= recovery.ended_t]
    work = [event["t"] for name in ("restore_begin", "replay_begin") for event in recovery.made(name)]
    rebuilt = min(work) if work else max(groups, default=recovery.ended_t)
    marks = (
        ("detect", recovery.began_t),
        ("superseded", last["fencing"]),
        ("fence", last["planning"]),
        ("plan", last["recovering"]),
        ("rebuild", rebuilt),
        ("restore", max((event["t"] for event in recovery.made("restore_end")), default=rebuilt)),
        ("replay", max((event["t"] for event in recovery.made("replay_end")), default=None)),
        ("rejoin", resumed),
    )
    seconds: dict[str, float] = {}
    at = kill_t
    for name, mark in marks:
        until = at if mark is None else min(max(at, mark), resumed)
        seconds[name] = until - at
        at = until
    if recovery.generations[0] == recovery.made_in:
        # A generation has one FENCING, even if its coordinator died in it.
        seconds["fence"] += seconds.pop("superseded")
    return {**seconds, "total": resumed - kill_t}


def _milestones(window: list[Event], generation: int) -> dict[str, float]:
    """Returns state -> when this generation was first seen in it or in a later state."""
    seen = [(e["t"], e["state"].lower()) for e in _states(window) if e["generation"] >= generation]
    order = ("fencing", "planning", "recovering", "running")
    return {
        state: min((t for t, name in seen if name in order[index:]), default=float("inf"))
        for index, state in enumerate(order)
    }


def _all_ranks_stepping(window: list[Event], after: list[Event], vacant: frozenset[int]) -> float | None:
    """Returns when the last rank began its first step after the recovery, or finished because none was left."""
    ranks = {
        event["rank"] for event in (*window, *after) if event["event"] in ("step_begin", "fault")
    } - vacant
    first: dict[int, float] = {}
    for event in after:
        lives = event["event"] in ("step_begin", "finished") and not event.get("replay")
        if lives and event["rank"] not in vacant:
            first.setdefault(event["rank"], event["t"])
    return max(first.values()) if first and ranks <= set(first) else None


def _states(events: Iterable[Event]) -> list[Event]:
    """Returns the coordinator's state events: transitions, and the state at a restart."""
    return [e for e in events if e["event"] == "state" or (e["event"] == "resumed" and "state" in e)]


def _named(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def rehearsals(events: Iterable[Event]) -> list[dict[str, Any]]:
    return [
        {
            "rank": event["rank"],
            "version": event["version"],
            "steps": event["steps"],
            "equal": not event["difference"],
            "first_difference": event["difference"] or None,
        }
        for event in _named(events, "rehearsed")
    ]


def survivors_kept(events: Sequence[Event], ranks: int) -> dict[int, bool] | None:
    """Returns rank -> whether its first process ran it to the end, for ranks that were not killed.

    Returns None if some rank left no trace.
    """
    killed = {event["rank"] for event in _named(events, "fault")}
    pids: dict[int, set[int]] = {}
    for event in events:
        if event["event"] in ("step_begin", "step_end", "finished") and "rank" in event:
            pids.setdefault(event["rank"], set()).add(event["pid"])
    if set(pids) != set(range(ranks)):
        return None
    return {rank: len(pids[rank]) == 1 for rank in range(ranks) if rank not in killed}


def throughput(
    events: Sequence[Event], recoveries: Sequence[Recovery], ranks: int
) -> dict[str, float | None]:
    """Returns steps per second before the first kill, from it to the first step after the last recovery, and after
    that. A step is done once all ranks have ended it."""
    killed = min((r.kill_t for r in recoveries if r.kill_t is not None), default=float("inf"))
    back = recoveries[-1].ended_t if recoveries else None
    begun = [event["t"] for event in _named(events, "step_begin") if back is not None and event["t"] > back]
    resumed = min(begun, default=float("inf"))
    ended = _named(events, "step_end")

    def done(since: float, until: float) -> dict[int, float]:
        return _completed([event for event in ended if since <= event["t"] < until], ranks, recoveries)

    before = done(0.0, killed)
    within = done(0.0, resumed).keys() - before.keys()
    return {
        "before": _rate(before),
        "during": len(within) / (resumed - killed) if killed < resumed < float("inf") else None,
        "after": _rate(done(resumed, float("inf"))),
    }


def vacant_at(version: int, recoveries: Sequence[Recovery]) -> frozenset[int]:
    """Returns the slots without a rank in the step that starts from this version."""
    vacant: frozenset[int] = frozenset()
    for recovery in recoveries:
        if recovery.target_version is not None and recovery.target_version <= version:
            vacant = recovery.vacant
    return vacant


def _completed(ended: Iterable[Event], ranks: int, recoveries: Sequence[Recovery]) -> dict[int, float]:
    """Returns step -> when its last rank ended it, for steps that all present ranks ended."""
    times: dict[int, dict[int, float]] = {}
    for event in ended:
        times.setdefault(event["step"], {})[event["rank"]] = event["t"]
    return {
        step: max(by_rank.values())
        for step, by_rank in times.items()
        if set(range(ranks)) - vacant_at(step, recoveries) <= by_rank.keys()
    }


def _rate(done: dict[int, float]) -> float | None:
    """Returns steps per second, from the end of the first step: its beginning includes the start-up, or the end of a
    recovery."""
    if len(done) < 2:
        return None
    return (len(done) - 1) / (max(done.values()) - min(done.values()))
