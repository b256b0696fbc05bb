"""The report's part on data parallelism: copies, and undone and rolled-forward updates."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from swift_ft.fault_grammar import CorruptCopyFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import TRAINED_FIELDS, Check, all_of
from swift_ft.planner.strategies import may_copy


def checks(facts: Facts) -> list[Check]:
    if facts.asked.topology.replicas == 1:
        return []
    undone = [recovery for recovery in facts.recoveries if recovery.named("undone")]
    distrusted = any(isinstance(fault, CorruptCopyFault) for fault in facts.asked.faults)
    return [
        _agree_check(facts),
        *([_undo_check(facts)] if undone else []),
        *([_living_check(facts)] if may_copy(facts.asked.strategy) and not distrusted else []),
    ]


def _agree_check(facts: Facts) -> Check:
    """Checks that replicas of a stage hold the same bits, independently of the failure-free run."""
    name = "replicas hold the same state"
    answers: list[bool | None] = []
    wrong = []
    for comparison in facts.comparisons:
        shape = facts.asked.topology
        for replicas in chain.from_iterable(map(shape.states_of, range(shape.pipeline_ranks))):
            ranks = [r for r in replicas if str(r) in comparison.ranks]
            held = [comparison.ranks[str(rank)]["recovered"] for rank in ranks]
            answer = _same(held)
            answers.append(answer)
            if answer is False:
                wrong.append(f"ranks {', '.join(map(str, ranks))} {comparison.where}")
    return Check(name, all_of(answers), "; ".join(wrong))


def _same(digests: Sequence[Mapping[str, Any] | None]) -> bool | None:
    known = [[digest.get(name) for name in TRAINED_FIELDS] for digest in digests if digest is not None]
    if any(values != known[0] for values in known):
        return False
    whole = len(known) == len(digests) and all(None not in values for values in known)
    return True if whole else None


def _undo_check(facts: Facts) -> Check:
    name = "updates were taken back as asked"
    inexact = [recovery for recovery in facts.recoveries if recovery.inexact]
    if inexact and facts.asked.undo != "arithmetic":
        return Check(name, False, f"an undo was not exact, --undo is {facts.asked.undo}")
    return Check(name, True)


def corrupt_copy_check(events: Sequence[Event]) -> Check:
    """Checks that the rank that received a flipped bit refused the state for that reason."""
    name = "the corrupt copy was noticed"
    flipped = [event for event in events if event["event"] == "corrupted" and "stream" not in event]
    if not flipped:
        return Check(name, None, "no bit was flipped")
    answers = [_refused(event["rank"], events[events.index(event) + 1 :]) for event in flipped]
    answer = all_of(answers)
    return Check(
        name, answer, "the flipped bit was used" if answer is False else "the copy did not come to its end"
    )


def _refused(rank: int, later: Sequence[Event]) -> bool | None:
    """Returns whether this rank refused the copy that it was receiving. None: the copy did not finish, because a peer
    died."""
    for event in later:
        if event.get("rank") != rank:
            continue
        if event["event"] == "refused" and "is not what it sent" in str(event.get("reason")):
            return True
        if event["event"] == "replica_received":
            return False
        if event["event"] == "copy_begin":
            return None
    return None


def _is_lost_with_others(facts: Facts, rank: int, recovery: Recovery) -> bool:
    """Returns whether some stage of this rank's recovery group has no living replica."""
    shape, groups = facts.asked.topology, facts.asked.groups
    stages = {other for own in shape.stages_of(rank) for other in groups.stages(own)}
    states = chain.from_iterable(shape.states_of(shape.pipeline_rank_of(stage)) for stage in stages)
    return any(set(replicas) <= recovery.victims for replicas in states)


def _living_check(facts: Facts) -> Check:
    """Checks that a rank is not replayed or restored from a checkpoint if replicas of every stage of its recovery group
    live."""
    name = "living replicas were used"
    wrong = []
    for number, recovery in enumerate(facts.recoveries, start=1):
        for rank, (strategy, _) in recovery.strategies().items():
            living = set(facts.asked.topology.replicas_of(rank)) - recovery.victims
            if not living or _is_lost_with_others(facts, rank, recovery):
                continue
            if strategy in ("replay", "catch_up", "checkpoint"):
                wrong.append(
                    f"recovery {number}: {strategy} of rank {rank}, of which rank {min(living)} lives"
                )
    if facts.recoveries and not any(recovery.strategies() for recovery in facts.recoveries):
        return Check(name, None, "no plan in the trace")
    return Check(name, not wrong, "; ".join(wrong))


# Sections of the report.


def copies(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    return {
        "sources": {
            str(rank): sources
            for recovery in recoveries
            for rank, sources in sorted(recovery.sources().items())
        },
        "bytes_copied": sum(
            int(event.get("bytes") or 0) for r in recoveries for event in r.named("replica_received")
        ),
    }


def undo(recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """Returns `undo` of the report."""
    done = [event for recovery in recoveries for event in recovery.named("undone")]
    modes = sorted({str(event.get("mode")) for event in done})
    return {
        "mode": ", ".join(modes) if modes else None,
        "ranks": sorted({int(event["rank"]) for event in done}),
        "exact": all(event.get("exact") is True for event in done) if done else None,
        "buckets": sum(int(event.get("buckets") or 0) for event in done),
        "rolled_forward": sorted(
            {int(event["rank"]) for r in recoveries for event in r.named("roll_forward")}
        ),
    }
