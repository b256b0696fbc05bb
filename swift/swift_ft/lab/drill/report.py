"""Builds the report and its verdict from the evidence. Pure, so that each piece of evidence can be broken in a test.

`PASS` needs every check to be True. One False makes `FAIL`. One check without evidence (a missing digest or event)
makes `INCONCLUSIVE`: missing data is never PASS.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from swift_ft.fault_grammar import (
    CorruptCheckpointFault,
    CorruptCopyFault,
    CorruptFault,
    LogLossFault,
    RankFault,
    fault_id,
)
from swift_ft.lab.drill import report_strategies, shrinking, timeline
from swift_ft.lab.drill.config import DrillConfig, versions
from swift_ft.lab.drill.facts import Evidence, Facts
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import (
    TRAINED_FIELDS,
    Check,
    all_of,
    check_losses,
    compare_losses,
    losses_of,
)
from swift_ft.planner import SETTINGS
from swift_ft.planner.strategies import TABLE, may_copy

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 3}

# A stage recovered by several strategies (of its ranks, or in several recoveries) shows the most expensive one.
_COST = tuple(strategy.lower() for strategy in TABLE)


def build(asked: DrillConfig, evidence: Evidence) -> dict[str, Any]:
    facts = Facts.of(asked, evidence)
    shape = asked.topology
    curves = compare_losses(
        losses_of(facts.events),
        evidence.twin.losses,
        shape.steps,
        shape.replicas * shape.shards,
        vacancies=asked.shrinks,
    )
    survivors = timeline.survivors_kept(facts.events, shape.ranks)
    shown = [_recovery(facts, recovery) for recovery in facts.recoveries]
    checks = [
        *_run_checks(facts),
        *(comparison.check() for comparison in facts.comparisons),
        *checks_of_replicas(facts),
        *report_strategies.checks(facts),
        *([check_losses(curves)] if facts.at_end.inexact else []),
        _survivors_check(survivors),
        *_recovery_checks(facts),
        *_log_checks(facts),
        *check_helpers(facts.recoveries),
        *replay_checks(shown),
        _negative_control_check(facts),
    ]
    verdict = _verdict(checks)
    named = [str(event.get("reason", "")) for event in facts.named("not_exact")]
    inexact = bool(named) or asked.drops or any(recovery.inexact for recovery in facts.recoveries)
    exact = not inexact and (not facts.fell_back or _restores(facts))
    return {
        "verdict": verdict,
        "reason": _reason(facts, verdict, checks, curves),
        "checks": [{"name": check.name, "answer": check.answer, "detail": check.detail} for check in checks],
        "seed": asked.seed,
        "rerun": asked.rerun(),
        "versions": versions(),
        "topology": asked.shape(),
        "faults": _faults(facts),
        "strategy": _strategy(facts, facts.recoveries),
        "exact": verdict == PASS and exact,
        "not_exact": named,
        "by_the_loss_curve": asked.promises_no_bits if facts.at_end.inexact else "",
        # Equality with the failure-free run; a drill that drops batches is not compared with it.
        "bitwise_equal": not asked.drops and all_of(each.equal for each in facts.comparisons),
        "digests": {
            "recovery": [comparison.as_json() for comparison in facts.at_recovery],
            "end": facts.at_end.as_json(),
        },
        **report_strategies.sections(facts),
        "timeline": [{**event, "t": round(event["t"] - facts.events[0]["t"], 6)} for event in facts.events],
        **_cost(facts, facts.recoveries),
        **copies(facts.recoveries),
        "undo": undo(facts.recoveries),
        "loss": curves,
        "recoveries": shown,
        "survivors_kept": None if survivors is None else all(survivors.values()),
        "survivors_freed_seconds": max(
            (r.freed_seconds for r in facts.recoveries if r.freed_seconds is not None), default=None
        ),
        "log": {**_log(facts), **log_places(facts.events)},
        "corruption": facts.flipped,
        "negative_control": evidence.negative_control or {"caught": None},
        "rehearsals": timeline.rehearsals(facts.events),
        "throughput": timeline.throughput(facts.events, facts.recoveries, shape.ranks),
    }


def _verdict(checks: Sequence[Check]) -> str:
    return {True: PASS, False: FAIL, None: INCONCLUSIVE}[all_of(check.answer for check in checks)]


def _reason(facts: Facts, verdict: str, checks: Sequence[Check], curves: Mapping[str, Any] | None) -> str:
    if verdict != PASS:
        wanted = False if verdict == FAIL else None
        return "; ".join(
            f"{check.name}: {check.detail or 'no evidence'}" for check in checks if check.answer is wanted
        )
    fell_back, compared = facts.fell_back, facts.comparisons
    how = f"nothing was replayed: {'; '.join(fell_back)}" if fell_back else "recovered as planned"
    if facts.at_end.inexact:
        assert curves is not None, "the verdict rests on them"
        equal = sum(comparison.equal is True for comparison in compared)
        return (
            f"{how}; {facts.asked.promises_no_bits}, so no bits are promised: at {equal} of {len(compared)} places "
            f"every digest equals the failure-free run's; {check_losses(curves).detail}"
        )
    if facts.asked.drops:
        return (
            f"{how}; not exact, as nobody computed the batches of lost ranks: every digest equals that of an "
            "independent calculation without them"
        )
    reason = f"{how}; every digest equals the failure-free run's"
    if facts.asked.topology.replicas > 1 and not facts.asked.exact_reduction:
        reason += (
            "; gradients were added in the backend's order, which another layout of buckets would change"
        )
    return reason


def _run_checks(facts: Facts) -> list[Check]:
    """Checks that both runs finished, the faults were injected, and no other process failed."""
    evidence, fired = facts.evidence, facts.fired
    ended: bool | None = evidence.exit_code == 0
    if not ended and not fired:
        # It failed before any fault was injected: a problem of the machine, not evidence about recovery.
        ended = None
    stalled = evidence.exit_code is None
    how = "nothing happened any more" if stalled else f"exit code {evidence.exit_code}"
    twin = evidence.twin
    without = f"exit code {twin.exit_code}, {twin.recoveries} recoveries"
    absent = [str(fault) for index, fault in enumerate(facts.asked.faults) if fault_id(index) not in fired]
    never = f"never happened: {'; '.join(absent)}"
    return [
        Check("the run finished", ended, how),
        Check(
            "the failure-free run finished", (twin.exit_code == 0 and not twin.recoveries) or None, without
        ),
        Check("every fault was carried out", None if absent else True, never),
        _unplanned_check(facts),
    ]


def _unplanned_check(facts: Facts) -> Check:
    """Checks that only processes killed by a fault died, and that every recovery has a cause."""
    told = {event["pid"] for event in facts.named("fault")}
    died = {
        f"rank {event['rank']} (exit code {event.get('code')})"
        for event in facts.named("child_exit")
        if event.get("code") != 0 and event["pid"] not in told
    }
    explained = facts.flipped is not None
    causeless = [r for r in facts.recoveries if not (r.faults or r.servers_killed or r.returned or explained)]
    detail = ", ".join([*sorted(died), *(f"a recovery of itself ({r.reasons[0]})" for r in causeless)])
    if facts.evidence.exit_code != 0 and not facts.fired:
        return Check("nothing else failed", None, detail or "the run did not get to its first fault")
    return Check("nothing else failed", not detail, detail)


def _survivors_check(survivors: Mapping[int, bool] | None) -> Check:
    if survivors is None:
        return Check("survivors kept their processes", None, "some rank left no trace")
    replaced = [str(rank) for rank, kept in survivors.items() if not kept]
    return Check("survivors kept their processes", not replaced, f"rank {', '.join(replaced)} changed pid")


def _recovery_checks(facts: Facts) -> list[Check]:
    checks = []
    if any(isinstance(fault, RankFault) for fault in facts.asked.faults):
        gaps = [
            f"recovery {n}: no {', '.join(r.missing)}" for n, r in enumerate(facts.recoveries) if r.missing
        ]
        detail = "; ".join(gaps) if facts.recoveries else "no recovery in the trace"
        checks.append(Check("the timeline is whole", True if facts.recoveries and not gaps else None, detail))
    expected = [recovery for recovery in facts.recoveries if recovery.replay_expected]
    if expected:
        verified = sum(recovery.replayed("verified") for recovery in expected)
        unverified = [r for r in expected if not r.missing and not r.replayed("verified")]
        checks.append(
            Check("replayed sends were verified", True if verified and not unverified else None, "none was")
        )
    checks.append(_strategy_check(facts))
    return checks


def _strategy_check(facts: Facts) -> Check:
    """Checks that the requested strategy was used, or that a corrupt log or copy was detected and not used."""
    fell_back = facts.fell_back
    if any(isinstance(fault, CorruptFault) for fault in facts.asked.faults):
        name = "the corrupt log was noticed"
        if facts.flipped is None:
            return Check(name, None, "no bit was flipped")
        return Check(name, bool(fell_back), "; ".join(fell_back) or "the flipped bit was replayed")
    if any(isinstance(fault, CorruptCheckpointFault) for fault in facts.asked.faults):
        return _damaged_checkpoint_check(facts)
    if any(isinstance(fault, CorruptCopyFault) for fault in facts.asked.faults):
        return corrupt_copy_check(facts.events)
    name = "the strategy was the one asked for"
    used = {strategy for recovery in facts.recoveries for strategy, _ in recovery.strategies().values()}
    if facts.recoveries and not used:
        return Check(name, None, "no plan in the trace")
    if SETTINGS[facts.asked.strategy].only_restores:
        return Check(name, all(r.fell_back for r in facts.recoveries), "something was replayed")
    if not facts.asked.groups.logs:
        return Check(name, not any(r.replay_expected for r in facts.recoveries), "something was replayed")
    if fell_back and not (_may_lose_records(facts) or report_strategies.may_leave_snapshots(facts)):
        return Check(name, False, f"fell back to a checkpoint: {'; '.join(fell_back)}")
    other = used - {strategy.lower() for strategy in SETTINGS[_planned_by(facts)].permits}
    return Check(name, not other, f"also used: {', '.join(sorted(other))}" if other else "")


def _planned_by(facts: Facts) -> str:
    """Returns the strategy that planned the recovery. A stage that moves is restored as with "auto", because no other
    rank holds it."""
    return "auto" if shrinking.moves(facts.asked) else facts.asked.strategy


def _damaged_checkpoint_check(facts: Facts) -> Check:
    name, flipped = "the damaged checkpoint was noticed", facts.flipped
    if flipped is None:
        return Check(name, None, "no bit was flipped")
    refused = any(
        event["rank"] == flipped["rank"] and "is corrupt" in event["reason"]
        for event in facts.named("refused")
    )
    reached = [r.target_version for r in facts.recoveries if r.fell_back and r.target_version is not None]
    before = any(version < flipped["version"] for version in reached)
    return Check(name, refused and before, "" if refused and before else "the flipped bit was loaded")


def _restores(facts: Facts) -> bool:
    """Returns whether going back to a saved state was requested: by the strategy, or by a single recovery group, which
    logs no tensors."""
    setting = SETTINGS[facts.asked.strategy]
    return setting.only_restores or bool(setting.snapshot_every) or not facts.asked.groups.logs


def _negative_control_check(facts: Facts) -> Check:
    if not facts.asked.groups.logs:  # there is no log in which a bit could be flipped
        records = _log(facts)["records"]
        return Check("nothing was logged", None if records is None else records == 0, f"{records} records")
    control = facts.evidence.negative_control or {}
    caught = control.get("caught")
    detail = str(control.get("reason", "")) or (
        "a flipped bit was read back as good" if caught is False else ""
    )
    return Check("a flipped bit in the log is caught", caught, detail)


def _faults(facts: Facts) -> list[dict[str, Any]]:
    shown = []
    for index, fault in enumerate(facts.asked.faults):
        at = facts.fired.get(fault_id(index))
        t = None if at is None else at - facts.events[0]["t"]
        shown.append({"id": fault_id(index), "spec": str(fault), "fired": at is not None, "t": t})
    return shown


def _strategy(facts: Facts, recoveries: Sequence[Recovery]) -> dict[str, str]:
    """Returns `strategy` per stage; over several recoveries the most expensive one."""
    strategies: dict[int, str] = {}
    for recovery in recoveries:
        for rank, (name, _) in recovery.strategies().items():
            for stage in facts.asked.topology.stages_of(rank):
                strategies[stage] = max(strategies.get(stage, name), name, key=_COST.index)
    return {str(stage): strategies[stage] for stage in sorted(strategies)}


def _recovery(facts: Facts, recovery: Recovery) -> dict[str, Any]:
    return {
        "generations": recovery.generations,
        "reasons": recovery.reasons,
        "faults": [event.get("id") for event in recovery.faults],
        "target_version": recovery.target_version,
        "plan_reason": (recovery.plan or {}).get("reason"),
        "plans": len(recovery.planned),
        "strategy": _strategy(facts, [recovery]),
        "ranks": {
            str(rank): {"strategy": name, "reason": reason}
            for rank, (name, reason) in sorted(recovery.strategies().items())
        },
        **_cost(facts, [recovery]),
        **copies([recovery]),
        "undo": undo([recovery]),
        "shared_replays": shared_replays(recovery),
        "replays": replays(recovery),
        "interruptions": interruptions(recovery),
        "verified_sends": recovery.replayed("verified"),
        "survivors_freed_seconds": recovery.freed_seconds,
    }


def _cost(facts: Facts, recoveries: Sequence[Recovery]) -> dict[str, Any]:
    """Returns seconds by phase, steps and microbatches, summed over the recoveries."""
    told = [recovery.seconds for recovery in recoveries if recovery.seconds is not None]
    seconds = {}
    for name in dict.fromkeys(chain.from_iterable(told)):
        seconds[name] = round(sum(phases.get(name, 0.0) for phases in told), 6)
    lost = [recovery.steps_lost for recovery in recoveries]
    steps_lost, shape = sum(steps or 0 for steps in lost), facts.asked.topology
    redone = steps_lost * shape.microbatches * shape.ranks
    return {
        "recovery_seconds": seconds if told and len(told) == len(recoveries) else None,
        "steps_lost": None if None in lost else steps_lost,
        "steps_replayed": sum(recovery.replayed("steps") for recovery in recoveries),
        "microbatches_recomputed": sum(recovery.replayed("microbatches") for recovery in recoveries) + redone,
    }


def _log(facts: Facts) -> dict[str, Any]:
    """Returns the records and bytes logged by ranks that ran to the end; a killed process's count is lost."""
    ended = [event for event in facts.named("finished") if "records" in event]
    logged = {name: sum(event[name] for event in ended) if ended else None for name in ("records", "bytes")}
    verified = sum(recovery.replayed("verified") for recovery in facts.recoveries)
    return {**logged, "verified_sends": verified}


