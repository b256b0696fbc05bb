"""`swift-ft bench NAME`: runs the benchmark of that name, and writes what it has found."""

import importlib
import sys
from collections.abc import Sequence

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.lab.commands import add_json, check_file, until_stopped, write_json

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


def usage() -> str:
    width = max(map(len, BENCHMARKS))
    lines = [f"  {name:<{width}}  {what}" for name, what in BENCHMARKS.items()]
    return "\n".join(
        [
            "Measures one part of swift against the limit of this machine, as ratios within one run.",
            "",
            "usage: swift-ft bench NAME [ARGS...] [--json PATH]",
            "",
            *lines,
            "",
            "swift-ft bench NAME --help says more.",
        ]
    )


def make_parser() -> Parser:
    """Returns a parser of the name alone: the flags of a benchmark are in its module, which may import torch."""
    parser = Parser(prog="swift-ft bench", description="Measures one part of swift.")
    parser.add_argument("name", choices=list(BENCHMARKS))
    return parser


def run(name: str, argv: Sequence[str]) -> int:
    """Runs a benchmark and returns the exit code: 1 if its verdict is FAIL, 3 if it is INCONCLUSIVE or INCOMPLETE.

    Its module has ``add_arguments(parser)``, and ``run(arguments)``, which prints as it measures and returns the
    document that ``--json`` writes. Raises UsageError and ServiceError.
    """
    module = importlib.import_module(f"swift_ft.lab.bench.{name}")
    parser = Parser(prog=f"swift-ft bench {name}", description=f"Measures {BENCHMARKS[name]}.")
    module.add_arguments(parser)
    add_json(parser)
    arguments = parser.parse_args(argv)
    check_file("--json", arguments.json)
    document = {"bench": name, **module.run(arguments)}
    write_json(arguments.json, document)
    return EXIT_CODES.get(document.get("verdict", ""), 0)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    return until_stopped("benchmark", lambda: _run_named(arguments))


def _run_named(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] not in BENCHMARKS:
        what = f"there is no benchmark {arguments[0]!r}" if arguments else "name a benchmark"
        raise UsageError(f"{what}; there are: {', '.join(BENCHMARKS)}")
    return run(arguments[0], arguments[1:])
