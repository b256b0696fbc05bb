"""A step as one SVG file: a row for each worker, time from left to right. Pure."""

from collections.abc import Mapping, Sequence

from swift.chart import Scale, ticks
from swift.recovery.adaptive import Counts, Step, Timed, Work

WIDTH, LEFT, RIGHT, TOP, BOTTOM, ROW = 680, 60, 12, 106, 42, 24
"""Pixels: of the drawing, of the margins that hold the labels, and of a row. A phone shows about half of them."""
WORKERS_MAX = 128
COLOURS = {"F": "#8cb4e8", "B": "#f0b37e", "I": "#f0b37e", "W": "#9ccf9c"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_STYLE = (
    "svg{background:#fff}text{font:16px system-ui,sans-serif;fill:#1f2328}.number{font-size:11px}"
    ".axis{stroke:#d1d9e0}.title{font-weight:600;font-size:18px}.part{stroke:#fff;stroke-width:1}"
    ".adopted{fill:url(#adopted);pointer-events:none}.lost{fill:#f6f8fa}.words{fill:#59636e}"
)
_HATCH = (
    '<defs><pattern id="adopted" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line x1="0" y1="0" x2="0" y2="7" stroke="#1f2328" stroke-opacity="0.45" stroke-width="2.4"/></pattern></defs>'
)


def draw(work: Work, step: Step, counts: Counts, title: str) -> str:
    """Workers are numbered stage * origins + origin, a stage each. What none of a stage's losses has is drawn first."""
    origins = work.origins
    workers = range(min(work.stages * origins, WORKERS_MAX))
    height = TOP + ROW * len(workers) + BOTTOM
    x = Scale(0.0, step.length, LEFT, WIDTH - RIGHT)
    shapes = [_axis(x, value, height) for value in ticks(0.0, step.length)]
    for row, worker in enumerate(workers):
        stage, origin = divmod(worker, origins)
        top = TOP + ROW * row + (2 if row else 0)
        if origin == 0 and row:
            shapes.append(
                f'<line class="axis" x1="0" x2="{WIDTH - RIGHT}" y1="{TOP + ROW * row}" y2="{TOP + ROW * row}"/>'
            )
        shapes.append(f'<text x="{LEFT - 8}" y="{top + 16}" text-anchor="end">{stage}.{origin}</text>')
        shapes += _row(x, top, worker, origin, step.slots, lost=origin < counts[stage])
    middle = (LEFT + WIDTH - RIGHT) / 2
    shapes.append(f'<text x="{middle}" y="{height - 4}" text-anchor="middle">time</text>')
    more = work.stages * origins - len(workers)
    shapes.append(f'<text class="words" x="4" y="{TOP - 8}">stage.replica</text>')
    if more:
        shapes.append(
            f'<text class="words" x="{WIDTH - RIGHT}" y="{height - 4}" text-anchor="end">and {more} more workers</text>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="the order of a step"><style>{_STYLE}</style>{_HATCH}'
        f'<text class="title" x="4" y="20">{title}</text>{_key(work)}{"".join(shapes)}</svg>\n'
    )


def _axis(x: Scale, value: float, height: int) -> str:
    at = x(value)
    return (
        f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
        f'<text x="{at:.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{value:g}</text>'
    )


def _row(
    x: Scale, top: float, worker: int, own: int, slots: Mapping[int, Sequence[Timed]], *, lost: bool
) -> list[str]:
    """Of a worker, from left to right."""
    if worker not in slots:
        words = "lost" if lost else "has nothing to do"
        return [
            f'<rect class="lost" x="{LEFT}" y="{top}" width="{WIDTH - RIGHT - LEFT}" height="{ROW - 3}"/>'
            f'<text class="words" x="{LEFT + 6}" y="{top + 16}">{words}</text>'
        ]
    shapes = []
    for slot in slots[worker]:
        shapes += _part(x, top, slot, adopted=slot.action.origin != own)
    return shapes


def _part(x: Scale, top: float, slot: Timed, *, adopted: bool) -> list[str]:
    left, width = x(slot.begin), x(slot.end) - x(slot.begin)
    at = f'x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 3}"'
    kind, _, origin, microbatch = slot.action
    words = f"{WORDS[kind]} of microbatch {microbatch} of replica {origin}: {slot.begin:g} to {slot.end:g}"
    shapes = [f'<rect class="part" {at} fill="{COLOURS[kind]}"><title>{words}</title></rect>']
    if adopted:
        shapes.append(f'<rect class="adopted" {at}/>')
    if width >= 4 + 6 * len(str(microbatch)):
        shapes.append(
            f'<text class="number" x="{left + width / 2:.1f}" y="{top + 16}" text-anchor="middle">{microbatch}</text>'
        )
    return shapes


def _key(work: Work) -> str:
    shapes, at = [], 4.0
    for kind in work.kinds():
        shapes.append(f'<rect x="{at:.1f}" y="34" width="16" height="16" fill="{COLOURS[kind]}"/>')
        shapes.append(f'<text x="{at + 21:.1f}" y="48">{WORDS[kind]}</text>')
        at += 44 + 8.1 * len(WORDS[kind])
    shapes.append(
        '<rect x="4" y="58" width="16" height="16" fill="#f0f0f0"/>'
        '<rect class="adopted" x="4" y="58" width="16" height="16"/>'
        '<text x="25" y="72">adopted: another replica\'s microbatch</text>'
    )
    return "".join(shapes)
