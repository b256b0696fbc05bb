"""The verdict: from evidence to the report. Pure, so that each piece of evidence can be broken in a test.

`PASS` needs every check to be answered with yes. One "no" makes `FAIL`; one question without an answer (a
digest that is not there, an event that nobody wrote) makes `INCONCLUSIVE`: no data is never PASS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swift.drill import helped, logs, loss, prediction, replaying, replicas, timeline
from swift.drill.config import DrillConfig, versions
from swift.drill.faults import CorruptCopyFault, CorruptFault, RankFault, fault_id
from swift.drill.timeline import Event, Recovery
from swift.drill.verdict_checks import Check, Comparison, Digest, all_of, compare
from swift.recovery.strategies import TABLE, permitted

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}

# A stage that got back in different ways (its ranks, or several recoveries) shows the one that cost most.
_COST = tuple(strategy.lower() for strategy in TABLE)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that a drill leaves behind."""

    events: Sequence[Event]
    """Of the run with faults, by time."""
    digests: Mapping[str, Digest]
    """``rank0-v10-g2`` (at a recovery) and ``rank0-v30`` (at the end) -> digests."""
    twin_digests: Mapping[str, Digest]
    """``rank0-v10`` -> digests, for every version."""
    exit_code: int | None
    """Of the run's launcher; None: it did not end by itself."""
    stalled: bool = False
    """It was cut off because nothing happened any more."""
    twin_exit_code: int | None = None
    twin_recoveries: int = 0
    fired: frozenset[str] = frozenset()
    """Ids of the faults that were carried out."""
    corruption: Mapping[str, Any] | None = None
    """What the drill flipped in the live log."""
    log: Mapping[str, Any] | None = None
    """``records`` and ``bytes`` in the log."""
    negative_control: Mapping[str, Any] | None = None
    twin_losses: loss.Losses = field(default_factory=dict)
    measured: prediction.Measured = field(default_factory=prediction.Measured)


def build(config: DrillConfig, evidence: Evidence) -> dict[str, Any]:
    """The whole report."""
    found = timeline.recoveries(evidence.events)
    inexact = any(recovery.inexact for recovery in found)
    at_recovery, at_end = _comparisons(config, evidence, found)
    bitwise_equal = all_of([*(comparison.equal for comparison in at_recovery), at_end.equal])
    curves = loss.curves(
        loss.losses(evidence.events),
        evidence.twin_losses,
        config.topology.steps,
        config.topology.replicas,
    )
    survivors = timeline.survivors_kept(evidence.events, config.topology.ranks)
    predicted, prediction_checks = prediction.section(config, evidence.events, found, evidence.measured)
    shown = [_recovery(config, evidence, recovery) for recovery in found]
    checks = [
        *_run_checks(config, evidence, found),
        *(comparison.check() for comparison in (*at_recovery, at_end)),
        *replicas.checks(config, found, [*at_recovery, at_end]),
        *([loss.check(curves)] if at_end.inexact else []),
        _survivors_check(survivors),
        *_recovery_checks(config, evidence, found),
        *logs.checks(config, found),
        *helped.check(config.helpers, found),
        *prediction_checks,
        *replaying.checks(config, shown),
        _negative_control_check(config, evidence),
    ]
    verdict = _verdict(checks)
    fell_back = [recovery.fell_back for recovery in found if recovery.fell_back]
    named = [str(event.get("reason", "")) for event in evidence.events if event["event"] == "not_exact"]
    exact = not inexact and not named and (not fell_back or _restores(config))
    return {
        "verdict": verdict,
        "reason": _reason(config, verdict, checks, fell_back, [*at_recovery, at_end], curves),
        "checks": [{"name": check.name, "answer": check.answer, "detail": check.detail} for check in checks],
        "seed": config.seed,
        "rerun": config.rerun(),
        "versions": versions(),
        "topology": config.shape(),
        "faults": _faults(config, evidence),
        **_strategy(config, found),
        "exact": verdict == PASS and exact,
        "not_exact": named,
        "bitwise_equal": bitwise_equal,
        "digests": {"recovery": [c.as_json() for c in at_recovery], "end": at_end.as_json()},
        "timeline": timeline.shown(evidence.events, found),
        **_cost(config, found),
        **replicas.copies(found),
        "undo": replicas.undo(config, found),
        "reduction": replicas.reduction(config, evidence.events),
        "loss": curves,
        "recoveries": shown,
        "survivors_kept": None if survivors is None else all(survivors.values()),
        "survivors_freed_seconds": max(
            (r.freed_seconds for r in found if r.freed_seconds is not None), default=None
        ),
        "log": {**_log(evidence, found), **logs.places(evidence.events)},
        "prediction": predicted,
        "corruption": evidence.corruption,
        "negative_control": _negative_control(evidence, found),
        "throughput": timeline.throughput(evidence.events, found, config.topology.ranks),
    }


