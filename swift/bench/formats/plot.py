"""Time against size as one SVG file: how long a save blocks, and how long it takes; a line for each format. Pure."""

import html
import math
from collections.abc import Sequence
from typing import Any

from swift.chart import Scale

WIDTH, PANEL, LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 600, 330, 70, 178, 84, 58, 54
"""Pixels: of the drawing, the height of one panel, and the margins that hold the labels."""
HEIGHT = TOP + 2 * PANEL + BETWEEN + BOTTOM
LABEL = 20
"""Pixels from one label to the next."""
FAMILIES = {
    "swift": "#0969da",
    "dcp": "#8250df",
    "torch": "#cf222e",
    "safetensors": "#1a7f37",
    "npz": "#953800",
    "hdf5": "#57606a",
}
DASHES = {"async": "7 4", "lz4": "7 4", "lzf": "7 4", "gzip": "2 3", "zlib": "2 3"}
"""Formats of one family have one colour."""
PANELS = (("blocked_s", "training waits"), ("total_s", "until it is durable"))
_STYLE = (
    "svg{background:#fff}text{font:15px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.panel{font-weight:600}.label{font-weight:600}"
)

Points = list[tuple[float, float]]


def draw(document: dict[str, Any]) -> str:
    """Of what `--json` writes: the cases with the fewest ranks, with fsync."""
    ranks = min(case["ranks"] for case in document["cases"])
    cases = [case for case in document["cases"] if case["ranks"] == ranks and case["layout"] == "sharded"]
    sizes = [case["state_bytes"] for case in cases]
    series = {name: _series(cases, name) for name, _ in PANELS}
    x = Scale(math.log(sizes[0]), math.log(sizes[-1]), LEFT, WIDTH - RIGHT)
    every = [seconds for lines in series.values() for points in lines.values() for _, seconds in points]
    low, high = _decades(every)
    shapes = []
    for number, (name, words) in enumerate(PANELS):
        top = TOP + number * (PANEL + BETWEEN)
        y = Scale(low, high, top + PANEL, top)
        shapes += _axes(words, sizes, x, y, top)
        for label, points in series[name].items():
            shapes += _line(label, points, x, y)
        shapes += _labels({label: points[-1] for label, points in series[name].items() if points}, x, y, top)
    words = f"{ranks} rank{'s' if ranks > 1 else ''}, with fsync; medians of {document['rounds']} rounds"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="time of a save by size of the state"><style>{_STYLE}</style>'
        f'<text class="title" x="4" y="22">Time of a save by format</text>'
        f'<text class="words" x="4" y="45">{html.escape(words)}</text>{"".join(shapes)}</svg>\n'
    )


def _series(cases: Sequence[dict[str, Any]], name: str) -> dict[str, Points]:
    """Of each format, and of the limit of the panel."""
    limit = "copy_s" if name == "blocked_s" else "write_fsync_s"
    lines: dict[str, Points] = {}
    for case in cases:
        for row in case["formats"]:
            if row["fsync"]:
                lines.setdefault(row["format"], []).append((case["state_bytes"], row[name]))
    words = "a copy" if name == "blocked_s" else "a plain write"
    return {words: [(case["state_bytes"], case["limits"][limit]) for case in cases], **lines}


def style(label: str) -> tuple[str, str]:
    """Colour and dashes."""
    family, _, how = label.partition(" ")
    return FAMILIES.get(family, "#1f2328"), DASHES.get(how, "")


def _decades(seconds: Sequence[float]) -> tuple[float, float]:
    logs = [math.log10(max(each, 1e-6)) for each in seconds]
    return math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)


def _axes(words: str, sizes: Sequence[int], x: Scale, y: Scale, top: float) -> list[str]:
    shapes = [f'<text class="panel" x="{LEFT}" y="{top - 10}">{html.escape(words)}</text>']
    for power in range(int(y.low), int(y.high) + 1):
        at = y(power)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(
            f'<text x="{LEFT - 8}" y="{at + 5:.1f}" text-anchor="end">{_seconds(10.0**power)}</text>'
        )
    for size in sizes:
        shapes.append(
            f'<text class="size" x="{x(math.log(size)):.1f}" y="{top + PANEL + 20}" text-anchor="middle">'
            f"{size / (1 << 20):.3g}</text>"
        )
    shapes.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{top + PANEL + 38}" text-anchor="middle">MiB of state</text>'
    )
    return shapes


def _seconds(value: float) -> str:
    for unit, of in (("s", 1.0), ("ms", 1e-3)):
        if value >= of * 0.999:
            return f"{value / of:.0f} {unit}"
    return f"{value / 1e-6:.0f} µs"


def _line(label: str, points: Points, x: Scale, y: Scale) -> list[str]:
    colour, dashes = style(label)
    at = [(x(math.log(size)), y(math.log10(max(seconds, 1e-6)))) for size, seconds in points]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
    shapes = [
        f'<polyline class="line" points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dashes}" stroke-linejoin="round"><title>{html.escape(label)}</title></polyline>'
    ]
    for (a, b), (size, seconds) in zip(at, points, strict=True):
        words = f"{label}, {size / (1 << 20):.3g} MiB: {1e3 * seconds:.3g} ms"
        shapes.append(
            f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    return shapes


def _labels(ends: dict[str, tuple[float, float]], x: Scale, y: Scale, top: float) -> list[str]:
    """Names at the right, in the order of the lines' ends, so far apart that each can be read."""
    height = {label: y(math.log10(max(seconds, 1e-6))) for label, (_, seconds) in ends.items()}
    order = sorted(height, key=lambda label: height[label])
    places: list[float] = []
    for label in order:
        places.append(max(height[label], top, places[-1] + LABEL if places else top))
    lowest = top + PANEL
    for number in reversed(range(len(places))):
        places[number] = min(places[number], lowest - LABEL * (len(places) - 1 - number))
    shapes = []
    left = WIDTH - RIGHT + 26
    for label, at in zip(order, places, strict=True):
        colour, dashes = style(label)
        end = x(math.log(ends[label][0]))
        shapes.append(
            f'<polyline points="{end:.1f},{height[label]:.1f} {left - 12},{at:.1f} {left - 3},{at:.1f}" '
            f'fill="none" stroke="{colour}" stroke-dasharray="{dashes}"/>'
            f'<text class="label" x="{left}" y="{at + 5:.1f}" style="fill:{colour}">{html.escape(label)}</text>'
        )
    return shapes
