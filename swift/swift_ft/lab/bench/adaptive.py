"""`swift-ft bench adaptive`: throughput of a pipeline with replicas while ranks are missing, over that of all ranks.

Real processes, real kills, real messages. Stages are *paced*: they wait instead of computing (one unit each for a
forward, the gradients of inputs and those of weights), so that many ranks fit on few cores. What is measured is how
well the others fill their time, and what the exact sums cost. In each run some ranks are killed half-way. Both medians
are of that run: steps of all ranks by torch's own 1F1B, and steps without those ranks.

    fused      the peers of a lost rank compute its microbatches, with whole backwards
    split      gradients of weights are computed where nobody waits for them
    memory     the same, with twice the activations
    staggered  as `memory`, and a rank begins the next step before other stages have done this one
    inexact    as `memory`, and gradients of other origins are added to a rank's own

Beside each: what the planner says of the same work (`plan`), below which no order gets (`bound`), and what is left of
the batch if the lost ranks' pipelines are dropped (`dropped`, which changes the result). `held` is what a peer held at
most of other replicas' gradients, in copies of its stage's.

With `--simulated` nothing runs: the planner says for each shape what a step takes while ranks are missing at the worst
place. What others have published stands beside it.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.drill.cluster import Cluster
from swift_ft.lab.plan import rerouted
from swift_ft.planner.schedule import Costs, Work, plan_step, shared, shortest_period

MODES: dict[str, dict[str, Any]] = {
    "fused": {"split_backward": False},
    "split": {},
    "memory": {"adaptive_memory": 2.0},
    "staggered": {"adaptive_memory": 2.0, "staggered": True},
    "inexact": {"adaptive_memory": 2.0, "exact_gradients": False, "allow_inexact": True},
}
EXACT_MAX = 1.03
"""Upper limit of the time of exact steps over inexact ones."""
PLAN_MAX = 1.05
"""Upper limit of the measured time over the planned time."""
SIMULATED = "4x4x8,2x4x8,4x8x16,8x16x32"
"""Default shapes: replicas x stages x microbatches."""
LOSSES_MAX = 2
PUBLISHED = (
    "ReCycle: up to 1.46 times the throughput of Oobleck, and 1.64 times that of Bamboo",
    "(arXiv 2405.14009; GPUs, its own models, spot preemptions; nothing of it is measured here)",
)
_NUMBERS = 1 << 16
"""Elements of a stage's weight. So few that a peer's memory for other replicas is almost only their gradients."""
_NUMBER_BYTES = 4
_BEFORE, _AFTER, _SKIPPED = 9, 9, 3
"""Steps with all ranks, steps with some missing, and the steps at the start of both that are not counted."""


class Measured(NamedTuple):
    """The measurements of one run."""

    full_s: float
    """Median seconds of a step of all ranks."""
    less_s: float
    """Median seconds of a step with ranks missing."""
    held: float
    """The most gradients of other replicas that a rank held, in copies of its stage's gradients."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="swift-ft bench adaptive", description=__doc__)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--lost", default="1:0", help="STAGE:REPLICA,... that are killed (1:0)")
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a unit of work (0.05)")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)} (all)")
    parser.add_argument(
        "--simulated",
        nargs="?",
        const=SIMULATED,
        metavar="SHAPES",
        help=f"run nothing; plan for these, as REPLICASxSTAGESxMICROBATCHES,... ({SIMULATED})",
    )
    output.add_json(parser)
    given = parser.parse_args(argv)
    output.check_json(given.json)
    if given.simulated is not None:
        result = simulated(_shapes(given.simulated))
        for line in _simulated_table(result):
            print(line)
        output.write_json(given.json, result)
        return 0
    lost = _lost(given.lost, given.stages, given.replicas)
    modes = [mode for mode in given.modes.split(",") if mode]
    if unknown := [mode for mode in modes if mode not in MODES]:
        raise UsageError(f"bench adaptive: --modes {unknown[0]}: give some of {', '.join(MODES)}")
    if given.microbatches < given.stages or given.unit <= 0:
        raise UsageError("bench adaptive: give at least as many microbatches as stages, and a --unit above 0")
    result = measure(given.stages, given.replicas, given.microbatches, lost, given.unit, modes)
    print(_table(result))
    output.write_json(given.json, result)
    return {"PASS": 0, "FAIL": 1}.get(result["verdict"], 3)


