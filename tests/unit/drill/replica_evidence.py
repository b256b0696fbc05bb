"""Runs of 2 stages and 2 replicas that went well, as evidence: tests break one piece at a time.

Ranks 0 and 1 are stage 0, ranks 2 and 3 stage 1.
"""

from collections.abc import Callable
from typing import Any

from swift_ft import fault_grammar
from swift_ft.lab.drill.config import DrillConfig
from swift_ft.lab.drill.facts import Evidence, Twin
from swift_ft.lab.drill.topology import Topology
from swift_ft.lab.drill.verdict_checks import DIGEST_FIELDS, Losses
from tests.unit.drill.evidence import CHECKPOINT, KILL_STEP, NEW_PID, STEPS, Trace, good

KILL = f"rank=3,step={KILL_STEP},microbatch=1,phase=backward"


def config(*specs: str, **changes: Any) -> DrillConfig:
    shape = Topology(
        pipeline_ranks=2,
        replicas=2,
        steps=STEPS,
        microbatches=4,
        schedule="1f1b",
        checkpoint_every=CHECKPOINT,
    )
    planned = tuple(fault_grammar.parse(spec) for spec in specs or (KILL,))
    return DrillConfig(topology=shape, faults=planned, **changes)


def digest(rank: int, version: int) -> dict[str, str]:
    """Replicas have the same, apart from where they are in their data."""
    stage = rank // 2
    return {name: f"{name}-of-stage-{stage}-at-{version}" for name in DIGEST_FIELDS} | {
        "data": f"rank {rank}"
    }


Recover = Callable[[Trace], None]


def copied(trace: Trace, generation: int = 2, joiner: int = 3, source: int = 2) -> None:
    """What a source and a joiner say."""
    where = {"generation": generation}
    trace.rank(joiner, "restore_begin", **where)
    trace.rank(source, "copy_begin", role="source", peers=[joiner], **where)
    trace.rank(joiner, "copy_begin", role="joiner", peers=[source], **where)
    trace.rank(
        joiner,
        "replica_received",
        0.12,
        version=KILL_STEP,
        digest="d1",
        sources=[{"rank": source, "digest": "d1"}],
        bytes=4096,
        **where,
    )
    trace.rank(joiner, "restore_end", version=KILL_STEP, **where)


def recovers(
    trace: Trace,
    strategies: dict[int, tuple[str, int]],
    generation: int = 2,
    target: int = KILL_STEP,
    sources: dict[int, list[int]] | None = None,
) -> None:
    """Until ranks get their state. `sources`: of ranks that get a replica's."""
    trace.recovers(generation, target, strategies)
    for entry in trace.events[-2]["ranks"]:
        if sources and entry["rank"] in sources:
            entry["sources"] = sources[entry["rank"]]


def kept(*others: tuple[int, str], at: int = KILL_STEP) -> dict[int, tuple[str, int]]:
    return dict.fromkeys(range(4), ("KEEP", at)) | {rank: (name, at) for rank, name in others}


def by_replica(trace: Trace) -> None:
    recovers(trace, kept((3, "REPLICA")), sources={3: [2]})
    for rank in range(4):
        trace.rank(rank, "group_built", generation=2)
    copied(trace)
    trace.state("RUNNING", 2, 0.02)


def by_undo(mode: str, exact: bool) -> Recover:
    def recover(trace: Trace) -> None:
        recovers(trace, kept((3, "REPLICA"), (2, "UNDO")), sources={3: [2]})
        trace.rank(2, "undone", generation=2, version=KILL_STEP, mode=mode, exact=exact, buckets=3)
        copied(trace)
        trace.state("RUNNING", 2, 0.02)

    return recover


def trace_of(
    recover: Recover = by_replica, victims: tuple[int, ...] = (3,), back_at: int = KILL_STEP
) -> Trace:
    trace = Trace.begun(0)
    for step in range(KILL_STEP):
        live_step(trace, step)
    for number, victim in enumerate(victims):
        trace.kill(victim, KILL_STEP, f"fault{number}")
        trace.pids[victim] = NEW_PID + victim
    recover(trace)
    for step in range(back_at, STEPS):
        live_step(trace, step)
    return trace.end(STEPS)


def live_step(trace: Trace, step: int) -> None:
    trace.step(step)
    for rank in (2, 3):
        trace.rank(rank, "loss", 0.0, step=step, dp_rank=rank - 2, loss=loss_at(step, rank - 2))


def loss_at(step: int, dp_rank: int) -> float:
    return 5.0 - 0.25 * step + 0.125 * dp_rank


def losses() -> Losses:
    return {step: {dp_rank: loss_at(step, dp_rank) for dp_rank in (0, 1)} for step in range(STEPS)}


def evidence(
    trace: Trace | None = None, version: int = KILL_STEP, generation: int = 2, **changes: Any
) -> Evidence:
    ours = {f"rank{rank}-v{STEPS}": digest(rank, STEPS) for rank in range(4)}
    ours |= {f"rank{rank}-v{version}-g{generation}": digest(rank, version) for rank in range(4)}
    twin = {f"rank{r}-v{v}": digest(r, v) for r in range(4) for v in range(STEPS + 1)}
    values = {"digests": ours, "twin": Twin(digests=twin, exit_code=0, losses=losses()), **changes}
    return good(trace or trace_of(), **values)
