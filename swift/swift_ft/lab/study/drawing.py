"""Drawings of a study as inline SVG: accuracy loss against time, and loss curves. Pure."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from swift_ft.lab.chart import Scale, ticks
from swift_ft.lab.study.figures import read
from swift_ft.lab.study.settings import PLAIN, STRATEGIES

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 44
"""Pixels: size of a drawing, and its margins for labels."""
_PALETTE = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8250df",
    "#b1a400",
    "#cf222e",
    "#1b7c83",
)
COLOURS = {PLAIN: "#8c959f", **dict(zip(STRATEGIES, _PALETTE, strict=True))}
"""Mostly the colours of Okabe and Ito, which colour-blind people can distinguish."""


def tradeoff(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Draws a dot for each strategy at one rate. To the right: additional time. Upwards: accuracy loss."""
    dots = [(row, read(row, "overhead"), read(row, "worse")) for row in rows]
    known = [(row, x, y) for row, x, y in dots if x is not None and y is not None]
    if not known:
        return "<p>No run came to its end.</p>"
    xs = [100 * x.mean for _, x, _ in known] + [0.0]
    ys = [y.mean + side * (y.half or 0.0) for _, _, y in known for side in (-1, 1)] + [0.0]
    x_scale = Scale(*_wider(xs), LEFT, WIDTH - RIGHT)
    y_scale = Scale(*_wider(ys), HEIGHT - BOTTOM, TOP)
    shapes = _grid(x_scale, y_scale, "longer by, %", f"worse by, {unit}")
    front = sorted((100 * x.mean, y.mean) for row, x, y in known if row["front"])
    points = " ".join(f"{x_scale(x):.1f},{y_scale(y):.1f}" for x, y in front)
    shapes.append(
        f'<polyline class="front" points="{points}" fill="none" stroke="#8c959f" stroke-dasharray="5 4"/>'
    )
    for row, x, y in known:
        colour, at_x, at_y = COLOURS[row["strategy"]], x_scale(100 * x.mean), y_scale(y.mean)
        if y.half:
            low, high = y_scale(y.mean - y.half), y_scale(y.mean + y.half)
            shapes.append(
                f'<line x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
            )
        words = f"{row['strategy']}: {100 * x.mean:.0f} % longer, worse by {y.mean:.3g} {unit}"
        title = f"<title>{html.escape(words)}</title>"
        shapes.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="6" fill="{colour}">{title}</circle>')
    return _svg(shapes, "what is learned less against what takes longer")


def curves(rows: Sequence[Mapping[str, Any]], unit: str) -> str:
    """Draws the training loss over the steps: a line for each row, the mean over its seeds."""
    known = [row for row in rows if row["losses"]]
    if not known:
        return "<p>No run came to its end.</p>"
    steps = [step for row in known for step, _ in row["losses"]]
    losses = [loss for row in known for _, loss in row["losses"]]
    x_scale = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y_scale = Scale(min(losses), max(losses), HEIGHT - BOTTOM, TOP)
    shapes = _grid(x_scale, y_scale, "step", f"loss of training, {unit}")
    # The wide line is drawn first, so that it stays visible where all lines coincide.
    for row in sorted(known, key=lambda row: row["strategy"] != PLAIN):
        points = " ".join(f"{x_scale(step):.1f},{y_scale(loss):.1f}" for step, loss in row["losses"])
        width = 5 if row["strategy"] == PLAIN else 1.6
        shapes.append(
            f'<polyline points="{points}" fill="none" stroke="{COLOURS[row["strategy"]]}" stroke-width="{width}" '
            f'stroke-linejoin="round"><title>{html.escape(row["strategy"])}</title></polyline>'
        )
    return _svg(shapes, "loss of training over the steps")


def key(strategies: Sequence[str]) -> str:
    spans = "".join(
        f'<span><i style="background: {COLOURS[name]}"></i>{"no recovery" if name == PLAIN else name}</span>'
        for name in strategies
    )
    return f'<p class="key">{spans}</p>'


def _wider(values: Sequence[float]) -> tuple[float, float]:
    """Returns the least and the greatest value, with a margin."""
    low, high = min(values), max(values)
    margin = 0.06 * ((high - low) or 1.0)
    return low - margin, high + margin


def _grid(x: Scale, y: Scale, below: str, beside: str) -> list[str]:
    shapes = []
    for value in ticks(y.low, y.high):
        at = y(value)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(x.low, x.high):
        at = x(value)
        shapes.append(f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        shapes.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    shapes.append(
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">'
        f"{html.escape(beside)}</text>"
    )
    shapes.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{below}</text>'
    )
    return shapes


def _svg(shapes: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'
