"""`swift-ft bench plan`: CPU seconds of `swift-ft plan` for a thousand stages.

Measures all of the command but its start: parsing the profile, frontier, merges, intervals, and the output of --json
and --svg. Stage times and machine MTBFs are drawn at random, replays have up to four copies, and the log is never a
bottleneck. So almost every number of groups is on the frontier: the most work for that many machines.
"""

import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from swift_ft.cli_parser import Parser
from swift_ft.errors import UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.plan import plot, report
from swift_ft.lab.plan.profile import Parallel, Profile, parse

STAGES = 1000
GOAL_S = 2.0
SIZES = {"of one size": 1, "of two sizes, 1 : 2": 2, "of any size": 0}
"""Number of distinct boundary sizes; 0: each boundary has its own."""


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft bench plan", description="Measures the planner's processor time for a thousand stages."
    )
    output.add_json(parser)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default %(default)s")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = make_parser().parse_args(argv)
    output.check_json(arguments.json)
    if arguments.rounds < 1:
        raise UsageError("--rounds takes 1 or more")
    cases = [
        measure(machines, sizes, arguments.rounds) for machines in (STAGES // 8, STAGES) for sizes in SIZES
    ]
    document = {"machine": output.machine(), "rounds": arguments.rounds, "goal_s": GOAL_S, "cases": cases}
    output.write_json(arguments.json, document)
    print(text(document))
    return 0


def measure(machines: int, sizes: str, rounds: int) -> dict[str, Any]:
    """Measures the median CPU seconds of one plan over `rounds`, for that many machines and these boundary sizes."""
    profile = json.dumps(drawn(STAGES, machines, SIZES[sizes]).document())
    seconds, document = [], dict[str, Any]()
    for _ in range(rounds):
        began = time.process_time()
        document = report.build(parse(profile), None)
        report.dumps(document)
        plot.draw(document)
        seconds.append(time.process_time() - began)
    return {
        "machines": machines,
        "sizes": sizes,
        "exact": document["frontier"]["exact"],
        "points": len(document["frontier"]["points"]),
        "seconds": statistics.median(seconds),
    }


def drawn(stages: int, machines: int, sizes: int) -> Profile:
    """Draws a profile. `sizes`: see SIZES."""
    chance = np.random.default_rng(0)
    if sizes:
        boundaries = chance.integers(1, sizes + 1, stages - 1) * 1_000_000
    else:
        boundaries = chance.integers(500_000, 2_000_000, stages - 1)
    each = tuple(boundaries.tolist())
    return Profile(
        name="drawn",
        microbatches=128,
        forward_s=tuple(chance.uniform(0.001, 0.002, stages).tolist()),
        backward_s=tuple(chance.uniform(0.002, 0.004, stages).tolist()),
        forward_bytes=each,
        backward_bytes=each,
        machine_of_stage=tuple(stage * machines // stages for stage in range(stages)),
        log_write_bytes_per_s=1e12,
        log_read_bytes_per_s=1e12,
        network_bytes_per_s=1e9,
        checkpoint_interval_steps=100,
        checkpoint_bytes=(1000,) * stages,
        checkpoint_bytes_per_s=1e9,
        machine_mtbf_s=tuple(chance.uniform(1e6, 3e6, machines).tolist()),
        parallel=Parallel(copies_max=4, gradient_bytes=(100,) * stages),
    )


def text(document: dict[str, Any]) -> str:
    """Formats the document as text: a line for each case."""
    lines = [
        f"{STAGES} stages; {document['machine']}; medians of {document['rounds']} rounds",
        "",
        f"{'machines':>8}  {'boundaries':<20}  {'s':>6}  {'points':>6}",
    ]
    for case in document["cases"]:
        rounded = "" if case["exact"] else ", rounded"
        verdict = "" if case["seconds"] < document["goal_s"] else f"  above {document['goal_s']:g} s"
        sizes = case["sizes"] + rounded
        lines.append(
            f"{case['machines']:>8}  {sizes:<20}  {case['seconds']:6.2f}  {case['points']:>6}{verdict}"
        )
    return "\n".join(lines)
