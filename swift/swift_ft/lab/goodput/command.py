"""`swift-ft plan --goodput`: the expected share of time that is training, for every strategy."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.lab.failures.schedule import read_trace
from swift_ft.lab.goodput import figures, report, ways
from swift_ft.lab.goodput.cluster import Cluster, Faults, Trace, shape_of
from swift_ft.lab.plan.arguments import add_output, duration, write
from swift_ft.text import show, time_words


def check_way(name: str, flag: str) -> None:
    """Raises UsageError, prefixed by `flag`, if there is no such strategy or its stop cannot be given."""
    known = [way for way in ways.NAMES if way not in (ways.GIVEN, ways.WAIT)]
    if name not in known:
        raise UsageError(f"{flag}: there is no strategy {name!r}; there are {', '.join(map(repr, known))}")


PRESET_DEFAULT, REPLICA_RANKS_DEFAULT, STAGES_DEFAULT, MICROBATCHES_DEFAULT = "llama3", 128, 16, 16
"""Llama 3 405B (table 4): 8 x 16 ranks hold a replica, the pipeline has 16 stages, a replica 16 sequences in a step."""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft plan --goodput",
        description="Predicts the share of time that is training, of every strategy, by formula and by simulation.",
        epilog="docs/planning.md has the model",
    )
    parser.add_argument("--goodput", action="store_true", help=argparse.SUPPRESS)
    presets = list(figures.PRESETS)
    parser.add_argument(
        "--preset", choices=presets, default=PRESET_DEFAULT, help="a published cluster; default: %(default)s"
    )
    for flag, kind, unit, words in (
        ("--ranks", int, "N", "of the cluster; default: those of the preset"),
        ("--ranks-per-node", int, "N", "they are lost together; default: 8"),
        ("--replicas", int, "D", "of the model"),
        ("--stages", int, "P", "of the pipeline"),
        ("--microbatches", int, "M", "of each replica in a step"),
        ("--machine-mtbf", duration, "TIME", "mean time between two faults of a node, such as 264d"),
        ("--cv", float, "X", "coefficient of variation of the times between two faults of the job"),
        ("--trace", Path, "FILE", "faults as they came: a trace of swift-ft run --failures, in days"),
        ("--trace-nodes", int, "N", "with --trace: nodes that were watched"),
        ("--spares", int, "N", "spare nodes; default: enough"),
        ("--checkpoint-every", duration, "TIME", "such as 30min; default: the best interval"),
        ("--snapshot-every", duration, "TIME", "default: the best interval"),
    ):
        parser.add_argument(flag, type=kind, metavar=unit, help=words)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulation; default: 0")
    more: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--set", type=_figure, metavar="NAME=VALUE", help="a figure of the model; may be repeated", **more
    )
    stop = "what all ranks wait for after a fault, as measured; may be repeated"
    parser.add_argument("--stop", type=_stop, metavar="STRATEGY=TIME", help=stop, **more)
    add_output(parser)
    return parser


def request_of(options: argparse.Namespace) -> ways.Request:
    """Checks the options. Raises UsageError for an invalid value or an unusable file."""
    preset = figures.PRESETS[options.preset]
    given = {name: (value, "given") for name, value in options.set}
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
    if 0 in (options.checkpoint_every, options.snapshot_every):
        raise UsageError("--checkpoint-every and --snapshot-every: give a time above 0, such as 30min")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed {options.seed}: give 0 or more")
    return ways.Request(
        cluster=_cluster(options, preset),
        faults=faults,
        figures=of,
        every_s=options.checkpoint_every,
        snapshot_every_s=options.snapshot_every,
        stops=dict(options.stop),
        source=source,
        seed=options.seed,
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
    if options.trace is not None:
        return _traced(options)
    if options.trace_nodes is not None:
        raise UsageError("--trace-nodes is the number of nodes of --trace FILE: give it too")
    mtbf_s, rate = preset.mtbf_s, preset.source
    if options.machine_mtbf is not None:
        mtbf_s, rate = (
            options.machine_mtbf,
            f"one in {time_words(options.machine_mtbf)} of a node, as given",
        )
    cv = preset.cv if options.cv is None else options.cv
    law = "exponential" if cv == 1 else f"Weibull, coefficient of variation {cv:g}"
    return Faults(mtbf_s=mtbf_s, shape=shape_of(cv)), f"{rate}; {law}"


def _traced(options: argparse.Namespace) -> tuple[Faults, str]:
    if options.cv is not None:
        raise UsageError("give one of --cv and --trace: each says how faults follow each other")
    outages = [outage for outage in read_trace(options.trace, "--trace") if outage.end is not None]
    day_s = figures.DAY_S
    try:
        trace = Trace.of([(each.start * day_s, (each.end or 0.0) * day_s, each.node) for each in outages])
    except UsageError as error:
        raise UsageError(f"--trace {options.trace}: {error}") from None
    mtbf_s, nodes = options.machine_mtbf, options.trace_nodes
    if mtbf_s is None:
        if nodes is None or not trace.nodes <= nodes <= 10**9:
            raise UsageError(
                f"--trace {options.trace}: give --trace-nodes, of all nodes that were watched; {trace.nodes} had faults"
            )
        mtbf_s = trace.mean_gap_s * nodes
    words = (
        f"{len(outages)} faults in {options.trace}, in their order; coefficient of variation {trace.cv:.3g}"
    )
    return Faults(mtbf_s=mtbf_s, trace=trace), words


def _figure(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = duration(value) if name.endswith("_s") else float(value)
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--set {text}: write NAME=VALUE, such as load_s=40 or repair_s=20h") from None
    figures.check(name, number, f"--set {text}")
    return name, number


def _stop(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    check_way(name, f"--stop {text}")
    return name, duration(value)


def main(argv: Sequence[str]) -> int:
    """Raises UsageError before anything is written."""
    options = make_parser().parse_args(argv)
    document: dict[str, Any] = report.build(request_of(options))
    write(options.json, lambda: json.dumps(document, indent=2) + "\n")
    show(report.text(document))
    return 0
