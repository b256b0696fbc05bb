"""The share of useful time against the size of the cluster as one SVG file, a line for each strategy. Pure."""

import html
import math
from typing import Any

from swift.chart import Scale, ticks
from swift.plan.goodput import ways

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 540, 56, 188, 76, 62
"""Pixels: of the drawing, and of the margins that hold the labels. A phone shows about half of them."""
LABEL = 20
"""Pixels from one label to the next."""
X_LABELS_MAX, X_LABEL = 6, 48
STYLES = {
    ways.RESTART: ("#57606a", ""),
    ways.GIVEN: ("#57606a", "7 4"),
    ways.WAIT: ("#57606a", "2 3"),
    ways.CHECKPOINT: ("#953800", ""),
    ways.REINIT: ("#953800", "7 4"),
    ways.SNAPSHOT: ("#bf8700", ""),
    ways.REPLICA: ("#1a7f37", ""),
    ways.REPLAY: ("#8250df", ""),
    ways.SHARED: ("#8250df", "7 4"),
    ways.AUTO: ("#0969da", ""),
    ways.SHRINK: ("#cf222e", ""),
    ways.ADAPTIVE: ("#1b7c83", ""),
    ways.DROP: ("#cf222e", "7 4"),
    ways.LOSSY: ("#cf222e", "2 3"),
}
"""Colour, and dashes: strategies of one family have one colour."""
_STYLE = (
    "svg{background:#fff}text{font:16px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.label{font-weight:600}.own{stroke:#59636e}"
)


def draw(document: dict[str, Any]) -> str:
    """Of a document with a sweep (`swift.plan.goodput.report.build`)."""
    sweep = document["sweep"]
    x = Scale(math.log(sweep[0]["ranks"]), math.log(sweep[-1]["ranks"]), LEFT, WIDTH - RIGHT)
    y = Scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    names = [row["name"] for row in document["strategies"]]
    names += [name for name in sweep[-1]["strategies"] if name not in names]
    lines = {
        name: [
            (x(math.log(point["ranks"])), point["strategies"][name], point["ranks"])
            for point in sweep
            if name in point["strategies"]
        ]
        for name in names
    }
    shapes = [*_axes(document, x, y)]
    for name, points in lines.items():
        shapes += _line(name, points, y)
    shapes += _labels({name: points[-1] for name, points in lines.items()}, y)
    faults = document["faults"]
    rate = 1000 * 86400 / faults["node_mtbf_s"]
    middle = (
        f"{rate:.3g} faults in 1,000 node-days; repaired after {faults['repair_s'] / 3600:.3g} h on average"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="share of useful time by size of the cluster"><style>{_STYLE}</style>'
        f'<text class="title" x="4" y="22">Share of time that is training</text>'
        f'<text class="words" x="4" y="45">{html.escape(middle)}</text>{"".join(shapes)}</svg>\n'
    )


def _axes(document: dict[str, Any], x: Scale, y: Scale) -> list[str]:
    shapes = []
    for value in ticks(0.0, 1.0):
        at = y(value)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{at + 5:.1f}" text-anchor="end">{value:.0%}</text>')
    ranks = [point["ranks"] for point in document["sweep"]]
    last = -math.inf
    for size in ranks[:: -(-len(ranks) // X_LABELS_MAX)]:
        at = x(math.log(size))
        if at - last < X_LABEL:
            continue
        last = at
        shapes.append(
            f'<text class="size" x="{at:.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{_short(size)}</text>'
        )
    own = x(math.log(document["ranks"]))
    shapes.append(
        f'<line class="own" x1="{own:.1f}" x2="{own:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke-dasharray="3 3">'
        f"<title>{document['ranks']:,} ranks</title></line>"
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    shapes.append(
        f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">'
        f"ranks; lines: formula, dots: simulated; dashed: {document['ranks']:,}</text>"
    )
    return shapes


def _short(size: int) -> str:
    return f"{size:,}" if size < 10_000 else f"{size / 1000:.0f}k"


def _line(name: str, points: list[tuple[float, dict[str, float], int]], y: Scale) -> list[str]:
    colour, dashes = STYLES[name]
    path = " ".join(f"{at:.1f},{y(shares['formula']):.1f}" for at, shares, _ in points)
    shapes = [
        f'<polyline class="line" points="{path}" fill="none" stroke="{colour}" stroke-width="2" '
        f'stroke-dasharray="{dashes}" stroke-linejoin="round"><title>{html.escape(name)}</title></polyline>'
    ]
    for at, shares, ranks in points:
        share, error = shares["simulated"], shares["error"]
        low, high = y(max(0.0, share - error)), y(min(1.0, share + error))
        words = (
            f"{name}, {ranks:,} ranks: {share:.1%} ± {100 * error:.1f}, by formula {shares['formula']:.1%}"
        )
        shapes.append(
            f'<line class="error" x1="{at:.1f}" x2="{at:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
            f'<circle class="dot" cx="{at:.1f}" cy="{y(share):.1f}" r="3" fill="{colour}">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    return shapes


def _labels(ends: dict[str, tuple[float, dict[str, float], int]], y: Scale) -> list[str]:
    """Names at the right, in the order of the lines' ends, so far apart that each can be read."""
    order = sorted(ends, key=lambda name: -ends[name][1]["formula"])
    places: list[float] = []
    for name in order:
        wanted = y(ends[name][1]["formula"])
        places.append(max(wanted, places[-1] + LABEL) if places else wanted)
    lowest = HEIGHT - BOTTOM
    for number in reversed(range(len(places))):
        places[number] = min(places[number], lowest - LABEL * (len(places) - 1 - number))
    shapes = []
    for name, at in zip(order, places, strict=True):
        end, shares, _ = ends[name]
        colour, dashes = STYLES[name]
        left = WIDTH - RIGHT + 26
        shapes.append(
            f'<polyline points="{end:.1f},{y(shares["formula"]):.1f} {left - 12},{at:.1f} {left - 3},{at:.1f}" '
            f'fill="none" stroke="{colour}" stroke-dasharray="{dashes}"/>'
            f'<text class="label" x="{left}" y="{at + 5:.1f}" style="fill:{colour}">{html.escape(name)}</text>'
        )
    return shapes