def measure(
    stages: int,
    replicas: int,
    microbatches: int,
    lost: Sequence[tuple[int, int]],
    unit_s: float,
    modes: Sequence[str],
) -> dict[str, Any]:
    """Runs each mode. ``modes``: by name the `Measured` run, and a step over a full one: measured, planned, bound."""
    found: dict[str, dict[str, float]] = {}
    for mode in modes:
        measured = _run(stages, replicas, microbatches, lost, unit_s, MODES[mode])
        planned, bound = _planned(stages, replicas, microbatches, lost, mode)
        found[mode] = {
            **measured._asdict(),
            "time": measured.less_s / measured.full_s,
            "plan": planned,
            "bound": bound,
        }
    pipelines = {replica for _, replica in lost}
    exact = (
        found["memory"]["less_s"] / found["inexact"]["less_s"]
        if {"memory", "inexact"} <= found.keys()
        else None
    )
    met = all(each["time"] <= PLAN_MAX * each["plan"] for each in found.values())
    met = met and (exact is None or exact <= EXACT_MAX)
    return {
        "bench": "adaptive",
        "machine": output.machine(),
        "paced": True,
        "stages": stages,
        "replicas": replicas,
        "microbatches": microbatches,
        "lost": [list(slot) for slot in lost],
        "unit_s": unit_s,
        "modes": found,
        "dropped": 1 - len(pipelines) / replicas,
        "exact_over_inexact": exact,
        "verdict": "PASS" if met else "FAIL",
    }


def simulated(requests: Sequence[rerouted.Request]) -> dict[str, Any]:
    """Plans without running. ``shapes``: for each, the result of `swift-ft plan --adaptive` for up to two losses."""
    shapes = [rerouted.build_rerouted(request) for request in requests]
    return {"bench": "adaptive", "simulated": True, "shapes": shapes, "published": list(PUBLISHED)}


def _shapes(words: str) -> list[rerouted.Request]:
    requests = []
    for word in words.split(","):
        try:
            replicas, stages, microbatches = map(int, word.lower().split("x"))
        except ValueError:
            raise UsageError(
                f"bench adaptive: --simulated {word}: give REPLICASxSTAGESxMICROBATCHES, with commas between"
            ) from None
        losses = min(LOSSES_MAX, stages * (replicas - 1))
        requests.append(
            rerouted.Request(
                stages=stages,
                replicas=replicas,
                microbatches=microbatches,
                costs=Costs(),
                cap_factor=1.0,
                losses=losses,
            )
        )
    return requests


def _simulated_table(result: dict[str, Any]) -> list[str]:
    """Formats for each shape and number of losses a step over that of all ranks, by way, with its bound."""
    lines = [
        "planned, nothing is run: a step over one of all ranks with whole backwards (no order is below this)"
    ]
    for shape in result["shapes"]:
        lines += [
            "",
            f"{shape['replicas']} replicas, {shape['stages']} stages, {shape['microbatches']} microbatches",
        ]
        names = list(shape["rows"][0]["ways"])
        lines.append("losses  " + "".join(f"{name:>14}" for name in names) + "   dropped: throughput")
        for row in shape["rows"]:
            over = [
                f"{way['length'] / shape['whole']:.2f} ({way['bound'] / shape['whole']:.2f})"
                for way in row["ways"].values()
            ]
            lines.append(
                f"{row['losses']:>6}  " + "".join(f"{each:>14}" for each in over) + f"{row['dropped']:>12.0%}"
            )
    return [*lines, "", "published:", *(f"  {line}" for line in result["published"])]


