"""`swift-ft plan --adaptive`: what a job with replicas does with losses, before it has any."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swift_ft.errors import UsageError
from swift_ft.lab.chart import Scale, ticks
from swift_ft.lab.plan import rerouted
from swift_ft.planner.canonical_plans import Counts
from swift_ft.planner.schedule import Costs, Step, Timed, Work
from swift_ft.text import show

# A step as one SVG file: a row for each worker, time from left to right. Pure.

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


def draw_step(work: Work, step: Step, counts: Counts, title: str) -> str:
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


FLAGS = ("stages", "replicas", "microbatches", "times", "cap_factor", "failures", "exact", "way", "move")
_TIMES = "1,1,1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adaptive:
    """What the command line says, checked."""

    request: rerouted.Request
    way: str
    """To be drawn."""
    exact_s: float | None
    json: Path | None
    svg: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a job with replicas that loses ranks, instead of PROFILE")
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="the throughput with which replicas do the work of lost ranks; needs the next three flags",
    )
    group.add_argument("--stages", type=int, metavar="P", help="of the pipeline, one on each rank")
    group.add_argument("--replicas", type=int, metavar="D", help="of each stage")
    group.add_argument("--microbatches", type=int, metavar="M", help="of each replica in a step")
    group.add_argument(
        "--times",
        metavar="F,I,W[,TRANSFER]",
        help="of a forward, the backward's parts for inputs and for weights, and a transfer, in any unit; "
        f"default: {_TIMES}",
    )
    group.add_argument(
        "--cap-factor", type=float, metavar="X", help="activations in memory, times those of 1F1B; default: 1"
    )
    group.add_argument("--failures", type=int, metavar="K", help="up to so many ranks are lost; default: 2")
    group.add_argument(
        "--exact",
        type=float,
        metavar="SECONDS",
        help="small jobs: compare each step with the shortest there is, searched for so long",
    )
    group.add_argument(
        "--move",
        metavar="COST,STEPS",
        help="say where losses had better be: what copying a rank's state takes, in the unit of --times, and in how "
        "many steps a repair is expected",
    )
    group.add_argument(
        "--way",
        choices=[way.name for way in rerouted.WAYS],
        help="with --svg: the step that is drawn, of the last line; default: split, 2x",
    )


def config_of(options: argparse.Namespace) -> Adaptive:
    """Raises UsageError for a value that is none, or flags that are missing."""
    missing = [
        f"--{name}" for name in ("stages", "replicas", "microbatches") if getattr(options, name) is None
    ]
    if missing:
        raise UsageError(
            f"--adaptive needs {' and '.join(missing)}, such as --stages 4 --replicas 4 --microbatches 8"
        )
    if options.way is not None and options.svg is None:
        raise UsageError("--way names the step that --svg PATH draws: give --svg too")
    if options.exact is not None and options.exact <= 0:
        raise UsageError(f"--exact {options.exact:g}: give seconds, such as 60")
    request = rerouted.Request(
        stages=options.stages,
        replicas=options.replicas,
        microbatches=options.microbatches,
        costs=_costs(options.times or _TIMES),
        cap_factor=1.0 if options.cap_factor is None else options.cap_factor,
        losses=2 if options.failures is None else options.failures,
        moves=None if options.move is None else _moves(options.move),
    )
    return Adaptive(
        request=request,
        way=options.way or "split, 2x",
        exact_s=options.exact,
        json=options.json,
        svg=options.svg,
    )


def _costs(text: str) -> Costs:
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        times = []
    if len(times) not in (3, 4) or not all(0 <= time <= 1e9 for time in times) or min(times[:3]) <= 0:
        raise UsageError(f"--times {text}: write F,I,W or F,I,W,TRANSFER, such as 1,1,1 or 2,2.1,1.9,0.3")
    forward, inputs, weights, transfer = [*times, 0.0][:4]
    return Costs(forward=(forward,), backward_input=(inputs,), backward_weight=(weights,), transfer=transfer)


def _moves(text: str) -> rerouted.Moves:
    try:
        cost, steps = map(float, text.split(","))
    except ValueError:
        cost = steps = -1.0
    if not (0 <= cost <= 1e12 and 0 <= steps <= 1e12):
        raise UsageError(f"--move {text}: write COST,STEPS, such as 40,1000")
    return rerouted.Moves(cost=cost, steps=steps)


def run(config: Adaptive) -> dict[str, str]:
    """Shows the table. Returns what is to be written as JSON and as SVG, by flag."""
    document, drawn = rerouted.build_rerouted(config.request, config.exact_s)
    show(rerouted.rerouted_text(document))
    work, step = drawn[config.way]
    counts = tuple(document["rows"][-1]["counts"])
    title = f"{config.way}; lost: {rerouted.place(counts)}"
    return {
        "json": json.dumps(document, indent=2) + "\n",
        "svg": draw_step(work, step, counts, title) if config.svg is not None else "",
    }
