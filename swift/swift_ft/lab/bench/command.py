"""`swift-ft bench NAME`: dispatches to the benchmark of that name."""

import importlib
import sys
from collections.abc import Sequence

from swift_ft.errors import SwiftError, UsageError

BENCHMARKS = {
    "log": "append to and read from the log: bytes per second over the wire's and the disk's, CPU seconds per GB",
    "overhead": "a session against the same pipeline in plain torch, and what the overhead is made of",
    "checkpoint": "a save in both modes, beside torch's DCP: how long training waits, what it costs the steps",
    "undo": "taking optimizer steps back: time over the step's time, bytes per parameter, error",
    "coordinator": "the coordinator's processor time for jobs of 64 to 1024 members: join, checkpoint, recovery",
    "replay": "a replayed step over the step as it was, alone and with helpers, beside the bound",
    "adaptive": "a pipeline with replicas without some of its ranks: its throughput over that of all, beside the plan",
    "abort": "an abort of every operation of process groups: time until whoever waits is freed",
    "recovery": "one of two ranks dies: torchrun with checkpoints, torchft, NVRx and swift side by side",
}


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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    try:
        if not arguments or arguments[0] not in BENCHMARKS:
            what = f"there is no benchmark {arguments[0]!r}" if arguments else "name a benchmark"
            raise UsageError(f"{what}; there are: {', '.join(BENCHMARKS)}")
        return int(importlib.import_module(f"swift_ft.lab.bench.{arguments[0]}").main(arguments[1:]))
    except SwiftError as error:
        print(f"swift: {error}", file=sys.stderr)
        return error.exit_code
