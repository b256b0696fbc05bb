"""The report's part on the strategy "snapshot": the copies, the ones restored, and their cost.

The version that a recovery should reach is derived from the copies that ranks reported and from which of their
processes live, independently of the planner.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from swift_ft.fault_grammar import CorruptCopyFault
from swift_ft.lab.drill.facts import Facts
from swift_ft.lab.drill.faults import SNAPSHOT
from swift_ft.lab.drill.timeline import Event, Recovery
from swift_ft.lab.drill.verdict_checks import Check, all_of


def checks(facts: Facts) -> list[Check]:
    """Returns the additional checks of a drill that takes snapshots."""
    if not facts.asked.snapshot_every:
        return []
    return [_newest_check(facts), _same_check(facts), _lost_check(facts)]


def may_fall_back(facts: Facts) -> bool:
    """Returns whether a fallback to a checkpoint is permitted: no snapshot is whole any more, the checkpoint is newer,
    or a snapshot was refused."""
    if not facts.asked.snapshot_every:
        return False
    corrupt = any(isinstance(fault, CorruptCopyFault) for fault in facts.asked.faults)
    return corrupt or all(_had_to(facts, recovery) for recovery in facts.recoveries if recovery.fell_back)


def _had_to(facts: Facts, recovery: Recovery) -> bool:
    newest = _newest_whole(facts, recovery)
    if newest is None:
        return "no snapshot of rank" in recovery.fell_back
    return recovery.target_version is not None and recovery.target_version > newest


def _went_back(recovery: Recovery) -> bool:
    return any(name == "snapshot" for name, _ in recovery.strategies().values())


def _newest_whole(facts: Facts, recovery: Recovery) -> int | None:
    """Returns the newest version on which all ranks agreed, if a copy of each rank's state lives at the end of the
    recovery; else None."""
    end = recovery.ended_t if recovery.ended_t is not None else float("inf")
    dead = {event["pid"] for event in facts.events if event["event"] == "fault" and event["t"] <= end}
    agreed: dict[int, set[int]] = {}
    living: dict[int, set[int]] = {}
    last = None
    for event in facts.events:
        if event["event"] != "snapshot_taken" or event["t"] > end:
            continue
        version, rank = int(event["version"]), int(event["rank"])
        agreed.setdefault(version, set()).add(rank)
        if len(agreed[version]) == facts.asked.topology.ranks:
            last = version
        if event["pid"] not in dead:
            living.setdefault(version, set()).update({rank, *event["kept_for"]})
    if last is None or len(living.get(last, ())) < facts.asked.topology.ranks:
        return None
    return last


def _newest_check(facts: Facts) -> Check:
    name = "all went back to the newest whole snapshot"
    wrong, seen = [], 0
    for number, recovery in enumerate(facts.recoveries, start=1):
        newest = _newest_whole(facts, recovery)
        if not _went_back(recovery):
            continue
        seen += 1
        # A newer target was whole without any rank knowing it.
        if newest is not None and (recovery.target_version is None or recovery.target_version < newest):
            wrong.append(f"recovery {number}: to version {recovery.target_version}, and {newest} was whole")
    if not seen and not any(recovery.fell_back for recovery in facts.recoveries):
        chosen = facts.asked.strategy != SNAPSHOT  # another strategy was as good
        return Check(name, True if chosen else None, "no plan went back")
    return Check(name, not wrong, "; ".join(wrong))


def _same_check(facts: Facts) -> Check:
    """Checks that each rank restored the snapshot taken of that rank at that version."""
    name = "every restored snapshot is the one that was taken"
    taken: dict[tuple[int, int], set[str]] = {}
    answers: list[bool | None] = []
    wrong = []
    for event in facts.events:
        if event["event"] == "snapshot_taken":
            taken.setdefault((event["rank"], event["version"]), set()).add(str(event["digest"]))
        elif event["event"] == "snapshot_restored":
            known = taken.get((event["rank"], event["version"]))
            answers.append(None if known is None else event["digest"] in known)
            if answers[-1] is False:
                wrong.append(f"rank {event['rank']} at version {event['version']}")
    if not answers and not any(_went_back(recovery) for recovery in facts.recoveries):
        return Check(name, True, "none was restored")
    return Check(name, all_of(answers), ", ".join(wrong) or ("" if all_of(answers) else "no record"))


def _lost_check(facts: Facts) -> Check:
    """Checks that at most the steps since the last snapshot and those in progress were lost."""
    name = "no more steps were lost than there are between snapshots"
    lost = [recovery.steps_lost for recovery in facts.recoveries if _went_back(recovery)]
    if None in lost:
        return Check(name, None, "a recovery did not tell to which version it led")
    most = max((steps or 0 for steps in lost), default=0)
    return Check(
        name,
        most <= facts.asked.snapshot_every + 1,
        f"{most}, with --snapshot-every {facts.asked.snapshot_every}",
    )


def section(facts: Facts) -> dict[str, Any] | None:
    """Returns `snapshot` of the report: bytes and seconds; None without snapshots."""
    if not facts.asked.snapshot_every:
        return None
    taken = [event for event in facts.events if event["event"] == "snapshot_taken"]
    # A process allocates memory for its first snapshot, and optimizers have no state before their first step.
    warm = [event for event in taken if event["version"] > 0]
    restored = [event for event in facts.events if event["event"] == "snapshot_restored"]
    return {
        "every": facts.asked.snapshot_every,
        "taken": len({event["version"] for event in taken}),
        "partners": _partners(taken),
        "bytes_own": max((event["bytes"] for event in warm), default=None),
        "bytes_held_max": max((2 * (event["bytes"] + event["kept_bytes"]) for event in warm), default=None),
        **{
            f"{name}_median": median(event[name] for event in warm) if warm else None
            for name in ("seconds", "copy_s", "pass_s")
        },
        "seconds_max": max((event["seconds"] for event in warm), default=None),
        "restored": [
            {name: event[name] for name in ("rank", "version", "source", "bytes", "seconds")}
            for event in restored
        ],
        "restore_seconds_max": max((event["seconds"] for event in restored), default=None),
    }


def _partners(taken: Sequence[Event]) -> dict[str, list[int]]:
    """Returns rank -> the ranks that kept its copies."""
    keepers: dict[int, set[int]] = {}
    for event in taken:
        for rank in event["kept_for"]:
            keepers.setdefault(int(rank), set()).add(int(event["rank"]))
    return {str(rank): sorted(keepers[rank]) for rank in sorted(keepers)}
