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
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.drill.cluster import Cluster
from swift_ft.lab.plan.rerouted import Request, Way
from swift_ft.planner.schedule import Costs, plan_step, shortest_period
from swift_ft.text import show, table

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
_NUMBERS = 1 << 16
"""Elements of a stage's weight. So few that a peer's memory for other replicas is almost only their gradients."""
_NUMBER_BYTES = 4
_BEFORE, _AFTER, _SKIPPED = 9, 9, 3
"""Steps with all ranks, steps with some missing, and the steps at the start of both that are not counted."""


class Shape(NamedTuple):
    """The pipelines of a run, and the ranks that it loses."""

    stages: int
    replicas: int
    microbatches: int
    lost: Sequence[tuple[int, int]]
    """(stage, replica) of each."""
    unit_s: float
    """Time of a unit of work."""


class Measured(NamedTuple):
    full_s: float
    """Median seconds of a step of all ranks."""
    less_s: float
    """Median seconds of a step with ranks missing."""
    held: float
    """The most gradients of other replicas that a rank held, in copies of its stage's gradients."""


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--stages", type=int, default=4, metavar="P", help="default %(default)s")
    add("--replicas", type=int, default=4, metavar="D", help="default %(default)s")
    add("--microbatches", type=int, default=8, metavar="M", help="default %(default)s")
    add("--lost", default="1:0", metavar="STAGE:REPLICA,...", help="that are killed (default %(default)s)")
    add("--unit", type=float, default=0.05, metavar="S", help="of a unit of work (default %(default)s)")
    add("--modes", default=",".join(MODES), metavar="A,B", help="default %(default)s")


def run(given: Any) -> dict[str, Any]:
    lost = _lost(given.lost, given.stages, given.replicas)
    modes = output.some(given.modes, MODES, "bench adaptive: --modes")
    if given.microbatches < given.stages or given.unit <= 0:
        raise UsageError("bench adaptive: give at least as many microbatches as stages, and a --unit above 0")
    result = measure(Shape(given.stages, given.replicas, given.microbatches, lost, given.unit), modes)
    show(text(result))
    return result


def measure(shape: Shape, modes: Sequence[str]) -> dict[str, Any]:
    """Runs each mode. ``modes``: by name the `Measured` run, and a step over a full one: measured, planned, bound."""
    found: dict[str, dict[str, float]] = {}
    for mode in modes:
        measured = _run(shape, MODES[mode])
        planned, bound = _planned(shape, mode)
        found[mode] = {
            **measured._asdict(),
            "time": measured.less_s / measured.full_s,
            "plan": planned,
            "bound": bound,
        }
    pipelines = {replica for _, replica in shape.lost}
    exact = None
    if {"memory", "inexact"} <= found.keys():
        exact = found["memory"]["less_s"] / found["inexact"]["less_s"]
    met = all(each["time"] <= PLAN_MAX * each["plan"] for each in found.values())
    met = met and (exact is None or exact <= EXACT_MAX)
    return {
        "machine": output.machine(),
        "paced": True,
        **shape._asdict(),
        "modes": found,
        "dropped": 1 - len(pipelines) / shape.replicas,
        "exact_over_inexact": exact,
        "verdict": "PASS" if met else "FAIL",
    }


def _run(shape: Shape, settings: dict[str, Any]) -> Measured:
    stages, replicas, microbatches, lost, unit_s = shape
    killed = [stage * replicas + replica for stage, replica in lost]
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as place:
        out = Path(place, "out")
        out.mkdir()
        told = {"numbers": _NUMBERS, "steps": _BEFORE + _AFTER, "settings": settings, "out": str(out)}
        faults = [{"id": f"f{rank}", "rank": rank, "step": _BEFORE, "phase": "idle"} for rank in killed]
        with Cluster(
            Path(place, "job"),
            ranks=stages * replicas,
            spares=0,
            max_restarts=0,
            trainer=[str(Path(__file__).with_name("adaptive_ranks.py"))],
            trainer_arguments=[json.dumps(shape._asdict() | told)],
            faults=json.dumps(faults),
        ) as cluster:
            limit_s = 120 + 30 * unit_s * (_BEFORE + _AFTER) * microbatches
            if code := output.await_end(cluster.poll, limit_s):
                said = cluster.output_tail()
                raise ServiceError(f"bench adaptive: the job ended with code {code}: {said}")
            held = [e["gradient_bytes"] for e in cluster.tail.read() if e["event"] == "adopted_step"]
        left = min(set(range(stages * replicas)) - set(killed))
        over = {int(step): t for step, t in json.loads((out / f"{left}.json").read_text()).items()}
    took = [over[step] - over[step - 1] for step in sorted(over) if step - 1 in over]
    full, less = took[: _BEFORE - 1], took[_BEFORE - 1 :]
    copies = max(held) / (_NUMBERS * _NUMBER_BYTES)
    return Measured(statistics.median(full[_SKIPPED:]), statistics.median(less[_SKIPPED:]), copies)


def _planned(shape: Shape, mode: str) -> tuple[float, float]:
    """Returns the length of the planned step and of the bound, over that of 1F1B with all ranks."""
    stages, replicas, microbatches, lost, _ = shape
    settings = MODES[mode]
    rest = (1.0,) * (stages - 1)
    request = Request(
        stages=stages,
        replicas=replicas,
        microbatches=microbatches,
        costs=Costs(backward_input=(0.0, *rest), backward_weight=(2.0, *rest)),
        losses=len(lost),
    )
    way = Way(
        name=mode,
        words="",
        split=settings.get("split_backward", True),
        memory=settings.get("adaptive_memory", 1.0),
    )
    work = request.work(way, lost)
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
    lost = list(dict.fromkeys(lost))
    if any([stage for stage, _ in lost].count(stage) >= replicas for stage in range(stages)):
        raise UsageError(f"bench adaptive: --lost {words}: leave one replica of each stage")
    return lost


def text(result: dict[str, Any]) -> list[str]:
    lost = ", ".join(f"stage {stage} of replica {replica}" for stage, replica in result["lost"])
    rows = [["step without them over a step of all", "measured", "plan", "bound", "throughput", "held"]]
    for mode, each in result["modes"].items():
        times = [f"{each[name]:.2f}" for name in ("time", "plan", "bound")]
        rows.append([mode, *times, f"{1 / each['time']:.0%}", f"{each['held']:.2f}"])
    rows.append(["pipelines of lost ranks dropped", "", "", "", f"{result['dropped']:.0%}", ""])
    exact = result["exact_over_inexact"]
    return [
        f"{result['replicas']} replicas, {result['stages']} stages, {result['microbatches']} microbatches; "
        f"lost: {lost}; paced: a unit of work is a wait of {result['unit_s']:g} s",
        "",
        *table(rows),
        *(
            [f"exact over inexact: {exact:.3f} of the time (at most {EXACT_MAX})"]
            if exact is not None
            else []
        ),
        f"within {PLAN_MAX} of the plan: {result['verdict']}",
        result["machine"],
    ]
