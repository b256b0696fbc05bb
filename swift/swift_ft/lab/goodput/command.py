"""`swift-ft plan --goodput`: the expected share of time that is training, for every strategy."""

import argparse
import html
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import read_given
from swift_ft.lab.chart import Scale, ticks
from swift_ft.lab.goodput import cluster as trace
from swift_ft.lab.goodput import figures, ways
from swift_ft.lab.goodput.cluster import Cluster, Faults, shape_of
from swift_ft.text import parse_json, show

# Reads figures from a file: the JSON of a bench, or names and values. Pure.
#
# - `swift-ft bench recovery --json`: per strategy the time that all ranks wait after a fault: from the kill to the next
#   new step, without that step and without repeated steps; and the overhead of a session in a step.
# - `swift-ft bench coordinator --json`: seconds of a recovery per member, from the largest case.
# - `{"step_s": 5.5, "load_s": 40, "stop_s": {"restart": 300}}`: figures by name, and stops by strategy.

SYSTEMS = {
    "torchrun": (ways.RESTART,),
    "swift": (ways.AUTO, ways.REPLICA),
    "swift-checkpoint": (ways.CHECKPOINT,),
    "swift-reinit": (ways.REINIT,),
    "swift-snapshot": (ways.SNAPSHOT,),
    "swift-shrink": (ways.SHRINK,),
    "swift-replay": (ways.REPLAY,),
}
"""System of the bench -> strategies. The bench runs two replicas, so `auto` copied from one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Figures read from a file."""

    figures: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Name -> value and source."""
    stops: Mapping[str, float] = field(default_factory=dict)
    """Strategy -> seconds that all ranks wait after a fault."""


def parse_figures(text: str, name: str) -> Measured:
    """Parses a file of figures. `name`: file name for the source. Raises UsageError, in one line, if it is invalid."""
    document = parse_json(text)
    if not isinstance(document, dict):
        raise UsageError('is no object: give names and values, such as {"load_s": 40}')
    if document.get("bench") == "recovery":
        return _recovery(document, f"swift-ft bench recovery ({name})")
    if "cases" in document and all("members" in case for case in _cases(document)):
        return _coordinator(document, f"swift-ft bench coordinator ({name})")
    return _plain(document, name)


def _number(holder: Any, key: str, where: str) -> float:
    value = holder.get(key) if isinstance(holder, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= figures.VALUE_MAX:
        raise UsageError(f"{where}: {key} must be a number, 0 or more")
    return float(value)


def _cases(document: dict[str, Any]) -> list[dict[str, Any]]:
    cases = document.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases) or not cases:
        raise UsageError("has no cases: give the whole JSON of the bench")
    return cases


def _recovery(document: dict[str, Any], source: str) -> Measured:
    stops: dict[str, float] = {}
    quiet: dict[str, float] = {}
    for number, case in enumerate(_cases(document), start=1):
        where = f"case {number}"
        system = case.get("system")
        if system not in SYSTEMS or "missing" in case or "failed" in case:
            continue
        step_s = _number(case, "step_s", where)
        stop_s = max(0.0, _number(case, "lost_s", where) - _number(case, "steps_again", where) * step_s)
        stops |= dict.fromkeys(SYSTEMS[system], stop_s)
        quiet[system] = _number(case.get("undisturbed"), "step_s", f"{where}, undisturbed")
    if not stops:
        raise UsageError("has no case that went on: give another run of swift-ft bench recovery")
    given = {}
    if {"torchrun", "swift"} <= quiet.keys():
        given["session_s_per_step"] = (max(0.0, quiet["swift"] - quiet["torchrun"]), source)
    return Measured(figures=given, stops=stops)


def _coordinator(document: dict[str, Any], source: str) -> Measured:
    cases = [
        (_number(case, "members", f"case {number}"), _number(case, "recovery_s", f"case {number}"))
        for number, case in enumerate(_cases(document), start=1)
    ]
    members, recovery_s = max(cases)
    if members < 1:
        raise UsageError("has no members: give the whole JSON of swift-ft bench coordinator")
    words = f"{source}: {recovery_s:.3g} s for {members:,.0f} members, in proportion"
    return Measured(figures={"coordinate_s_per_rank": (recovery_s / members, words)})


def _plain(document: dict[str, Any], name: str) -> Measured:
    given: dict[str, tuple[float, str]] = {}
    stops: dict[str, float] = {}
    for key, value in document.items():
        if key == "stop_s":
            if not isinstance(value, dict):
                raise UsageError('stop_s: give strategies and seconds, such as {"restart": 300}')
            stops = {way: _number(value, way, "stop_s") for way in value}
            for way in stops:
                check_way(way, "stop_s")
            continue
        if key not in figures.NAMES:
            figures.check(key, 0.0, "it")
        number = _number(document, key, "it")
        figures.check(key, number, "it")
        given[key] = (number, name)
    return Measured(figures=given, stops=stops)


def check_way(name: str, flag: str) -> None:
    """Raises UsageError, prefixed by `flag`, if there is no such strategy or its stop cannot be given."""
    known = [way for way in ways.NAMES if way not in (ways.GIVEN, ways.WAIT)]
    if name not in known:
        raise UsageError(f"{flag}: there is no strategy {name!r}; there are {', '.join(map(repr, known))}")


def value_of(name: str, text: str) -> float | None:
    """Parses the value of a figure; only times may have a unit. Returns None if it is not a number."""
    return duration(text) if name.endswith("_s") or not text[-1:].isalpha() else None


def duration(text: str) -> float | None:
    """Parses a duration such as 90, 90s, 30min, 20h or 264d to seconds. Returns None if it is not one."""
    units = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "d": figures.DAY_S}
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :]
    try:
        value = float(number) * units[unit]
    except (ValueError, KeyError):
        return None
    return value if math.isfinite(value) and value >= 0 else None


# Draws the useful share against the size of the cluster as one SVG file, a line for each strategy. Pure.

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 600, 540, 56, 188, 76, 62
"""Pixels: size of the drawing, and its margins for labels. A phone shows about half of them."""
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
"""Colour and dash pattern; strategies of one family have one colour."""
_STYLE = (
    "svg{background:#fff}text{font:16px system-ui,sans-serif;fill:#1f2328}.axis{stroke:#d1d9e0}"
    ".title{font-weight:600;font-size:18px}.words{fill:#59636e}.label{font-weight:600}.own{stroke:#59636e}"
)


def draw_goodput(document: dict[str, Any]) -> str:
    """Draws a document with a sweep (`swift_ft.lab.goodput.report.build`)."""
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
    """Draws the names at the right, in the order of the lines' ends, spaced so that they do not overlap."""
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


