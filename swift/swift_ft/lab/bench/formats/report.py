"""The plan of turns, the evaluation over all turns (medians, ratios to limits, losses), tables and drawing. Pure."""

import html
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swift_ft.lab.chart import Scale

# The plan: which turns are measured, in which order. Pure.

LIMITS = "limits"
"""Pseudo-format: the machine's own speed for the same bytes."""
SHARDED, GATHERED = "sharded", "gathered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One save and one load of all ranks, or one measurement of the limits."""

    parameter_bytes: int
    """Bytes of the whole model's parameters."""
    layout: str
    """Each rank saves its own shard, or rank 0 gathers all of them and saves."""
    round: int
    """Number from 0; -1 is the warm-up."""
    format: str
    fsync: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All turns with one number of ranks."""

    ranks: int
    sizes: tuple[int, ...]
    """Bytes of parameters, for each case."""
    rounds: int
    formats: Mapping[str, tuple[bool, ...]]
    """By name: without fsync (False), with it (True), or both."""

    @property
    def layouts(self) -> tuple[str, ...]:
        """Returns the layouts to measure. With one rank both are equal, so one is enough."""
        return (SHARDED,) if self.ranks == 1 else (SHARDED, GATHERED)

    def turns(self) -> Iterator[Turn]:
        """Yields the turns. Each round runs all formats, so that a busy machine slows them all. A warm-up round
        precedes the first round of the smallest size; it covers imports and other first-time costs."""
        for size in self.sizes:
            for layout in self.layouts:
                for number in range(-1 if size == self.sizes[0] else 0, self.rounds):
                    at: dict[str, Any] = {"parameter_bytes": size, "layout": layout, "round": number}
                    yield Turn(format=LIMITS, **at)
                    for name, fsyncs in self.formats.items():
                        for fsync in fsyncs:
                            yield Turn(format=name, fsync=fsync, **at)


class Pace:
    """Estimates of saves from the format's time at smaller sizes; saves that would take too long are left out."""

    def __init__(self, save_s_max: float) -> None:
        self._save_s_max = save_s_max
        self._taken: dict[tuple[str, str], tuple[int, float]] = {}

    def note(self, turn: Turn, save_s: float) -> None:
        """Records the time of a turn."""
        size, quickest_s = self._taken.get((turn.layout, turn.format), (0, 0.0))
        if size == turn.parameter_bytes:
            save_s = min(save_s, quickest_s)
        self._taken[turn.layout, turn.format] = (turn.parameter_bytes, save_s)

    def too_long(self, turn: Turn) -> float | None:
        """Returns the estimated seconds if too long. Returns None if short, unknown, or the size was already begun."""
        size, save_s = self._taken.get((turn.layout, turn.format), (turn.parameter_bytes, 0.0))
        would_s = save_s * turn.parameter_bytes / size
        return would_s if size < turn.parameter_bytes and would_s > self._save_s_max else None


# SVG of time against size: how long a save blocks, and how long it takes; a line per format. Pure.

WIDTH, PANEL, LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 600, 330, 70, 178, 84, 58, 54
"""Pixels: width of the drawing, height of a panel, and the margins that hold the labels."""
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
"""Dashes by suffix of the format's name; formats of one family share a colour."""
PANELS = (("blocked_s", "training waits"), ("total_s", "until it is durable"))
_STYLE = (
    "svg{background:#fff}text{font:15px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.panel{font-weight:600}.label{font-weight:600}"
)

Points = list[tuple[float, float]]


def draw_formats(document: dict[str, Any]) -> str:
    """Draws the document that `--json` writes: the cases with the fewest ranks, with fsync."""
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
    """Returns the points of each format, and of the limit of the panel."""
    limit = "copy_s" if name == "blocked_s" else "write_fsync_s"
    lines: dict[str, Points] = {}
    for case in cases:
        for row in case["formats"]:
            if row["fsync"]:
                lines.setdefault(row["format"], []).append((case["state_bytes"], row[name]))
    words = "a copy" if name == "blocked_s" else "a plain write"
    return {words: [(case["state_bytes"], case["limits"][limit]) for case in cases], **lines}


