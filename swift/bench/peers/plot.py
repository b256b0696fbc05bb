"""The time that each kill has cost as one SVG file: a row for each system, a dot for each kill. Pure."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from swift.bench.peers.systems import SYSTEMS
from swift.chart import Scale

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 640, 214, 22, 66, 30, 46
"""Pixels: of the drawing, the margins that hold the labels, and the height of a row."""
FLOOR_S = 0.01
_STYLE = (
    "svg{background:#fff}text{font:15px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.dot{fill-opacity:.45}"
)
_COLOURS = {True: "#0969da", False: "#57606a"}
"""swift's, and all others."""


def draw(document: Mapping[str, Any]) -> str:
    """Of what `--json` writes: the systems that went on."""
    cases = [case for case in document["cases"] if "lost_s" in case]
    lost = {case["system"]: [r["lost_s"] for r in case["rounds"] if "lost_s" in r] for case in cases}
    every = [max(seconds, FLOOR_S) for each in lost.values() for seconds in each] or [FLOOR_S, 1.0]
    low = math.floor(math.log10(min(every)))
    high = max(low + 1, math.ceil(math.log10(max(every))))
    x = Scale(low, high, LEFT, WIDTH - RIGHT)
    bottom = TOP + ROW * max(1, len(cases))
    shapes = _axis(low, high, x, bottom)
    for number, case in enumerate(cases):
        shapes += _row(case, lost[case["system"]], TOP + ROW * number + ROW / 2, x)
    words = f"a dot for each of {document['settings']['kills']} kills, a bar at the median"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BOTTOM}" role="img" '
        f'aria-label="time lost by a kill, by system"><style>{_STYLE}</style>'
        f'<text class="title" x="4" y="22">Time that a kill costs</text>'
        f'<text class="words" x="4" y="45">{html.escape(words)}</text>{"".join(shapes)}</svg>\n'
    )


def _axis(low: int, high: int, x: Scale, bottom: float) -> list[str]:
    shapes = []
    for power in range(low, high + 1):
        at, seconds = x(power), 10.0**power
        word = f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1e3:g} ms"
        shapes.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        shapes.append(f'<text x="{at:.1f}" y="{bottom + 22}" text-anchor="middle">{word}</text>')
    return shapes


def _row(case: Mapping[str, Any], lost: Sequence[float], y: float, x: Scale) -> list[str]:
    system = SYSTEMS[case["system"]]
    colour = _COLOURS[bool(system.strategy)]
    shapes = [f'<text x="{LEFT - 10}" y="{y + 5:.1f}" text-anchor="end">{html.escape(system.words)}</text>']
    for seconds in lost:
        words = f"{system.words}: {seconds:.3g} s"
        shapes.append(
            f'<circle class="dot" cx="{x(math.log10(max(seconds, FLOOR_S))):.1f}" cy="{y:.1f}" r="5" fill="{colour}">'
            f"<title>{html.escape(words)}</title></circle>"
        )
    at = x(math.log10(max(case["lost_s"], FLOOR_S)))
    shapes.append(
        f'<line class="median" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 10:.1f}" y2="{y + 10:.1f}" stroke="{colour}" '
        'stroke-width="3"/>'
    )
    return shapes
