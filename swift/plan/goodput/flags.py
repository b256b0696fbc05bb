"""`swift-ft plan --goodput`: the expected share of time that is training, for every strategy."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from swift.errors import ServiceError, UsageError
from swift.plan.goodput import figures, measured, trace, ways
from swift.plan.goodput.cluster import Cluster, Faults, shape_of
from swift.words import show

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
"""Flags of --adaptive that this mode takes as well."""
PRESET_DEFAULT, REPLICA_RANKS_DEFAULT, STAGES_DEFAULT, MICROBATCHES_DEFAULT = "llama3", 128, 16, 16
"""Llama 3 405B (table 4): 8 x 16 ranks hold a replica, the pipeline has 16 stages, a replica 16 sequences in a step."""

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What the command line says, checked."""

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
    """Raises UsageError for a value that is none, or a file that cannot be used."""
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
    """And where they come from, in words."""
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
    read = _read(options.trace, trace.BYTES_MAX, trace.parse, "--trace")
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
    """Name -> value and source; strategy -> stop. What stands on the command line outweighs files."""
    given: dict[str, tuple[float, str]] = {}
    stops: dict[str, float] = {}
    for path in options.measured or ():
        read = _read(path, measured.BYTES_MAX, partial(measured.parse, name=path.name), "--measured")
        given |= read.figures
        stops |= read.stops
    for text in options.set or ():
        name, _, value = text.partition("=")
        number = measured.value_of(name, value)
        if number is None:
            raise UsageError(f"--set {text}: write NAME=VALUE, such as load_s=40 or repair_s=20h")
        figures.check(name, number, f"--set {text}")
        given[name] = (number, "given")
    for text in options.stop or ():
        name, _, value = text.rpartition("=")
        seconds = measured.duration(value)
        if seconds is None:
            raise UsageError(f"--stop {text}: write STRATEGY=TIME, such as restart=5min")
        measured.check_way(name, f"--stop {text}")
        stops[name] = seconds
    return given, stops


def _read(path: Path, bytes_max: int, parse: Callable[[str], Parsed], flag: str) -> Parsed:
    try:
        with path.open("rb") as file:
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise UsageError(f"{flag} {path}: {error.strerror}; give a file that can be read") from None
    if len(content) > bytes_max:
        raise UsageError(f"{flag} {path}: has more than {bytes_max} bytes; give a smaller file")
    try:
        return parse(content.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path}: is no text; give a file in UTF-8") from None
    except UsageError as error:
        raise UsageError(f"{flag} {path}: {error}") from None


def _time(text: str | None, flag: str) -> float | None:
    if text is None:
        return None
    seconds = measured.duration(text)
    if not seconds:
        raise UsageError(f"{flag} {text}: write a time above 0, such as 30min, 20h or 264d")
    return seconds


def run(config: Goodput) -> dict[str, str]:
    """Shows the tables. Returns what is to be written as JSON and as SVG, by flag. ServiceError: numpy is missing."""
    try:
        from swift.plan.goodput import plot, report
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise ServiceError("numpy is missing here: pip install 'swift-ft[plan]'") from None
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
        "svg": plot.draw(document) if config.svg is not None else "",
    }