def style(label: str) -> tuple[str, str]:
    """Returns colour and dashes of a line."""
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
    """Draws the names at the right, in the order of the lines' ends, spaced so that each can be read."""
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


MIB = 1 << 20
_MOST = ("blocked_s", "total_s", "load_s", "gather_s", "copy_s", "write_s", "write_fsync_s", "read_s")
_SUM = ("cpu_s", "bytes", "state_bytes")


def merge(measures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges all ranks' measurements of one turn: the slowest rank's seconds; sums of CPU time and bytes."""
    found: dict[str, Any] = {}
    for name in _MOST:
        if of := [each[name] for each in measures if name in each]:
            found[name] = max(of)
    for name in _SUM:
        if of := [each[name] for each in measures if name in each]:
            found[name] = sum(of)
    told = [each["losses"] for each in measures if "losses" in each]
    if told:
        found["losses"] = {
            group: list(dict.fromkeys(what for each in told for what in each[group])) for group in told[0]
        }
    return found


class Measures:
    """All measurements of a run."""

    def __init__(self) -> None:
        self._turns: dict[tuple[int, int, str], list[tuple[Turn, dict[str, Any]]]] = {}
        self._left_out: dict[tuple[int, int, str], dict[str, float]] = {}

    def add(self, ranks: int, turn: Turn, merged: dict[str, Any]) -> None:
        """Adds a turn's result of `merge`."""
        self._turns.setdefault((turn.parameter_bytes, ranks, turn.layout), []).append((turn, merged))

    def leave_out(self, ranks: int, turn: Turn, save_s: float) -> None:
        """Records that a turn was not measured, because a save would take `save_s`."""
        self._left_out.setdefault((turn.parameter_bytes, ranks, turn.layout), {})[turn.format] = save_s

    def cases(self) -> list[dict[str, Any]]:
        """Returns the cases in the order of their measurement."""
        return [
            _case(size, ranks, layout, [each for each in turns if each[0].round >= 0])
            | {"left_out": self._left_out.get((size, ranks, layout), {})}
            for (size, ranks, layout), turns in self._turns.items()
        ]

    def losses(self) -> dict[str, dict[str, list[str]]]:
        """Returns the losses by format and group, over all cases."""
        found: dict[str, dict[str, list[str]]] = {}
        for turns in self._turns.values():
            for turn, merged in turns:
                for group, lost in merged.get("losses", {}).items():
                    of = found.setdefault(turn.format, {}).setdefault(group, [])
                    of += [what for what in lost if what not in of]
        return found


def _case(size: int, ranks: int, layout: str, turns: list[tuple[Turn, dict[str, Any]]]) -> dict[str, Any]:
    base = {turn.round: merged for turn, merged in turns if turn.format == LIMITS}
    kinds = dict.fromkeys((turn.format, turn.fsync) for turn, _ in turns if turn.format != LIMITS)
    formats = []
    for name, fsync in kinds:
        of = {turn.round: m for turn, m in turns if (turn.format, turn.fsync) == (name, fsync)}
        formats.append({"format": name, "fsync": fsync, **_row(of, base, fsync)})
    measured = [merged for turn, merged in turns if turn.format != LIMITS]
    return {
        "parameter_bytes": size,
        "state_bytes": max((merged["state_bytes"] for merged in measured), default=0),
        "ranks": ranks,
        "layout": layout,
        "rounds": len(base),
        "limits": {
            name: statistics.median(merged[name] for merged in base.values())
            for name in ("copy_s", "write_s", "write_fsync_s", "read_s", "gather_s")
        },
        "formats": formats,
    }


def _row(of: Mapping[int, dict[str, Any]], base: Mapping[int, dict[str, Any]], fsync: bool) -> dict[str, Any]:
    """Computes medians, and ratios as medians of the rounds' ratios."""

    def ratio(one: str, other: str) -> float:
        ratios = [merged[one] / base[number][other] for number, merged in of.items()]
        return float(statistics.median(ratios))

    return {
        **{
            name: statistics.median(merged[name] for merged in of.values())
            for name in ("blocked_s", "total_s", "cpu_s", "load_s")
        },
        "bytes": round(statistics.median(merged["bytes"] for merged in of.values())),
        "size": statistics.median(merged["bytes"] / merged["state_bytes"] for merged in of.values()),
        "blocked_over_copy": ratio("blocked_s", "copy_s"),
        "total_over_write": ratio("total_s", "write_fsync_s" if fsync else "write_s"),
        "load_over_read": ratio("load_s", "read_s"),
    }


HEAD = (
    f"{'':<16} {'':>5} {'blocked':>9} {'total':>9} {'CPU':>9} {'load':>9} {'size':>6}   "
    f"{'blocked':>9} {'total':>10} {'load':>9}\n"
    f"{'':<16} {'fsync':>5} {'ms':>9} {'ms':>9} {'ms':>9} {'ms':>9} {'':>6}   "
    f"{'over copy':>9} {'over write':>10} {'over read':>9}"
)


def table(case: Mapping[str, Any]) -> str:
    """Formats one case as lines of text."""
    limits = case["limits"]
    ranks = f"{case['ranks']} rank" + ("s" if case["ranks"] > 1 else "")
    gathered = (
        f", gathered in {1e3 * limits['gather_s']:.1f} ms"
        if case["layout"] == "gathered"
        else ", sharded"
        if case["ranks"] > 1
        else ""
    )
    lines = [
        f"{case['parameter_bytes'] / MIB:g} MiB of parameters ({case['state_bytes'] / MIB:.1f} MiB of state), "
        f"{ranks}{gathered}",
        f"limits: copied in memory {1e3 * limits['copy_s']:.1f} ms, written {1e3 * limits['write_s']:.1f} ms, "
        f"with fsync {1e3 * limits['write_fsync_s']:.1f} ms, read {1e3 * limits['read_s']:.1f} ms",
        HEAD,
    ]
    for row in case["formats"]:
        times = " ".join(f"{1e3 * row[name]:9.1f}" for name in ("blocked_s", "total_s", "cpu_s", "load_s"))
        lines.append(
            f"{row['format']:<16} {'yes' if row['fsync'] else 'no':>5} {times} {row['size']:6.2f}   "
            f"{row['blocked_over_copy']:9.2f} {row['total_over_write']:10.2f} {row['load_over_read']:9.2f}"
        )
    lines += [
        f"{name:<16} left out: a save would take about {save_s:.1f} s (see --save-max)"
        for name, save_s in case["left_out"].items()
    ]
    return "\n".join(lines)


KEPT = "-"


def losses_table(losses: Mapping[str, Mapping[str, Sequence[str]]], skipped: Mapping[str, str]) -> str:
    """Formats the losses of each format, a column per group, and the reasons why others were not measured."""
    lines = []
    if losses:
        groups = list(next(iter(losses.values())))
        cells = {name: [",".join(of[group]) or KEPT for group in groups] for name, of in losses.items()}
        widths = [
            max(len(group), *(len(row[index]) for row in cells.values()))
            for index, group in enumerate(groups)
        ]
        lines += [f"what is lost ({KEPT}: nothing):", _columns("", groups, widths)]
        lines += [_columns(name, row, widths) for name, row in cells.items()]
    lines += [f"{name:<16} skipped: {why}" for name, why in skipped.items()]
    return "\n".join(lines)


def _columns(name: str, cells: Sequence[str], widths: Sequence[int]) -> str:
    return " ".join(
        [f"{name:<16}", *(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))]
    ).rstrip()
