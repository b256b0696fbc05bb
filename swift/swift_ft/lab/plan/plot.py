"""Draws the frontier as one SVG file: bytes until the next checkpoint against expected recovery time. Pure."""

import html
from collections.abc import Sequence
from typing import Any

from swift_ft.lab.chart import Point, Scale, ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 420, 72, 16, 60, 44
"""Pixels: size of the drawing, and its margins for labels."""
EXACT_COLOUR, SWIFT_COLOUR, GREEDY_COLOUR, CAP_COLOUR = "#0969da", "#bf8700", "#8c959f", "#cf222e"
_STYLE = (
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600}"
)
_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def draw(document: dict[str, Any]) -> str:
    """Draws a plan's document (`swift_ft.lab.plan.report.build`)."""
    exact, swift, own = (
        _points(rows) for rows in (document["frontier"]["points"], document["swift"], document["greedy"])
    )
    everything = [*exact, *swift, *own]
    most = max(size for size, _ in everything) or 1.0
    unit, scale = next((name, size) for name, size in _UNITS if most >= size or size == 1.0)
    x = Scale(0.0, most / scale, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, max(time for _, time in everything), HEIGHT - BOTTOM, TOP)
    shapes = _axes(x, y, unit)
    for rows, colour, name in ((own, GREEDY_COLOUR, "greedy"), (swift, SWIFT_COLOUR, "SWIFT")):
        shapes += [_dot(x(size / scale), y(time), colour, f"{name}: {time:.4g} s", 3) for size, time in rows]
    steps = [(size / scale, time) for size, time in _steps(exact, most)]
    line = " ".join(f"{x(size):.1f},{y(time):.1f}" for size, time in steps)
    shapes.append(
        f'<polyline class="exact" points="{line}" fill="none" stroke="{EXACT_COLOUR}" stroke-width="1.6"/>'
    )
    shapes += [
        _dot(x(size / scale), y(time), EXACT_COLOUR, f"exact: {time:.4g} s", 2.5) for size, time in exact
    ]
    shapes += _cap(document, x, y, scale)
    at = document["chosen"]
    shapes.append(
        f'<circle class="chosen" cx="{x(at["storage_bytes"] / scale):.1f}" cy="{y(at["recovery_s"]):.1f}" '
        f'r="7" fill="none" stroke="{CAP_COLOUR}" stroke-width="2"/>'
    )
    title = f"{document['name']}: {document['stages']} stages on {document['machines']} machines"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="bytes of the log and recovery time"><style>{_STYLE}</style>'
        f'<text class="title" x="{LEFT}" y="20">{html.escape(title)}</text>{_key()}{"".join(shapes)}</svg>\n'
    )


def _points(rows: Sequence[dict[str, Any]]) -> list[Point]:
    return [(float(row["storage_bytes"]), float(row["recovery_s"])) for row in rows]


def _steps(points: Sequence[Point], most: float) -> list[Point]:
    """Returns the corners of the step function: the recovery time of a point holds until the bytes of the next."""
    corners: list[Point] = []
    for (size, time), (following, _) in zip(points, [*points[1:], (most, 0.0)], strict=True):
        corners += [(size, time), (following, time)]
    return corners


def _axes(x: Scale, y: Scale, unit: str) -> list[str]:
    shapes = []
    for value in ticks(0.0, y.high):
        at = y(value)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(0.0, x.high):
        shapes.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    shapes.append(
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">log until the next checkpoint, {unit}</text>'
    )
    shapes.append(f'<text x="{LEFT}" y="{TOP - 8}" text-anchor="end">recovery, s</text>')
    return shapes


def _dot(x: float, y: float, colour: str, words: str, radius: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}"><title>{words}</title></circle>'


def _cap(document: dict[str, Any], x: Scale, y: Scale, scale: float) -> list[str]:
    if document["cap"] is None:
        return []
    ((kind, value),) = document["cap"].items()
    if kind == "worst_recovery_s":  # the axis shows another quantity
        return []
    down = kind == "storage_bytes"
    if value > (x.high * scale if down else y.high):
        return []
    at = x(value / scale) if down else y(value)
    ends = (at, at, TOP, HEIGHT - BOTTOM) if down else (LEFT, WIDTH - RIGHT, at, at)
    x1, x2, y1, y2 = (f"{end:.1f}" for end in ends)
    return [
        f'<line class="cap" x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" stroke="{CAP_COLOUR}" stroke-dasharray="3 3"/>'
    ]


def _key() -> str:
    shapes, at = [], float(LEFT)
    for colour, name in (
        (EXACT_COLOUR, "exact"),
        (GREEDY_COLOUR, "greedy merge"),
        (SWIFT_COLOUR, "SWIFT's merge"),
        (CAP_COLOUR, "cap and choice"),
    ):
        shapes.append(f'<rect x="{at:.1f}" y="30" width="10" height="10" fill="{colour}"/>')
        shapes.append(f'<text x="{at + 14:.1f}" y="39">{name}</text>')
        at += 40 + 6.6 * len(name)
    return "".join(shapes)
