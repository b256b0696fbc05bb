"""What the checkpoints of a run cost, as its ranks told of each: `checkpoint` of a report."""

from statistics import median
from typing import Any

from swift.drill.facts import Facts


def section(facts: Facts) -> dict[str, Any]:
    """Bytes and seconds of one rank's part of a version; None where nobody has told."""
    durable = [
        event for event in facts.events if event["event"] == "checkpoint_durable" and "stall_s" in event
    ]
    # Before the first step optimizers have no state.
    warm = [event for event in durable if event["version"] > 0]
    return {
        "mode": facts.asked.checkpoint_mode,
        "every": facts.asked.topology.checkpoint_every,
        "saved": len(durable),
        "bytes_max": max((event["bytes"] for event in warm), default=None),
        **{
            f"{name}_{of.__name__}": of(event[name] for event in warm) if warm else None
            for name in ("seconds", "stall_s")
            for of in (median, max)
        },
    }


def words(shown: dict[str, Any]) -> str:
    """For the table of results; empty: nobody has told of a save."""
    if shown["stall_s_median"] is None:
        return ""
    return (
        f"{shown['saved']} parts of at most {shown['bytes_max'] / 1e6:.1f} MB, {shown['mode']}: durable after "
        f"{1e3 * shown['seconds_median']:.0f} ms, of which training waited {1e3 * shown['stall_s_median']:.0f} ms "
        "(medians)"
    )