def _comparisons(
    config: DrillConfig, evidence: Evidence, found: Sequence[Recovery]
) -> tuple[list[Comparison], Comparison]:
    """At each recovery, and at the end. Behind what was asked for and promises no bits, they may differ."""
    at_recovery: list[Comparison] = []
    inexact = False

    def at(version: int, generation: int | None) -> Comparison:
        ours, twin = evidence.digests, evidence.twin_digests
        return compare(version, generation, config.topology.ranks, ours, twin, inexact=inexact)

    for recovery in found:
        inexact = inexact or (recovery.inexact and config.undo == "arithmetic")
        if recovery.target_version is not None:
            at_recovery.append(at(int(recovery.target_version), recovery.generation))
    return at_recovery, at(config.topology.steps, None)


def _verdict(checks: Sequence[Check]) -> str:
    return {True: PASS, False: FAIL, None: INCONCLUSIVE}[all_of(check.answer for check in checks)]


def _reason(
    config: DrillConfig,
    verdict: str,
    checks: Sequence[Check],
    fell_back: Sequence[str],
    compared: Sequence[Comparison],
    curves: Mapping[str, Any] | None,
) -> str:
    if verdict != PASS:
        wanted = False if verdict == FAIL else None
        return "; ".join(
            f"{check.name}: {check.detail or 'no evidence'}" for check in checks if check.answer is wanted
        )
    how = f"nothing was replayed: {'; '.join(fell_back)}" if fell_back else "recovered as planned"
    if compared[-1].inexact:
        assert curves is not None, "the verdict rests on them"
        equal = sum(comparison.equal is True for comparison in compared)
        return (
            f"{how}; an arithmetic undo was used, which promises no bits: at {equal} of {len(compared)} places every "
            f"digest equals the failure-free run's; {loss.check(curves).detail}"
        )
    said = f"{how}; every digest equals the failure-free run's"
    if config.topology.replicas > 1 and not replicas.reduction_exact(config):
        said += "; gradients were added in the backend's order, which another layout of buckets would change"
    return said


def _run_checks(config: DrillConfig, evidence: Evidence, found: Sequence[Recovery]) -> list[Check]:
    """Both runs ended, the faults happened, and nothing else did."""
    how = "nothing happened any more" if evidence.stalled else f"exit code {evidence.exit_code}"
    ended: bool | None = evidence.exit_code == 0
    if not ended and not evidence.fired:
        # It failed before anything was done to it: the machine's fault, and no word about recovery.
        ended = None
    if evidence.exit_code is None and not evidence.stalled:
        ended, how = None, "it was cut off"
    finished = Check("the run finished", ended, how)
    twin_ok = evidence.twin_exit_code == 0 and evidence.twin_recoveries == 0
    twin = Check(
        "the failure-free run finished",
        True if twin_ok else None,
        f"exit code {evidence.twin_exit_code}, {evidence.twin_recoveries} recoveries",
    )
    traced = timeline.fault_ids(evidence.events)
    absent = []
    for index, fault in enumerate(config.faults):
        seen = fault_id(index) in evidence.fired
        if isinstance(fault, RankFault):
            seen = seen and fault_id(index) in traced
        if not seen:
            absent.append(str(fault))
    fired = Check(
        "every fault was carried out", None if absent else True, f"never happened: {'; '.join(absent)}"
    )
    return [finished, twin, fired, _unplanned_check(evidence, found)]


def _unplanned_check(evidence: Evidence, found: Sequence[Recovery]) -> Check:
    """Nothing died that was not told to."""
    told = {event["pid"] for event in evidence.events if event["event"] == "fault"}
    died = {
        f"rank {event['rank']} (exit code {event.get('code')})"
        for event in evidence.events
        if event["event"] == "child_exit" and event.get("code") != 0 and event["pid"] not in told
    }
    causeless = [r for r in found if not (r.faults or r.servers_killed) and evidence.corruption is None]
    detail = ", ".join([*sorted(died), *(f"a recovery of itself ({r.reasons[0]})" for r in causeless)])
    if evidence.exit_code != 0 and not evidence.fired:
        return Check("nothing else failed", None, detail or "the run did not get to its first fault")
    return Check("nothing else failed", not detail, detail)


