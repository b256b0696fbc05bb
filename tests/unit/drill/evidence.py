"""A run that went well, as evidence: tests break one piece of it at a time."""

from dataclasses import replace
from typing import Any

from swift_ft import fault_grammar
from swift_ft.lab.drill import report
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence, Twin
from swift_ft.lab.drill.topology import Topology
from swift_ft.lab.drill.verdict_checks import DIGEST_FIELDS

RANKS, STEPS = 4, 12
KILL_STEP, CHECKPOINT = 8, 5
NEW_PID = 200


def judged(planned: DrillConfig, found: Evidence, verdict: str = report.PASS, *said: str) -> dict[str, Any]:
    """The report, which gives this verdict, and these words in its reason."""
    result = report.build(planned, found)
    assert result["verdict"] == verdict, result["reason"]
    assert all(words in result["reason"] for words in said), result["reason"]
    return result


def config(*specs: str, **changes: Any) -> DrillConfig:
    shape = Topology(
        pipeline_ranks=RANKS, steps=STEPS, microbatches=4, schedule="1f1b", checkpoint_every=CHECKPOINT
    )
    planned = tuple(fault_grammar.parse(spec) for spec in specs or (f"rank=2,step={KILL_STEP},microbatch=3",))
    return DrillConfig(topology=shape, faults=planned, **changes)


def digest(rank: int, version: int) -> dict[str, Any]:
    return {name: f"{name}-of-{rank}-at-{version}" for name in DIGEST_FIELDS}


class Trace:
    """Events one after the other on a clock of its own."""

    def __init__(self, ranks: int = RANKS) -> None:
        self.t = 1000.0
        self.events: list[dict[str, Any]] = []
        self.pids = {rank: 100 + rank for rank in range(ranks)}
        self.there = list(range(ranks))
        """Ranks that take part in a step."""

    @classmethod
    def begun(cls, steps: int, ranks: int = RANKS) -> "Trace":
        """A run that has done so many steps."""
        trace = cls(ranks)
        trace.state("FORMING", 1)
        trace.state("RUNNING", 1)
        for step in range(steps):
            trace.step(step)
        return trace

    def end(self, first: int, behind: int = STEPS) -> "Trace":
        """The steps from this one to the last."""
        for step in range(first, behind):
            self.step(step)
        for rank in self.there:
            self.rank(rank, "finished", version=behind, records=100, bytes=1 << 18)
        self.state("FINISHED", 2)
        return self

    def add(self, who: str, event: str, after: float = 0.01, pid: int = 1, **fields: Any) -> None:
        self.t += after
        self.events.append({"t": round(self.t, 6), "who": who, "pid": pid, "event": event, **fields})

    def rank(self, rank: int, event: str, after: float = 0.01, **fields: Any) -> None:
        self.add(f"rank{rank}", event, after, pid=self.pids[rank], rank=rank, **fields)

    def state(self, state: str, generation: int, after: float = 0.01, reason: str = "") -> None:
        self.add("coordinator", "state", after, state=state, generation=generation, reason=reason)

    def step(self, step: int) -> None:
        for name in ("step_begin", "step_end"):
            for rank in self.there:
                self.rank(rank, name, step=step)

    def kill(self, rank: int, step: int, fault: str = "fault0") -> None:
        for each in self.there:
            self.rank(each, "step_begin", step=step)
        self.rank(rank, "fault", id=fault, phase="backward", step=step, microbatch=3)
        self.add("launcher", "child_exit", rank=rank, pid=self.pids[rank], code=-9)
        self.pids[rank] = NEW_PID

    def plan(
        self, generation: int, target: int, strategies: dict[int, tuple[str, int]], reason: str = "ok"
    ) -> None:
        self.add(
            "coordinator",
            "plan",
            generation=generation,
            target_version=target,
            reason=reason,
            ranks=[
                {"rank": rank, "strategy": name, "from_version": start, "reason": f"rank {rank}: {name}"}
                for rank, (name, start) in strategies.items()
            ],
        )

    def replay(self, rank: int, generation: int, start: int, end: int) -> None:
        self.rank(rank, "restore_begin", 0.02, generation=generation)
        self.rank(rank, "restore_end", 0.03, generation=generation, version=start)
        self.rank(rank, "replay_begin", generation=generation, version=start)
        for step in range(start, end):
            self.rank(rank, "step_begin", step=step, replay=True)
            self.rank(rank, "step_end", 0.1, step=step, replay=True)
        self.rank(
            rank,
            "replay_end",
            generation=generation,
            steps=end - start,
            records=20,
            microbatches=(end - start) * 4,
            verified=24,
            filled=0,
        )

    def recovers(
        self,
        generation: int,
        target: int,
        strategies: dict[int, tuple[str, int]],
        reason: str = "rank 2 was killed by signal 9",
        **planned: Any,
    ) -> None:
        """Until ranks get their state. `planned`: more of the plan."""
        for state in ("FENCING", "PLANNING"):
            self.state(state, generation, reason=reason)
        self.plan(generation, target, strategies, reason)
        self.events[-1] |= planned
        self.state("RECOVERING", generation)

    def recovery(self, generation: int, victim: int) -> None:
        """By a replay, until just before its end."""
        self.recovers(generation, KILL_STEP, kept(victim=victim))
        self.replay(victim, generation, CHECKPOINT, KILL_STEP)

    def restored(self, generation: int, version: int) -> None:
        """All ranks have loaded the checkpoint."""
        for rank in range(RANKS):
            self.rank(rank, "restore_begin", generation=generation)
            self.rank(rank, "restore_end", generation=generation, version=version)