# Log servers: placement of streams, moves, and whether a loss was handled.


def log_places(events: Sequence[Event]) -> dict[str, Any]:
    """Returns `placement`: rank -> its log servers at the start; `moved`; `lost`, all of `log` of the
    report."""
    placed: dict[int, list[str]] = {}
    now: dict[int, list[str]] = {}
    """The servers of a rank; a replacement process uses its predecessor's."""
    moved: list[dict[str, Any]] = []
    for event in events:
        if event["event"] != "log_placed":
            continue
        rank, servers = event["rank"], event["servers"]
        placed.setdefault(rank, servers)
        before = now.setdefault(rank, servers)
        if servers != before:
            moved.append({"rank": rank, "generation": event["generation"], "from": before, "to": servers})
        now[rank] = servers
    return {
        "placement": {str(rank): placed[rank] for rank in sorted(placed)},
        "moved": moved,
        "lost": [str(event["reason"]) for event in events if event["event"] == "log_server_lost"],
    }


def _log_checks(facts: Facts) -> list[Check]:
    """Checks that each log server killed for good was given up."""
    wanted = sum(isinstance(fault, LogLossFault) for fault in facts.asked.faults)
    if not wanted:
        return []
    lost = sum(len(recovery.named("log_server_lost")) for recovery in facts.recoveries)
    detail = f"{lost} of {wanted} were given up"
    return [Check("the lost log server was given up", lost == wanted, detail)]