def _survivors_check(survivors: Mapping[int, bool] | None) -> Check:
    if survivors is None:
        return Check("survivors kept their processes", None, "some rank left no trace")
    replaced = [str(rank) for rank, kept in survivors.items() if not kept]
    return Check("survivors kept their processes", not replaced, f"rank {', '.join(replaced)} changed pid")


def _recovery_checks(config: DrillConfig, evidence: Evidence, found: Sequence[Recovery]) -> list[Check]:
    checks = []
    if any(isinstance(fault, RankFault) for fault in config.faults):
        gaps = [f"recovery {n}: no {', '.join(r.missing)}" for n, r in enumerate(found) if r.missing]
        detail = "; ".join(gaps) if found else "no recovery in the trace"
        checks.append(Check("the timeline is whole", True if found and not gaps else None, detail))
    expected = [recovery for recovery in found if recovery.replay_expected]
    if expected:
        verified = sum(recovery.replayed("verified") for recovery in expected)
        unverified = [r for r in expected if not r.missing and not r.replayed("verified")]
        checks.append(
            Check("replayed sends were verified", True if verified and not unverified else None, "none was")
        )
    checks.append(_strategy_check(config, evidence, found))
    return checks


def _strategy_check(config: DrillConfig, evidence: Evidence, found: Sequence[Recovery]) -> Check:
    """What was asked for took place; a corrupt log or copy was noticed and not used."""
    fell_back = [recovery.fell_back for recovery in found if recovery.fell_back]
    if any(isinstance(fault, CorruptFault) for fault in config.faults):
        name = "the corrupt log was noticed"
        if evidence.corruption is None:
            return Check(name, None, "no bit was flipped")
        return Check(name, bool(fell_back), "; ".join(fell_back) or "the flipped bit was replayed")
    if any(isinstance(fault, CorruptCopyFault) for fault in config.faults):
        return replicas.corrupt_copy_check(evidence.events)
    name = "the strategy was the one asked for"
    used = {strategy for recovery in found for strategy, _ in recovery.strategies().values()}
    if found and not used:
        return Check(name, None, "no plan in the trace")
    if config.strategy == "checkpoint":
        return Check(name, all(r.fell_back for r in found), "something was replayed")
    if not config.groups.logs:
        return Check(name, not any(r.replay_expected for r in found), "something was replayed")
    if fell_back and not logs.may_fall_back(config, found):
        return Check(name, False, f"fell back to a checkpoint: {'; '.join(fell_back)}")
    other = used - {strategy.lower() for strategy in permitted(config.strategy)}
    return Check(name, not other, f"also used: {', '.join(sorted(other))}" if other else "")


def _negative_control(evidence: Evidence, found: Sequence[Recovery]) -> dict[str, Any]:
    """A flipped bit in a log; and whether what replicas gave is what joiners got."""
    control = dict(evidence.negative_control or {"caught": None})
    copied = [recovery for recovery in found if replicas.copied(recovery)]
    if copied:
        control["copies"] = {
            "received": sum(len(recovery.received) for recovery in copied),
            "equal_to_source": all_of(replicas.copy_equal(recovery) for recovery in copied),
        }
    return control


def _restores(config: DrillConfig) -> bool:
    """Going back to the checkpoint is what was asked for."""
    return config.strategy == "checkpoint" or not config.groups.logs


def _negative_control_check(config: DrillConfig, evidence: Evidence) -> Check:
    if not config.groups.logs:  # there is no log in which a bit could be flipped
        records = (evidence.log or {}).get("records")
        return Check("nothing was logged", None if records is None else records == 0, f"{records} records")
    control = evidence.negative_control or {}
    caught = control.get("caught")
    detail = str(control.get("reason", "")) or (
        "a flipped bit was read back as good" if caught is False else ""
    )
    return Check("a flipped bit in the log is caught", caught, detail)


