"""`swift-ft plan --goodput`: the expected share of time that is training, for every strategy."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from swift_ft.errors import ServiceError, UsageError
from swift_ft.files import read_given
from swift_ft.lab import drawing
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


STYLES = {
    ways.RESTART: ("#57606a", "-"),
    ways.GIVEN: ("#57606a", "--"),
    ways.WAIT: ("#57606a", ":"),
    ways.CHECKPOINT: ("#953800", "-"),
    ways.REINIT: ("#953800", "--"),
    ways.SNAPSHOT: ("#bf8700", "-"),
    ways.REPLICA: ("#1a7f37", "-"),
    ways.REPLAY: ("#8250df", "-"),
    ways.SHARED: ("#8250df", "--"),
    ways.AUTO: ("#0969da", "-"),
    ways.SHRINK: ("#cf222e", "-"),
    ways.ADAPTIVE: ("#1b7c83", "-"),
    ways.DROP: ("#cf222e", "--"),
    ways.LOSSY: ("#cf222e", ":"),
}
"""Colour and dash pattern; strategies of one family have one colour."""


def draw_goodput(document: dict[str, Any]) -> str:
    """Draws a document with a sweep (`swift_ft.lab.goodput.report.build`) as SVG: the useful share against the size of
    the cluster, a line for each strategy by the formula, dots by the simulation."""
    sweep, faults = document["sweep"], document["faults"]
    figure, axes = drawing.new(8, 5.5, "Share of time that is training")
    ends = {name: point["strategies"][name]["formula"] for point in sweep for name in point["strategies"]}
    for name in sorted(ends, key=lambda name: -ends[name]):
        points = [
            (point["ranks"], point["strategies"][name]) for point in sweep if name in point["strategies"]
        ]
        sizes = [ranks for ranks, _ in points]
        colour, dashes = STYLES[name]
        axes.plot(sizes, [of["formula"] for _, of in points], color=colour, linestyle=dashes, label=name)
        shares, errors = [of["simulated"] for _, of in points], [of["error"] for _, of in points]
        axes.errorbar(sizes, shares, errors, color=colour, fmt=".")
    axes.axvline(document["ranks"], color="#59636e", linestyle=":")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(
        lambda ranks, _: f"{ranks:,.0f}" if ranks < 10_000 else f"{ranks / 1000:.0f}k"
    )
    axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axes.set_ylim(0, 1)
    rate = 1000 * figures.DAY_S / faults["node_mtbf_s"]
    axes.set_xlabel(
        f"ranks; lines: formula, dots: simulated; dotted: {document['ranks']:,}\n{rate:.3g} faults in 1,000 "
        f"node-days; repaired after {faults['repair_s'] / 3600:.3g} h on average"
    )
    figure.legend(loc="outside right upper", frameon=False)
    return drawing.svg(figure)


OWN = (
    *("preset", "ranks", "ranks_per_node", "cv", "trace", "trace_nodes", "together", "spares"),
    *("checkpoint_every", "snapshot_every", "measured", "set", "stop", "seed"),
)
SHARED = ("replicas", "stages", "microbatches")
"""Flags that this mode shares with --adaptive."""
PRESET_DEFAULT, REPLICA_RANKS_DEFAULT, STAGES_DEFAULT, MICROBATCHES_DEFAULT = "llama3", 128, 16, 16
"""Llama 3 405B (table 4): 8 x 16 ranks hold a replica, the pipeline has 16 stages, a replica 16 sequences in a step."""

Parsed = TypeVar("Parsed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the share of time that is training, instead of PROFILE")
    group.add_argument(
        "--goodput",
        action="store_true",
        help="the share of every strategy, by formula and by simulation; takes --replicas, --stages, --microbatches "
        "and --machine-mtbf too (docs/goodput.md)",
    )
    presets = list(figures.PRESETS)
    group.add_argument("--preset", choices=presets, help=f"a published cluster; default: {PRESET_DEFAULT}")
    for flag, kind, unit, words in (
        ("--ranks", int, "N", "of the cluster; default: those of the preset"),
        ("--ranks-per-node", int, "N", "they are lost together; default: 8"),
        ("--cv", float, "X", "coefficient of variation of the times between two faults of the job"),
        ("--trace", Path, "FILE", "faults as they came: CSV with node, start_h, end_h"),
        ("--trace-nodes", int, "N", "with --trace: nodes that were watched"),
        ("--together", float, "SHARE", "of the faults that come with another one; default: 0"),
        ("--spares", int, "N", "spare nodes; default: enough"),
        ("--checkpoint-every", str, "TIME", "such as 30min; default: the best interval"),
        ("--snapshot-every", str, "TIME", "default: the best interval"),
        ("--seed", int, "N", "of the simulation; default: 0"),
    ):
        group.add_argument(flag, type=kind, metavar=unit, help=words)
    for flag, kind, unit, words in (
        (
            "--measured",
            Path,
            "FILE",
            "JSON of swift-ft bench recovery or coordinator, or of names and values",
        ),
        ("--set", str, "NAME=VALUE", "a figure of the model"),
        ("--stop", str, "STRATEGY=TIME", "what all ranks wait for after a fault, as measured"),
    ):
        group.add_argument(flag, type=kind, metavar=unit, action="append", help=f"{words}; may be repeated")


def config_of(options: argparse.Namespace) -> ways.Request:
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
    return ways.Request(
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
    if options.cv is not None and options.trace is not None:
        raise UsageError("give one of --cv and --trace: each says how faults follow each other")
    mtbf_s = _time(options.machine_mtbf, "--machine-mtbf")
    together = options.together or 0.0
    if options.trace is not None:
        if options.together is not None:
            raise UsageError("--together has no use with --trace, which has such faults itself")
        return _traced(options, mtbf_s)
    if options.trace_nodes is not None:
        raise UsageError("--trace-nodes is the number of nodes of --trace FILE: give it too")
    if options.cv is not None:
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


def run(request: ways.Request, *, written: bool, drawn: bool) -> dict[str, str]:
    """Prints the tables. Returns the JSON and SVG contents to write, by flag. Raises ServiceError if numpy or
    matplotlib is missing."""
    try:
        from swift_ft.lab.goodput import report
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ServiceError("numpy is missing here: pip install 'swift-ft[lab]'") from None
    document: dict[str, Any] = report.build(request, sweep=written or drawn)
    contents = {"json": json.dumps(document, indent=2) + "\n", "svg": draw_goodput(document) if drawn else ""}
    show(report.text(document))
    return contents