def _may_lose_records(facts: Facts) -> bool:
    """Returns whether a fallback to a checkpoint is permitted: with one copy, records of the lost log server are gone,
    so a replay that needs them is impossible. The plan must give that reason."""
    return facts.asked.copies == 1 and all("is lost" in reason for reason in facts.fell_back)


# Data parallelism: copies, and undone and rolled-forward updates.


def checks_of_replicas(facts: Facts) -> list[Check]:
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
    flipped = [event for event in events if event["event"] == "corrupted" and "byte" in event]
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


# Replays: who helped, and what an interruption cost.


def shared_replays(recovery: Recovery) -> list[dict[str, Any]]:
    """Returns for each shared replay the ranks, their microbatches per step, the steps, and who declined and why."""
    ends = {event["rank"]: event for event in recovery.made("replay_end")}
    shown = []
    for begun in recovery.made("help_begin"):
        rank, helpers = begun["rank"], list(begun["helpers"])
        left = next(
            (event.get("reason", "") for event in recovery.made("help_end") if event["rank"] == rank), ""
        )
        computed = {e["rank"]: e["microbatches"] for e in recovery.made("helped") if e["owner"] == rank}
        shown.append(
            {
                "rank": rank,
                "helpers": helpers,
                "workers": 1 + len(helpers),
                "shares": list(begun["shares"]),
                "steps": ends.get(rank, {}).get("shared_steps"),
                "microbatches": {str(helper): computed.get(helper) for helper in helpers},
                "alone_because": left,
                "declined": dict(begun.get("declined") or {}),
            }
        )
    return shown


