"""`swift-ft bench NAME`: runs the benchmark of that name, and writes what it has found."""

import argparse
from collections.abc import Sequence

from swift_ft.cli_parser import Parser, add_json, check_file, import_with_extra, write_json
from swift_ft.lab.command_line import until_stopped
from swift_ft.text import table

BENCHMARKS = {
    "log": "the log's appends and reads: bytes per second over the disk's, CPU seconds per GB",
    "overhead": "a session against the same pipeline in plain torch: wall time and CPU time",
    "checkpoint": "a save in both modes, beside torch's DCP: how long training waits, what it costs the steps",
    "coordinator": "the coordinator's processor time for jobs of many members: join, checkpoint, recovery",
    "adaptive": "a pipeline with replicas without some of its ranks: its steps over those of all, beside the plan",
    "shrink": "a killed member, until the others have shrunk and agreed, beside Open MPI with ULFM",
    "recovery": "what it costs that one of two ranks dies: torchrun with checkpoints, torchft, NVRx and swift",
}
"""Each benchmark, and what it measures."""
EXIT_CODES = {"FAIL": 1, "INCONCLUSIVE": 3, "INCOMPLETE": 3}


def make_parser() -> Parser:
    """Returns a parser of the name alone: the flags of a benchmark are in its module, which may import torch."""
    parser = Parser(
        prog="swift-ft bench",
        description="Measures one part of swift against the limit of this machine, as ratios within one run.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [*table(list(BENCHMARKS.items()), left=2), "", "swift-ft bench NAME --help says more."]
        ),
    )
    parser.add_argument("name", choices=list(BENCHMARKS), metavar="NAME", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of that benchmark")
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit code: 1 if its verdict is FAIL, 3 if it is INCONCLUSIVE or INCOMPLETE.

    Its module has ``add_arguments(parser)``, and ``run(arguments)``, which prints as it measures and returns the
    document that ``--json`` writes. Raises UsageError and ServiceError.
    """
    module = import_with_extra(f"swift_ft.lab.bench.{name}", f"bench {name}", "lab")
    parser = Parser(prog=f"swift-ft bench {name}", description=f"Measures {BENCHMARKS[name]}.")
    module.add_arguments(parser)
    add_json(parser)
    arguments = parser.parse_args(argv)
    check_file("--json", arguments.json)
    document = {"bench": name, **module.run(arguments)}
    write_json(arguments.json, document)
    return EXIT_CODES.get(document.get("verdict", ""), 0)


def main(argv: Sequence[str] | None = None) -> int:
    def run_named() -> int:
        given = make_parser().parse_args(argv)
        return run(given.name, given.arguments)

    return until_stopped("benchmark", run_named)
