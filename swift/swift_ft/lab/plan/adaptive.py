"""`swift-ft plan --adaptive`: predicts the throughput of a job with replicas after losses."""

import argparse
import json

from swift_ft.errors import UsageError
from swift_ft.lab.plan import rerouted
from swift_ft.planner.schedule import Costs
from swift_ft.text import show

FLAGS = ("stages", "replicas", "microbatches", "times", "cap_factor", "failures")
_TIMES = "1,1,1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a job with replicas that loses ranks, instead of PROFILE")
    group.add_argument(
        "--adaptive",
        action="store_true",
        help="the throughput with which replicas do the work of lost ranks; needs the next three flags",
    )
    group.add_argument("--stages", type=int, metavar="P", help="of the pipeline, one on each rank")
    group.add_argument("--replicas", type=int, metavar="D", help="of each stage")
    group.add_argument("--microbatches", type=int, metavar="M", help="of each replica in a step")
    group.add_argument(
        "--times",
        metavar="F,I,W[,TRANSFER]",
        help="of a forward, the backward's parts for inputs and for weights, and a transfer, in any unit; "
        f"default: {_TIMES}",
    )
    group.add_argument(
        "--cap-factor", type=float, metavar="X", help="activations in memory, times those of 1F1B; default: 1"
    )
    group.add_argument("--failures", type=int, metavar="K", help="up to so many ranks are lost; default: 2")


def config_of(options: argparse.Namespace) -> rerouted.Request:
    """Checks the options. Raises UsageError for an invalid value or a missing flag."""
    missing = [
        f"--{name}" for name in ("stages", "replicas", "microbatches") if getattr(options, name) is None
    ]
    if missing:
        raise UsageError(
            f"--adaptive needs {' and '.join(missing)}, such as --stages 4 --replicas 4 --microbatches 8"
        )
    if options.svg is not None:
        raise UsageError("--svg draws the plan of a PROFILE: leave it out with --adaptive")
    return rerouted.Request(
        stages=options.stages,
        replicas=options.replicas,
        microbatches=options.microbatches,
        costs=_costs(options.times or _TIMES),
        cap_factor=1.0 if options.cap_factor is None else options.cap_factor,
        losses=2 if options.failures is None else options.failures,
    )


def _costs(text: str) -> Costs:
    try:
        times = [float(word) for word in text.split(",")]
    except ValueError:
        times = []
    if len(times) not in (3, 4) or not all(0 <= time <= 1e9 for time in times) or min(times[:3]) <= 0:
        raise UsageError(f"--times {text}: write F,I,W or F,I,W,TRANSFER, such as 1,1,1 or 2,2.1,1.9,0.3")
    forward, inputs, weights, transfer = [*times, 0.0][:4]
    return Costs(forward=(forward,), backward_input=(inputs,), backward_weight=(weights,), transfer=transfer)


def run(request: rerouted.Request) -> dict[str, str]:
    """Prints the table. Returns the contents of files to write, by flag."""
    document = rerouted.build_rerouted(request)
    show(rerouted.rerouted_text(document))
    return {"json": json.dumps(document, indent=2) + "\n"}