def check_helpers(recoveries: Sequence[Recovery]) -> list[Check]:
    """Checks that planned help was given, in the recoveries that were not interrupted. No check if none was planned."""
    planned = [recovery for recovery in recoveries if (recovery.made_by or {}).get("help")]
    if not planned:
        return []
    name = "planned help was given"
    shared = [replay for recovery in planned for replay in shared_replays(recovery)]
    without = [
        f"rank {replay['rank']}: {replay['alone_because'] or replay['declined'] or 'no shared step'}"
        for replay in shared
        if not replay["steps"]
    ]
    if len(shared) < sum(len((recovery.made_by or {})["help"]) for recovery in planned):
        return [Check(name, None, "a shared replay is not in the trace")]
    return [Check(name, not without, "; ".join(without))]


def replays(recovery: Recovery) -> list[dict[str, Any]]:
    ends = recovery.made("replay_end")
    return [{name: end[name] for name in ("rank", "steps", "seconds")} for end in ends if "seconds" in end]


def interruptions(recovery: Recovery) -> list[dict[str, Any]]:
    """Returns, for each helper that died while helping, the steps its owner kept and repeated, and when the owner
    continued."""
    shown = []
    for fault in recovery.faults:
        helped = [
            e for e in recovery.named("help_begin") if fault["rank"] in e["helpers"] and e["t"] < fault["t"]
        ]
        if not helped or helped[-1]["generation"] == recovery.generation:
            continue
        owner = helped[-1]["rank"]
        own = [e for e in recovery.window if e.get("rank") == owner and e["t"] > helped[-1]["t"]]
        again = [e for e in own if e.get("generation") == recovery.generation]
        replaying_t = min((e["t"] for e in again if e["event"] == "replay_begin"), default=float("inf"))
        ended = [e for e in own if e["event"] == "step_end" and e["replay"]]
        resumed = [e["t"] for e in own if e["event"] == "step_begin" and e["replay"] and e["t"] > replaying_t]
        shown.append(
            {
                "helper": fault["rank"],
                "owner": owner,
                "steps_kept": sum(e["t"] < replaying_t for e in ended),
                "steps_again": len(ended) - len({e["step"] for e in ended}),
                "helpers_after": next(
                    (e["helpers"] for e in reversed(again) if e["event"] == "help_begin"), []
                ),
                "seconds": round(min(resumed) - fault["t"], 6) if resumed else None,
            }
        )
    return shown


def replay_checks(shown: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Returns the check of interruptions. `shown`: the recoveries of the report."""
    cut = [interruption for recovery in shown for interruption in recovery["interruptions"]]
    again = sum(interruption["steps_again"] for interruption in cut)
    return [Check("no replayed step was done twice", again == 0, f"{again} steps were")] if cut else []
