"""`swift-ft bench replay`: time of a replayed step, alone and with helpers, relative to the original step.

    for groups of w stages, in d = 1, 2 … copies while there are ranks for them: a pipeline of P ranks trains, rank 1 is
    killed, and all steps of its recovery group are replayed from the first

Each stage takes a fixed time t per microbatch: it sleeps and computes almost nothing, since two cores would hide the
gain of sharing. Everything else is real: processes, log servers, reads and comparisons, gradients along the line.

    step     (M + P - 1) t             the pipeline fills once
    replay   (ceil(M / d) + w - 1) t   d copies share the microbatches; each is a pipeline of w stages by itself

A ratio is the median replayed step over the median step of the same run. The first replayed step is left out because it
infers shapes and builds modules. The bound is the ratio of the two lines above: no transfer, no bookkeeping.
"then" is the time from the end of the replay to the beginning of the next live step.
"""

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swift_ft import events
from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.drill.cluster import Cluster
from swift_ft.text import show, table

VICTIM = 1
GOAL_ALONE, GOAL_SHARED = 1.15, 1.25
"""Upper bounds of ratio / bound, for one copy and for several."""
_RANKS = Path(__file__).with_name("replay_ranks.py")
_PATIENCE_S = 180.0
_POLL_S = 0.02


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--stages", type=int, default=4, metavar="P", help="pipeline ranks (default %(default)s)")
    add("--microbatches", type=int, default=12, metavar="M", help="default %(default)s")
    add("--steps", type=int, default=8, metavar="N", help="to replay (default %(default)s)")
    add("--milliseconds", type=float, default=24.0, metavar="T", help="a microbatch (default %(default)s)")
    add("--width", type=int, default=512, metavar="W", help="W * W parameters a stage (default %(default)s)")
    add(
        "--group-stages",
        metavar="w,…",
        help="sizes of recovery groups, each in runs of its own (default: 1, and 2 where that divides the stages)",
    )
    add("--copies-max", type=int, metavar="d", help="default: as many as there are ranks for")


