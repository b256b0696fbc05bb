"""What came of each case."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def row(case: str, problem: str = "", **figures: object) -> Row:
    """`problem`: why it has failed; empty if it has passed."""
    return {"case": case, "verdict": "FAIL" if problem else "PASS", "why": problem, "figures": figures}


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/clusters.md."""
    lines = ["| engine | case | verdict | figures |", "|---|---|---|---|"]
    for each in rows:
        figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in each["figures"].items())
        lines.append(f"| {each['engine']} | {each['case']} | {each['verdict']} {each['why']} | {figures} |")
    return "\n".join(lines) + "\n"