def _faults(config: DrillConfig, evidence: Evidence) -> list[dict[str, Any]]:
    times = {
        str(event.get("id")): event["t"] - evidence.events[0]["t"]
        for event in evidence.events
        if event["event"] in ("fault", "service_killed", "corrupted")
    }
    return [
        {
            "id": fault_id(index),
            "spec": str(fault),
            "fired": fault_id(index) in evidence.fired,
            "t": times.get(fault_id(index)),
        }
        for index, fault in enumerate(config.faults)
    ]


def _strategy(config: DrillConfig, found: Sequence[Recovery]) -> dict[str, Any]:
    """`strategy` and `strategy_reasons` per stage; over several recoveries the dearest."""
    strategies: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for recovery in found:
        for rank, (name, reason) in recovery.strategies().items():
            for stage in config.topology.stages_of(rank):
                held = strategies.get(str(stage))
                if held is None or _cost_of(name) > _cost_of(held):
                    strategies[str(stage)], reasons[str(stage)] = name, reason
    ordered = sorted(strategies, key=int)
    return {
        "strategy": {stage: strategies[stage] for stage in ordered},
        "strategy_asked": config.strategy,
        "strategy_reasons": {stage: reasons[stage] for stage in ordered},
    }


def _cost_of(strategy: str) -> int:
    return _COST.index(strategy) if strategy in _COST else len(_COST)


def _recovery(config: DrillConfig, evidence: Evidence, recovery: Recovery) -> dict[str, Any]:
    return {
        "generations": recovery.generations,
        "reasons": recovery.reasons,
        "faults": [event.get("id") for event in recovery.faults],
        "target_version": recovery.target_version,
        "plan_reason": (recovery.plan or {}).get("reason"),
        "plans": len(recovery.planned),
        **_strategy(config, [recovery]),
        "ranks": {
            str(rank): {"strategy": name, "reason": reason}
            for rank, (name, reason) in sorted(recovery.strategies().items())
        },
        **_cost(config, [recovery]),
        **replicas.copies([recovery]),
        "undo": replicas.undo(config, [recovery]),
        "shared_replays": helped.replays([recovery]),
        "replays": replaying.replays(config, evidence.events, recovery, evidence.measured),
        "interruptions": replaying.interruptions(evidence.events, recovery),
        "verified_sends": recovery.replayed("verified"),
        "filled_sends": recovery.replayed("filled"),
        "records_read": recovery.replayed("records"),
        "log_wait_seconds": round(sum(float(e.get("log_wait_s") or 0.0) for e in recovery.replays), 6),
        "survivors_freed_seconds": recovery.freed_seconds,
    }


def _cost(config: DrillConfig, found: Sequence[Recovery]) -> dict[str, Any]:
    """Seconds by phase, steps and microbatches: sums over the recoveries."""
    seconds: dict[str, float] | None = None
    if found and all(recovery.seconds is not None for recovery in found):
        names = ("detect", "fence", "plan", "rebuild", "restore", "replay", "rejoin", "total", "superseded")
        seconds = {
            name: round(sum((recovery.seconds or {}).get(name, 0.0) for recovery in found), 6)
            for name in names
            if name != "superseded" or any(name in (recovery.seconds or {}) for recovery in found)
        }
    lost = [recovery.steps_lost for recovery in found]
    redone = sum(steps or 0 for steps in lost) * config.topology.microbatches * config.topology.ranks
    return {
        "recovery_seconds": seconds,
        "steps_lost": None if None in lost else sum(steps or 0 for steps in lost),
        "steps_replayed": sum(recovery.replayed("steps") for recovery in found),
        "microbatches_recomputed": sum(recovery.replayed("microbatches") for recovery in found) + redone,
    }


def _log(evidence: Evidence, found: Sequence[Recovery]) -> dict[str, Any]:
    return {
        "records": None,
        "bytes": None,
        **(evidence.log or {}),
        "verified_sends": sum(recovery.replayed("verified") for recovery in found),
        **_unlogged([event for event in evidence.events if event["event"] == "unlogged"]),
    }


def _unlogged(events: Sequence[Event]) -> dict[str, Any]:
    """What was dropped because the log could not keep up; nothing, where that did not happen."""
    if not events:
        return {}
    return {
        "unlogged": {
            "first_step": min(event["first_step"] for event in events),
            "last_step": max(event["last_step"] for event in events),
            "ranks": sorted({event["rank"] for event in events}),
            "records": sum(event["records"] for event in events),
            "bytes": sum(event["bytes"] for event in events),
        }
    }