def run(arguments: Any) -> dict[str, Any]:
    if arguments.stages < 3 or arguments.microbatches < arguments.stages or arguments.steps < 3:
        raise UsageError("give --stages and --steps of 3 or more, and as many --microbatches as stages")
    if arguments.milliseconds <= 0 or arguments.width < 1:
        raise UsageError("--milliseconds and --width take more than 0")
    sizes = _sizes(arguments.group_stages, arguments.stages)
    most = arguments.stages if arguments.copies_max is None else arguments.copies_max
    if most < 1:
        raise UsageError("--copies-max takes 1 or more")
    shape = {
        "machine": output.machine(),
        "stages": arguments.stages,
        "microbatches": arguments.microbatches,
        "steps": arguments.steps,
        "microbatch_s": arguments.milliseconds / 1000,
        "gradient_bytes": 4 * (arguments.width**2 + arguments.width),
        "width": arguments.width,
    }
    cases = [
        case(shape, measured(shape, size, copies), size)
        for size in sizes
        for copies in range(1, min(most, arguments.stages // size) + 1)
    ]
    result = {**shape, "cases": cases}
    show(text(result))
    return result


def _sizes(text: str | None, stages: int) -> list[int]:
    if text is None:
        return [1] if stages % 2 else [1, 2]
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--group-stages takes numbers such as 1,2, not {text}") from None
    if any(size < 1 or size >= stages or stages % size for size in sizes):
        raise UsageError(f"--group-stages {text}: each divides the {stages} stages into two groups or more")
    return sizes


# --- what comes out ---


def bound(microbatches: int, stages: int, workers: int, size: int = 1) -> float:
    return (-(-microbatches // workers) + size - 1) / (microbatches + stages - 1)


def case(shape: Mapping[str, Any], measured: Mapping[str, Any], size: int = 1) -> dict[str, Any]:
    """Summarizes one run with copies of a group of `size` stages: medians, their ratio, the bound and the goal."""
    step, replayed = statistics.median(measured["steps_s"]), statistics.median(measured["replayed_s"])
    least = bound(shape["microbatches"], shape["stages"], measured["workers"], size)
    goal = GOAL_ALONE if measured["workers"] == 1 else GOAL_SHARED
    over = replayed / step / least
    return {
        "group_stages": size,
        "workers": measured["workers"],
        "step_s": round(step, 6),
        "replayed_step_s": round(replayed, 6),
        "ratio": round(replayed / step, 4),
        "bound": round(least, 4),
        "over_bound": round(over, 4),
        "goal": goal,
        "met": over <= goal,
        "then_s": measured["then_s"] if measured["then_s"] is None else round(measured["then_s"], 6),
        "waited_for_log_share": round(measured["log_wait_s"] / measured["replay_s"], 4),
        "bottleneck": measured["bottleneck"],
        "split": measured["split"],
        "waits": measured["waits"],
        **{name: [round(value, 6) for value in measured[name]] for name in ("steps_s", "replayed_s")},
    }


def text(result: Mapping[str, Any]) -> list[str]:
    """Formats the result, with one line per group size and number of copies."""
    rows = [
        ["w", "d", "step", "replayed", "ratio", "bound", "over", "goal", "for the log", "the line", "then"]
    ]
    rows[0].append("paced by")
    for case in result["cases"]:
        then = "" if case["then_s"] is None else f"{case['then_s'] * 1000:.0f} ms"
        rows.append(
            [
                *(str(case[name]) for name in ("group_stages", "workers")),
                *(f"{case[name] * 1000:.1f} ms" for name in ("step_s", "replayed_step_s")),
                *(f"{case[name]:.3f}" for name in ("ratio", "bound")),
                *(f"{case[name]:.2f}" for name in ("over_bound", "goal")),
                *(f"{share:.0%}" for share in (case["waited_for_log_share"], _line_share(case))),
                then,
                case["bottleneck"] + ("" if case["met"] else "  NOT MET"),
            ]
        )
    return [
        f"{result['stages']} stages, {result['microbatches']} microbatches of {result['microbatch_s'] * 1000:g} ms "
        f"(waited, not computed), {result['gradient_bytes'] / 1e6:.2f} MB of gradients a stage, {result['steps']} "
        f"steps; {result['machine']}",
        "",
        "w: stages of the group; d: copies of it that share the microbatches",
        "",
        *table(rows),
    ]


def _line_share(case: Mapping[str, Any]) -> float:
    return float(case["split"]["line"]) / (sum(case["split"].values()) or 1.0)


# --- one run ---


def measured(shape: Mapping[str, Any], size: int, copies: int) -> dict[str, Any]:
    """Runs one job and returns the seconds of the victim's steps before the kill and in the replay, with the number of
    copies. Raises ServiceError for a run that fails or does not end."""
    steps = int(shape["steps"])
    fault = {"id": "f0", "rank": VICTIM, "step": steps, "microbatch": 0, "phase": "forward"}
    forward_s = shape["microbatch_s"] / 3
    helpers, groups = copies - 1, _groups(size, int(shape["stages"]))
    words = [shape["stages"], shape["microbatches"], steps + 1, shape["width"], forward_s, helpers, groups]
    with tempfile.TemporaryDirectory(prefix="swift-bench-") as place:
        cluster = Cluster(
            Path(place),
            ranks=int(shape["stages"]),
            spares=1,
            trainer=[str(_RANKS)],
            trainer_arguments=[str(word) for word in words],
            faults=json.dumps([fault]),
        )
        with cluster:
            deadline = (
                time.monotonic() + _PATIENCE_S + 10 * steps * shape["microbatches"] * shape["microbatch_s"]
            )
            while (code := cluster.poll()) is None:
                if time.monotonic() > deadline:
                    raise ServiceError(f"the run did not end\n{cluster.output_tail()}")
                time.sleep(_POLL_S)
            if code != 0:
                raise ServiceError(f"the run ended with exit code {code}\n{cluster.output_tail()}")
        return from_trace(events.read(Path(place) / "events"), helpers)


def _groups(size: int, stages: int) -> str:
    """Returns the --groups argument; empty for size 1, where every stage is its own group."""
    return ",".join(f"{first}-{first + size - 1}" for first in range(0, stages, size)) if size > 1 else ""


def from_trace(trace: Sequence[Mapping[str, Any]], helpers: int) -> dict[str, Any]:
    """Extracts the measurements from the events. Raises ServiceError if the replay was not the requested one."""
    mine = [event for event in trace if event.get("rank") == VICTIM]
    ended: dict[bool, list[float]] = {False: [], True: []}
    killed = next(event["t"] for event in mine if event["event"] == "fault")
    for event in mine:
        if event["event"] == "step_end" and (event["replay"] or event["t"] < killed):
            ended[bool(event["replay"])].append(float(event["t"]))
    end = next((event for event in mine if event["event"] == "replay_end"), None)
    if end is None or len(ended[True]) < 3:
        raise ServiceError("the lost rank was not replayed")
    begun = next((event for event in mine if event["event"] == "help_begin"), None)
    given = len(begun["helpers"]) if begun is not None else 0
    if helpers and not given:
        raise ServiceError(
            "nobody helped: by the plan it would take longer; give more --milliseconds or less --width"
        )
    if helpers and end["shared_steps"] != end["steps"]:
        raise ServiceError(f"{end['shared_steps']} of {end['steps']} steps were shared")
    live = [
        float(e["t"]) for e in mine if e["event"] == "step_begin" and not e["replay"] and e["t"] > end["t"]
    ]
    return {
        "workers": 1 + given,
        "then_s": min(live) - end["t"] if live else None,
        # Intervals between step ends: a step that waits for its neighbours begins before they are ready.
        "steps_s": _gaps(ended[False]),
        "replayed_s": _gaps(ended[True]),
        "replay_s": ended[True][-1] - ended[True][0],
        "log_wait_s": end["log_wait_s"],
        # These cover the whole replay: what limited it, and the time of each rank; see `swift_ft.train.boundary_log`.
        **{name: end[name] for name in ("bottleneck", "split", "waits")},
    }


def _gaps(times: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]