def _run(
    stages: int,
    replicas: int,
    microbatches: int,
    lost: Sequence[tuple[int, int]],
    unit_s: float,
    settings: dict[str, Any],
) -> Measured:
    killed = [stage * replicas + replica for stage, replica in lost]
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as place:
        out = Path(place, "out")
        out.mkdir()
        told = {
            "stages": stages,
            "replicas": replicas,
            "microbatches": microbatches,
            "numbers": _NUMBERS,
            "unit_s": unit_s,
            "steps": _BEFORE + _AFTER,
            "settings": settings,
            "out": str(out),
        }
        faults = [{"id": f"f{rank}", "rank": rank, "step": _BEFORE, "phase": "idle"} for rank in killed]
        with Cluster(
            Path(place, "job"),
            ranks=stages * replicas,
            spares=0,
            max_restarts=0,
            trainer=[str(Path(__file__).with_name("adaptive_ranks.py"))],
            trainer_arguments=[json.dumps(told)],
            faults=json.dumps(faults),
        ) as cluster:
            deadline = time.monotonic() + 120 + 30 * unit_s * (_BEFORE + _AFTER) * microbatches
            while (code := cluster.poll()) is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if code != 0:
                how = "did not come to its end" if code is None else f"ended with code {code}"
                raise ServiceError(f"bench adaptive: the job {how}: {cluster.output_tail()}")
            held = [e["gradient_bytes"] for e in cluster.tail.read() if e["event"] == "adopted_step"]
        left = min(set(range(stages * replicas)) - set(killed))
        over = {int(step): t for step, t in json.loads((out / f"{left}.json").read_text()).items()}
    took = [over[step] - over[step - 1] for step in sorted(over) if step - 1 in over]
    full, less = took[: _BEFORE - 1], took[_BEFORE - 1 :]
    copies = max(held) / (_NUMBERS * _NUMBER_BYTES)
    return Measured(statistics.median(full[_SKIPPED:]), statistics.median(less[_SKIPPED:]), copies)


def _planned(
    stages: int, replicas: int, microbatches: int, lost: Sequence[tuple[int, int]], mode: str
) -> tuple[float, float]:
    """Returns the length of the planned step and of the bound, over that of 1F1B with all ranks."""
    settings = MODES[mode]
    split = settings.get("split_backward", True)
    rest = (1.0,) * (stages - 1)
    memory = settings.get("adaptive_memory", 1.0)
    work = Work(
        stages=stages,
        origins=replicas,
        microbatches=microbatches,
        owners=shared(
            group_stages=[[s] for s in range(stages)], origins=replicas, microbatches=microbatches, lost=lost
        ),
        split=split,
        costs=Costs(backward_input=(0.0, *rest), backward_weight=(2.0, *rest)),
        cap={
            stage * replicas + replica: round(min(microbatches, stages - stage) * memory)
            for stage in range(stages)
            for replica in range(replicas)
        },
    )
    usual = 3.0 * (microbatches + stages - 1)
    staggered = settings.get("staggered", False)
    planned = shortest_period(work, staggered=True) if staggered else plan_step(work).length
    bound = work.period_bound() if staggered else work.bound()
    return planned / usual, bound / usual


def _lost(words: str, stages: int, replicas: int) -> list[tuple[int, int]]:
    try:
        lost = [
            (int(stage), int(replica))
            for stage, replica in (word.split(":") for word in words.split(",") if word)
        ]
    except ValueError:
        raise UsageError(f"bench adaptive: --lost {words}: give STAGE:REPLICA, with commas between") from None
    for stage, replica in lost:
        if not (0 <= stage < stages and 0 <= replica < replicas):
            raise UsageError(f"bench adaptive: --lost {stage}:{replica}: there is no such rank")
    if any([stage for stage, _ in lost].count(stage) >= replicas for stage in range(stages)):
        raise UsageError(f"bench adaptive: --lost {words}: leave one replica of each stage")
    return lost


def _table(result: dict[str, Any]) -> str:
    shape = f"{result['replicas']} replicas, {result['stages']} stages, {result['microbatches']} microbatches"
    lost = ", ".join(f"stage {stage} of replica {replica}" for stage, replica in result["lost"])
    lines = [
        f"{shape}; lost: {lost}; paced: a unit of work is a wait of {result['unit_s']:g} s",
        "",
        "step without them over a step of all    measured    plan   bound   throughput    held",
    ]
    lines += [
        f"{mode:<40}{each['time']:>8.2f}{each['plan']:>8.2f}{each['bound']:>8.2f}{1 / each['time']:>12.0%}"
        f"{each['held']:>8.2f}"
        for mode, each in result["modes"].items()
    ]
    lines += [f"{'pipelines of lost ranks dropped':<40}{'':>24}{result['dropped']:>12.0%}"]
    if result["exact_over_inexact"] is not None:
        lines += [f"exact over inexact: {result['exact_over_inexact']:.3f} of the time (at most {EXACT_MAX})"]
    lines += [f"within {PLAN_MAX} of the plan: {result['verdict']}", result["machine"]]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
