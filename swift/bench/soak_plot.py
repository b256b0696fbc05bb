"""A soak as one SVG file: rate, resident memory, and a line at each kill. Pure: numbers in, markup out."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from swift.chart import Point, Scale, ticks
from swift.drill.plot import KILL_COLOUR

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP, BOTTOM = 960, 200, 64, 12, 52, 34, 34
"""Pixels: of the drawing, of the height of a panel, of the margins that hold the labels."""
COLOURS = ("#0969da", "#8250df", "#1a7f37", "#bf8700", "#1b7c83", "#d4a72c", "#8c959f", "#953800", "#6639ba")
RATE_COLOUR = "#0969da"
RATE_POINTS = 200
"""The rate is taken over the 200th part of the run, 2 s at least: acknowledgements come in lumps."""
_STYLE = (
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600}"
)


def draw(result: Mapping[str, Any]) -> str:
    """The result of `swift.bench.soak` as SVG markup."""
    series, seconds = result["series"], result["seconds"]
    memory: Mapping[str, Sequence[tuple[float, int, int]]] = series["memory"]
    rate = rates(series["acked"], max(2.0, seconds / RATE_POINTS))
    height = TOP + 2 * PANEL + GAP + BOTTOM
    x = Scale(0.0, seconds, LEFT, WIDTH - RIGHT)
    title = f"{result['verdict']}: {result['reason']}"
    shapes = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    shapes += _panel("MB/s", x, TOP, [(RATE_COLOUR, "rate", [rate])], result["kills"])
    lines = [(COLOURS[n % len(COLOURS)], role, _lives(memory[role])) for n, role in enumerate(sorted(memory))]
    below = TOP + PANEL + GAP
    shapes += _panel("resident memory, MiB", x, below, lines, result["kills"])
    for value in ticks(0.0, seconds, whole=True):
        shapes.append(
            f'<text x="{x(value):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    shapes.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 2}" text-anchor="middle">seconds</text>'
    )
    shapes.append(_key([*((colour, role) for colour, role, _ in lines), (KILL_COLOUR, "kill")]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="memory and rate of a soak"><style>{_STYLE}</style>{"".join(shapes)}</svg>\n'
    )


def rates(acked: Sequence[tuple[float, int]], over_s: float) -> list[Point]:
    """MB/s between samples that are `over_s` apart, at the middle of them."""
    points: list[Point] = []
    last = acked[0] if acked else (0.0, 0)
    for at, size in acked:
        if at - last[0] >= over_s:
            points.append(((at + last[0]) / 2, (size - last[1]) / 1e6 / (at - last[0])))
            last = (at, size)
    return points


def _lives(samples: Sequence[tuple[float, int, int]]) -> list[list[Point]]:
    """A line for each process of the role."""
    lives: dict[int, list[Point]] = {}
    for at, pid, size in samples:
        lives.setdefault(pid, []).append((at, size / (1 << 20)))
    return list(lives.values())


def _panel(
    label: str,
    x: Scale,
    top: int,
    lines: Sequence[tuple[str, str, list[list[Point]]]],
    kills: Sequence[Mapping[str, Any]],
) -> list[str]:
    bottom = top + PANEL
    highest = max((value for _, _, runs in lines for run in runs for _, value in run), default=1.0)
    y = Scale(0.0, highest, bottom, top)
    shapes = [f'<text x="{LEFT}" y="{top - 8}">{label}</text>']
    for value in ticks(0.0, highest):
        at = y(value)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for kill in kills:
        at = x(kill["at_s"])
        shapes.append(
            f'<line class="kill" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}" stroke="{KILL_COLOUR}" '
            f'stroke-dasharray="3 3"><title>{html.escape(kill["what"])} killed</title></line>'
        )
    for colour, name, runs in lines:
        for run in runs:
            points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in run)
            shapes.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.4" '
                f'stroke-linejoin="round"><title>{html.escape(name)}</title></polyline>'
            )
    return shapes


def _key(entries: Sequence[tuple[str, str]]) -> str:
    shapes, at = [], float(LEFT + 180)
    for colour, name in entries:
        shapes.append(f'<rect x="{at}" y="{TOP - 17}" width="10" height="10" fill="{colour}"/>')
        shapes.append(f'<text x="{at + 14}" y="{TOP - 8}">{html.escape(name)}</text>')
        at += 30 + 6.6 * len(name)
    return "".join(shapes)