OWN = (
    "preset",
    "ranks",
    "ranks_per_node",
    "weibull_shape",
    "cv",
    "trace",
    "trace_nodes",
    "together",
    "spares",
    "checkpoint_every",
    "snapshot_every",
    "measured",
    "set",
    "stop",
    "seed",
)
SHARED = ("replicas", "stages", "microbatches")
"""Flags that this mode shares with --adaptive."""
PRESET_DEFAULT, REPLICA_RANKS_DEFAULT, STAGES_DEFAULT, MICROBATCHES_DEFAULT = "llama3", 128, 16, 16
"""Llama 3 405B (table 4): 8 x 16 ranks hold a replica, the pipeline has 16 stages, a replica 16 sequences in a step."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Checked command line of ``--goodput``."""

    cluster: Cluster
    faults: Faults
    figures: dict[str, figures.Figure]
    given: ways.Given
    source: str
    seed: int
    json: Path | None
    svg: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the share of time that is training, instead of PROFILE")
    group.add_argument(
        "--goodput",
        action="store_true",
        help="the share of every strategy, by formula and by simulation; takes --replicas, --stages, --microbatches "
        "and --machine-mtbf too (docs/goodput.md)",
    )
    group.add_argument(
        "--preset",
        choices=list(figures.PRESETS),
        help=f"ranks and faults of a published cluster; default: {PRESET_DEFAULT}",
    )
    group.add_argument("--ranks", type=int, metavar="N")
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="they are lost together; default: 8")
    group.add_argument(
        "--weibull-shape", type=float, metavar="K", help="of the times between two faults of the job"
    )
    group.add_argument(
        "--cv", type=float, metavar="X", help="coefficient of variation of these times, instead of the shape"
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="faults as they came: CSV with node, start_h, end_h"
    )
    group.add_argument("--trace-nodes", type=int, metavar="N", help="with --trace: nodes that were watched")
    group.add_argument(
        "--together", type=float, metavar="SHARE", help="of the faults that come with another one; default: 0"
    )
    group.add_argument("--spares", type=int, metavar="N", help="spare nodes; default: enough")
    group.add_argument("--checkpoint-every", metavar="TIME", help="such as 30min; default: the best interval")
    group.add_argument("--snapshot-every", metavar="TIME", help="default: the best interval")
    group.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        action="append",
        help="JSON of swift-ft bench recovery or coordinator, or of names and values; may be repeated",
    )
    group.add_argument(
        "--set", metavar="NAME=VALUE", action="append", help="a figure of the model; may be repeated"
    )
    group.add_argument(
        "--stop",
        metavar="STRATEGY=TIME",
        action="append",
        help="what all ranks wait for after a fault, as measured; may be repeated",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the simulation; default: 0")


def config_of(options: argparse.Namespace) -> Goodput:
    """Checks the options. Raises UsageError for an invalid value or an unusable file."""
    preset = figures.PRESETS[options.preset or PRESET_DEFAULT]
    given, stops = _figures(options)
    faults, source = _faults(options, preset)
    if faults.trace is not None and "repair_s" not in given:
        given["repair_s"] = (max(faults.trace.repair_s, 1e-3), f"the mean outage in {options.trace}")
    of = figures.resolve(given)
    if of["repair_s"].value >= faults.mtbf_s:
        raise UsageError(
            f"a node is in repair for {of['repair_s'].value / 3600:.4g} h and fails every "
            f"{faults.mtbf_s / 3600:.4g} h: give a longer --machine-mtbf, or a shorter repair, such as --set "
            "repair_s=2h"
        )
    seed = 0 if options.seed is None else options.seed
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed {seed}: give 0 or more")
    return Goodput(
        cluster=_cluster(options, preset),
        faults=faults,
        figures=of,
        given=ways.Given(
            every_s=_time(options.checkpoint_every, "--checkpoint-every"),
            snapshot_every_s=_time(options.snapshot_every, "--snapshot-every"),
            stops=stops,
        ),
        source=source,
        seed=seed,
        json=options.json,
        svg=options.svg,
    )


def _cluster(options: argparse.Namespace, preset: figures.Preset) -> Cluster:
    ranks = preset.ranks if options.ranks is None else options.ranks
    per_node = min(preset.ranks_per_node, ranks) if options.ranks_per_node is None else options.ranks_per_node
    replicas = options.replicas
    if replicas is None:
        whole = ranks >= REPLICA_RANKS_DEFAULT and ranks % REPLICA_RANKS_DEFAULT == 0
        replicas = ranks // REPLICA_RANKS_DEFAULT if whole else 1
    stages = options.stages
    if stages is None:
        stages = max(1, min(STAGES_DEFAULT, ranks // max(1, replicas)))
    return Cluster(
        ranks=ranks,
        ranks_per_node=per_node,
        replicas=replicas,
        stages=stages,
        microbatches=MICROBATCHES_DEFAULT if options.microbatches is None else options.microbatches,
        spares=options.spares,
    )


def _faults(options: argparse.Namespace, preset: figures.Preset) -> tuple[Faults, str]:
    """Returns the faults and a description of their source."""
    ways_given = [
        f"--{name.replace('_', '-')}"
        for name in ("weibull_shape", "cv", "trace")
        if getattr(options, name) is not None
    ]
    if len(ways_given) > 1:
        raise UsageError(f"give one of {' and '.join(ways_given)}: each says how faults follow each other")
    mtbf_s = _time(options.machine_mtbf, "--machine-mtbf")
    together = options.together or 0.0
    if options.trace is not None:
        if options.together is not None:
            raise UsageError("--together has no use with --trace, which has such faults itself")
        return _traced(options, mtbf_s)
    if options.trace_nodes is not None:
        raise UsageError("--trace-nodes is the number of nodes of --trace FILE: give it too")
    if options.weibull_shape is not None:
        shape, words = options.weibull_shape, f"Weibull, shape {options.weibull_shape:g}"
    elif options.cv is not None:
        shape, words = shape_of(options.cv), f"Weibull, coefficient of variation {options.cv:g}"
    else:
        shape, words = shape_of(preset.cv), "exponential" if preset.cv == 1 else "Weibull"
    rate = preset.source if mtbf_s is None else f"one in {options.machine_mtbf} of a node, as given"
    mtbf_s = preset.mtbf_s if mtbf_s is None else mtbf_s
    return Faults(mtbf_s=mtbf_s, shape=shape, together=together), f"{rate}; {words}"


def _traced(options: argparse.Namespace, mtbf_s: float | None) -> tuple[Faults, str]:
    read = _read(options.trace, trace.parse, "--trace")
    if mtbf_s is None:
        if options.trace_nodes is None:
            raise UsageError(
                f"--trace {options.trace}: give --trace-nodes, of all nodes that were watched; {read.nodes} had faults"
            )
        if not read.nodes <= options.trace_nodes <= 10**9:
            raise UsageError(
                f"--trace-nodes {options.trace_nodes}: give {read.nodes} or more, which had faults"
            )
        mtbf_s = read.mean_gap_s * options.trace_nodes
    words = f"{len(read.gaps_s) + 1} faults in {options.trace}, in their order; coefficient of variation {read.cv:.3g}"
    return Faults(mtbf_s=mtbf_s, trace=read), words


def _figures(options: argparse.Namespace) -> tuple[dict[str, tuple[float, str]], dict[str, float]]:
    """Returns (name -> value and source, strategy -> stop). The command line takes precedence over files."""
    given: dict[str, tuple[float, str]] = {}
    stops: dict[str, float] = {}
    for path in options.measured or ():
        read = _read(path, partial(parse_figures, name=path.name), "--measured")
        given |= read.figures
        stops |= read.stops
    for text in options.set or ():
        name, _, value = text.partition("=")
        number = value_of(name, value)
        if number is None:
            raise UsageError(f"--set {text}: write NAME=VALUE, such as load_s=40 or repair_s=20h")
        figures.check(name, number, f"--set {text}")
        given[name] = (number, "given")
    for text in options.stop or ():
        name, _, value = text.rpartition("=")
        seconds = duration(value)
        if seconds is None:
            raise UsageError(f"--stop {text}: write STRATEGY=TIME, such as restart=5min")
        check_way(name, f"--stop {text}")
        stops[name] = seconds
    return given, stops


def _read(path: Path, parse: Callable[[str], Parsed], flag: str) -> Parsed:
    content = read_given(path, f"{flag} {path}")
    try:
        return parse(content.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path}: is no text; give a file in UTF-8") from None
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from None


def _time(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    seconds = duration(text)
    if not seconds:
        raise UsageError(f"{flag} {text}: write a time above 0, such as 30min, 20h or 264d")
    return seconds


def run(config: Goodput) -> dict[str, str]:
    """Prints the tables. Returns the JSON and SVG contents to write, by flag. Raises ServiceError if numpy is
    missing."""
    try:
        from swift_ft.lab.goodput import report
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ServiceError("numpy is missing here: pip install 'swift-ft[lab]'") from None
    request = report.Request(
        cluster=config.cluster,
        faults=config.faults,
        figures=config.figures,
        given=config.given,
        seed=config.seed,
        source=config.source,
        repair_s=config.figures["repair_s"].value,
    )
    document: dict[str, Any] = report.build(request, sweep=config.json is not None or config.svg is not None)
    show(report.text(document))
    return {
        "json": json.dumps(document, indent=2) + "\n",
        "svg": draw_goodput(document) if config.svg is not None else "",
    }
