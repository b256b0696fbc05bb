"""What the checkpoints of a drill cost, out of what its ranks have told."""

from dataclasses import replace
from typing import Any

from swift_ft.lab.drill import report
from swift_ft.lab.drill.console import fact_rows as rows
from tests.unit.drill.evidence import CHECKPOINT, config, good


def saved(rank: int, version: int, size: int, seconds: float, stall_s: float) -> dict[str, Any]:
    event = {"t": 1000.0, "who": f"rank{rank}", "pid": 100 + rank, "event": "checkpoint_durable"}
    return {**event, "rank": rank, "version": version, "bytes": size, "seconds": seconds, "stall_s": stall_s}


def built(*events: dict[str, Any], **changes: Any) -> dict[str, Any]:
    evidence = good()
    found = replace(evidence, events=[*evidence.events, *events])
    return report.build(config(**changes), found)


def test_of_parts_with_a_state() -> None:
    first = saved(0, 0, 10, 9.0, 9.0)
    parts = [saved(0, 5, 100, 0.2, 0.01), saved(1, 5, 300, 0.4, 0.03), saved(0, 10, 100, 0.3, 0.02)]
    result = built(first, *parts)
    assert result["checkpoint"] == {
        "mode": "async",
        "every": CHECKPOINT,
        "saved": 4,
        "bytes_max": 300,
        "seconds_median": 0.3,
        "seconds_max": 0.4,
        "stall_s_median": 0.02,
        "stall_s_max": 0.03,
    }
    shown = dict(rows(result))["checkpoints"]
    assert shown.startswith("4 parts of at most 0.0 MB, async: durable after 300 ms, of which")
    assert shown.endswith("20 ms (medians)")


def test_where_nobody_has_told() -> None:
    result = built(checkpoint_mode="sync")
    assert result["checkpoint"]["mode"] == "sync"
    assert result["checkpoint"]["seconds_median"] is None
    assert "checkpoints" not in dict(rows(result))
