"""Draws the frontier as SVG: bytes until the next checkpoint against expected recovery time."""

from collections.abc import Sequence
from typing import Any

from swift_ft.lab import drawing

EXACT_COLOUR, SWIFT_COLOUR, GREEDY_COLOUR, CAP_COLOUR = "#0969da", "#bf8700", "#8c959f", "#cf222e"
UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def draw(document: dict[str, Any]) -> str:
    """Draws a plan's document (`swift_ft.lab.plan.report.build`)."""
    rows = {"exact": document["frontier"]["points"], "SWIFT's merge": document["swift"]}
    rows["greedy merge"] = document["greedy"]
    most = max(row["storage_bytes"] for each in rows.values() for row in each)
    unit, size = next((name, size) for name, size in UNITS if most >= size or size == 1.0)

    def points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
        return [row["storage_bytes"] / size for row in rows], [row["recovery_s"] for row in rows]

    title = f"{document['name']}: {document['stages']} stages on {document['machines']} machines"
    figure, axes = drawing.new(10, 4.5, title)
    axes.scatter(*points(rows["greedy merge"]), s=12, color=GREEDY_COLOUR, label="greedy merge")
    axes.scatter(*points(rows["SWIFT's merge"]), s=12, color=SWIFT_COLOUR, label="SWIFT's merge")
    # The recovery time of a point holds until the bytes of the next.
    axes.plot(*points(rows["exact"]), ".-", drawstyle="steps-post", color=EXACT_COLOUR, label="exact")
    chosen = points([document["chosen"]])
    axes.plot(*chosen, "o", markersize=11, fillstyle="none", color=CAP_COLOUR, label="choice")
    for kind, value in (document["cap"] or {}).items():
        if kind == "storage_bytes" and value <= most:
            axes.axvline(value / size, color=CAP_COLOUR, linestyle=":", label="cap")
        elif kind == "recovery_s" and value <= axes.get_ylim()[1]:
            axes.axhline(value, color=CAP_COLOUR, linestyle=":", label="cap")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"log until the next checkpoint, {unit}")
    axes.set_ylabel("recovery, s")
    axes.legend()
    return drawing.svg(figure)
