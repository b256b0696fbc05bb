"""Loss curves as inline SVG. Pure: numbers in, markup out."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swift.chart import Point, Scale, ticks

WIDTH, HEIGHT = 960, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
"""Pixels: of the drawing, and of the margins that hold the labels."""
TWIN_COLOUR, OWN_COLOUR, KILL_COLOUR = "#8c959f", "#0969da", "#cf222e"


def loss_curves(loss: Mapping[str, Any] | None, kills: Iterable[int | None]) -> str:
    """A section with both runs' curves over the steps, and a line at each kill; empty without losses."""
    if loss is None:
        return ""
    steps: list[int] = loss["steps"]
    known = [value for name in ("recovered", "failure_free") for value in loss[name] if value is not None]
    if not known:
        return "<h2>Loss</h2><p>No loss is a finite number.</p>"
    x = Scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = Scale(min(known), max(known), HEIGHT - BOTTOM, TOP)
    shapes = [*_grid(x, y, steps, known)]
    for step in sorted({step for step in kills if step is not None and min(steps) <= step <= max(steps)}):
        shapes.append(
            f'<line class="kill" x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
            f'stroke="{KILL_COLOUR}" stroke-dasharray="3 3"><title>kill in step {step}</title></line>'
        )
    # The wide one below: where both are the same, both are seen.
    for name, colour, width in (("failure_free", TWIN_COLOUR, 5), ("recovered", OWN_COLOUR, 1.6)):
        for run in _runs(steps, loss[name]):
            points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            shapes.append(
                f'<polyline class="{name}" points="{points}" fill="none" stroke="{colour}" '
                f'stroke-width="{width}" stroke-linejoin="round" stroke-linecap="round"/>'
            )
    key = "".join(
        f'<span><i style="background: {colour}"></i>{name}</span>'
        for name, colour in (
            ("with faults", OWN_COLOUR),
            ("failure-free", TWIN_COLOUR),
            ("kill", KILL_COLOUR),
        )
    )
    return (
        f'<h2>Loss</h2><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss of both runs">'
        f'{"".join(shapes)}</svg><p class="key">{key}</p>'
    )


def _runs(steps: Sequence[int], values: Sequence[float | None]) -> list[list[Point]]:
    """Neighbouring finite values; one that is not finite is a gap."""
    runs: list[list[Point]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _grid(x: Scale, y: Scale, steps: Sequence[int], known: Sequence[float]) -> list[str]:
    shapes = []
    for value in ticks(min(known), max(known)):
        at = y(value)
        shapes.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(min(steps), max(steps), whole=True):
        shapes.append(
            f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>'
        )
    shapes.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">step</text>')
    return shapes
