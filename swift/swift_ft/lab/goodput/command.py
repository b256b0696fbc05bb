"""`swift-ft plan --goodput`: the expected share of time that is training, for every strategy."""

import argparse
from collections.abc import Sequence
from typing import Any

from swift_ft.cli_parser import Parser, add_json, check_file, write_json
from swift_ft.errors import UsageError
from swift_ft.lab.command_line import duration
from swift_ft.lab.goodput import figures, report, ways
from swift_ft.text import show, time_words

PRESET_DEFAULT, RANKS_PER_NODE_DEFAULT = "llama3", 8
REPLICA_RANKS_DEFAULT, STAGES_DEFAULT, MICROBATCHES_DEFAULT = 128, 16, 16
"""Llama 3 405B (table 4): 8 x 16 ranks hold a replica, the pipeline has 16 stages, a replica 16 sequences in a step."""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft plan --goodput",
        description="Predicts the share of time that is training, of every strategy.",
        epilog="docs/planning.md has the model",
    )
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
        ("--spares", int, "N", "spare nodes; default: enough"),
        ("--checkpoint-every", duration, "TIME", "such as 30min; default: the best interval"),
        ("--snapshot-every", duration, "TIME", "default: the best interval"),
    ):
        parser.add_argument(flag, type=kind, metavar=unit, help=words)
    words = "a figure of the model; may be repeated"
    parser.add_argument("--set", type=_figure, metavar="NAME=VALUE", action="append", default=[], help=words)
    add_json(parser)
    return parser


def request_of(options: argparse.Namespace) -> ways.Request:
    """Checks the options. Raises UsageError for an invalid value or an unusable file."""
    preset = figures.PRESETS[options.preset]
    given = {name: (value, "given") for name, value in options.set}
    mtbf_s, source = preset.mtbf_s, preset.source
    if options.machine_mtbf is not None:
        mtbf_s = options.machine_mtbf
        source = f"one in {time_words(mtbf_s)} of a node, as given"
    if not 1.0 <= mtbf_s <= 1e12:
        raise UsageError(f"--machine-mtbf {mtbf_s:g}: give 1 s to 1e12 s, such as 264d")
    of = figures.resolve(given)
    if of["repair_s"].value >= mtbf_s:
        raise UsageError(
            f"a node is in repair for {of['repair_s'].value / 3600:.4g} h and fails every "
            f"{mtbf_s / 3600:.4g} h: give a longer --machine-mtbf, or a shorter repair, such as --set "
            "repair_s=2h"
        )
    if 0 in (options.checkpoint_every, options.snapshot_every):
        raise UsageError("--checkpoint-every and --snapshot-every: give a time above 0, such as 30min")
    return ways.Request(
        cluster=_cluster(options, preset),
        mtbf_s=mtbf_s,
        figures=of,
        every_s=options.checkpoint_every,
        snapshot_every_s=options.snapshot_every,
        source=source,
    )


def _cluster(options: argparse.Namespace, preset: figures.Preset) -> ways.Cluster:
    ranks = preset.ranks if options.ranks is None else options.ranks
    per_node = (
        min(RANKS_PER_NODE_DEFAULT, ranks) if options.ranks_per_node is None else options.ranks_per_node
    )
    replicas = options.replicas
    if replicas is None:
        whole = ranks >= REPLICA_RANKS_DEFAULT and ranks % REPLICA_RANKS_DEFAULT == 0
        replicas = ranks // REPLICA_RANKS_DEFAULT if whole else 1
    stages = options.stages
    if stages is None:
        stages = max(1, min(STAGES_DEFAULT, ranks // max(1, replicas)))
    return ways.Cluster(
        ranks=ranks,
        ranks_per_node=per_node,
        replicas=replicas,
        stages=stages,
        microbatches=MICROBATCHES_DEFAULT if options.microbatches is None else options.microbatches,
        spares=options.spares,
    )


def _figure(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = duration(value) if name.endswith("_s") else float(value)
    except (ValueError, argparse.ArgumentTypeError):
        raise UsageError(f"--set {text}: write NAME=VALUE, such as load_s=40 or repair_s=20h") from None
    figures.check(name, number, f"--set {text}")
    return name, number


def main(argv: Sequence[str]) -> int:
    """Raises UsageError before anything is written."""
    options = make_parser().parse_args(argv)
    check_file("--json", options.json)
    document: dict[str, Any] = report.build(request_of(options))
    write_json(options.json, document)
    show(report.text(document))
    return 0