def kept(target: int = KILL_STEP, victim: int = 2) -> dict[int, tuple[str, int]]:
    plan = dict.fromkeys(range(RANKS), ("KEEP", target))
    return {**plan, victim: ("REPLAY", CHECKPOINT)}


def good_trace() -> Trace:
    trace = Trace.begun(KILL_STEP)
    trace.kill(2, KILL_STEP)
    trace.state("FENCING", 2, 0.02, "rank 2 was killed by signal 9")
    for rank in (0, 1, 3):
        trace.rank(rank, "notice", 0.001, generation=2)
    for rank in (0, 1, 3):
        trace.rank(rank, "freed", 0.003, generation=2)
    trace.add("logserver", "freed", 0.0, job="drill", stream="s1.F", bytes=4096)
    trace.state("PLANNING", 2, 0.03)
    trace.plan(2, KILL_STEP, kept())
    trace.state("RECOVERING", 2, 0.04)
    for rank in range(RANKS):
        trace.rank(rank, "group_built", generation=2)
    trace.replay(2, 2, CHECKPOINT, KILL_STEP)
    trace.state("RUNNING", 2, 0.02)
    return trace.end(KILL_STEP)


def digests(*recovered: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """Of the run with faults; `recovered`: (version, generation) of its recoveries."""
    found = {f"rank{rank}-v{STEPS}": digest(rank, STEPS) for rank in range(RANKS)}
    for version, generation in recovered:
        found |= {f"rank{rank}-v{version}-g{generation}": digest(rank, version) for rank in range(RANKS)}
    return found


def carried_out(trace: Trace, event: str, fault: str = "fault1", **fields: Any) -> Trace:
    """With a fault that the drill has carried out."""
    trace.add("drill", event, id=fault, **fields)
    return trace


def good(trace: Trace | None = None, **changes: Any) -> Evidence:
    versions = range(STEPS + 1)
    evidence = Evidence(
        events=(trace or good_trace()).events,
        digests=digests((KILL_STEP, 2)),
        twin=Twin(
            digests={f"rank{r}-v{version}": digest(r, version) for r in range(RANKS) for version in versions},
            exit_code=0,
        ),
        exit_code=0,
        negative_control={"caught": True, "file": "s1.F/0.seg", "bit": 5000},
    )
    return replace(evidence, **changes)


def answers(result: dict[str, Any]) -> dict[str, bool | None]:
    return {check["name"]: check["answer"] for check in result["checks"]}


def wrong(result: dict[str, Any]) -> dict[str, bool | None]:
    return {name: answer for name, answer in answers(result).items() if answer is not True}
