"""Builds the whole calculation as one document, and as tables."""

import math
import textwrap
from dataclasses import asdict
from typing import Any

from swift_ft.lab.goodput import ways
from swift_ft.lab.goodput.ways import Cluster, Request, Way
from swift_ft.lab.plan.interval import expected_s
from swift_ft.text import table, time_words

# The share of time that is training, in closed form.
#
# Assumptions: times between faults are exponential, regardless of the job's state; a fault during a recovery restarts
# it; the state for a recovery is never lost as well.
#
# A strategy that replaces lost nodes: Daly's expected time of an interval (`swift_ft.lab.plan.interval.expected_s`;
# Daly, Future Generation Computer Systems 22, 2006), from one of its resting points to the next.
#
# A strategy that continues without them: faults and returns are two Poisson processes (the departures of an
# M/G/infinity queue are one: Mirasol, Operations Research 11, 1963), and each event stops the job for its time s. An
# event during a stop begins another one. So work x into a step costs exp(Lambda x) / l, with Lambda the rate of both
# and l the mean of exp(-Lambda s); a step of w
#
#     E = (exp(Lambda w) - 1) / (Lambda l)
#
# The number of missing nodes is Poisson distributed with mean repair / MTBF, for any distribution of repairs (Palm's
# theorem). Missing nodes and stops are assumed to be independent; the error is of the order of one fault's share.

ENOUGH = 0.999
"""Share of the time in which so many spare nodes suffice."""
COLUMNS_MAX = 118


def useful_share(way: Way, cluster: Cluster, mtbf_s: float, repair_s: float) -> float:
    """Returns useful time over all time, 0 to 1. `mtbf_s`: of the job."""
    missing = repair_s / mtbf_s
    if way.speeds:
        return way.share_of_runs * running(way, mtbf_s) * mean_speed(way, cluster, missing)
    expected = expected_s(way.work_s, way.stall_s, way.stop_s, way.ratio, mtbf_s)
    running_share = (way.work_s + way.stall_s) / expected
    ready = 1.0 if way.spares is None else _at_most(way.spares, missing)
    return way.share_of_runs * running_share * ready


def _at_most(count: int, mean: float) -> float:
    from scipy.special import pdtr  # takes longer to import than all the rest of the command

    return float(pdtr(count, mean))


def running(way: Way, mtbf_s: float) -> float:
    """Returns the share of time in which a job that continues without lost nodes does new work."""
    rate = 2 / mtbf_s  # of faults and of returns
    mean = (math.exp(-rate * way.stop_s) + math.exp(-rate * way.back_s)) / 2
    x = rate * way.work_s * way.ratio
    return mean * (x / math.expm1(x) if 0 < x < 700 else float(x == 0))


def mean_speed(way: Way, cluster: Cluster, missing: float) -> float:
    """Returns the mean speed over the number of missing nodes, whose mean is `missing`."""
    parts = cluster.parts if way.by_part else 1
    total, below = 0.0, 0.0
    for lost, speed in enumerate(way.speeds):
        until = _at_most(lost, missing / parts) ** parts
        total += speed * (until - below)
        below = until
    return total


def spares_needed(missing: float) -> int:
    """Returns the number of spare nodes that suffices for the share `ENOUGH` of the time."""
    from scipy.stats import poisson

    return int(poisson.ppf(ENOUGH, missing))


def build(request: Request) -> dict[str, Any]:
    cluster, mtbf_s = request.cluster, request.job_mtbf_s
    missing = request.repair_s / mtbf_s
    return {
        "ranks": cluster.ranks,
        "ranks_per_node": cluster.ranks_per_node,
        "nodes": cluster.nodes,
        "replicas": cluster.replicas,
        "stages": cluster.stages,
        "microbatches": cluster.microbatches,
        "faults": {
            "source": request.source,
            "node_mtbf_s": request.mtbf_s,
            "job_mtbf_s": mtbf_s,
            "repair_s": request.repair_s,
            "missing_nodes": missing,
        },
        "spares": {"given": cluster.spares, "needed": spares_needed(missing)},
        "interval": {"best_s": ways.Maker(request).best_s, "given_s": request.every_s},
        "figures": {name: asdict(figure) for name, figure in request.figures.items()},
        "strategies": [_row(way, request, missing) for way in ways.Maker(request).ways()],
    }


def _row(way: Way, request: Request, missing: float) -> dict[str, Any]:
    cluster = request.cluster
    share = useful_share(way, cluster, request.job_mtbf_s, request.repair_s)
    spares = 0 if way.speeds else (spares_needed(missing) if way.spares is None else way.spares)
    return {
        "name": way.name,
        "words": way.words,
        "stop_s": way.stop_s,
        "stop_parts": dict(way.stop_parts),
        "again_s": way.again_s,
        "interval_s": way.work_s if way.by_checkpoint else way.every_s,
        "resting_s": way.work_s,
        "resting_costs_s": way.stall_s,
        "back_s": way.back_s if way.speeds else None,
        "overhead": way.overhead,
        "speed_with_one_missing": way.speeds[1] if way.speeds else None,
        "slowed": 1 - mean_speed(way, cluster, missing) if way.speeds else None,
        "share": share,
        "spares": spares,
        "of_all_nodes": share * cluster.nodes / (cluster.nodes + spares),
    }


# --- as text ---


def text(document: dict[str, Any]) -> list[str]:
    return [
        *_head(document),
        "",
        *_table(document),
        "",
        *_wrapped(
            "training: its share of the time; with spares: of all nodes' time, the spare ones among them; stop: what "
            "all ranks wait for after a fault; again: what is then done again, on average; slower: what is lost "
            "because nodes are missing; steps: what is added to each step"
        ),
        "",
        *_assumptions(document),
        "",
        *_figures(document),
    ]


def _head(document: dict[str, Any]) -> list[str]:
    faults, spares = document["faults"], document["spares"]
    return [
        f"{document['ranks']:,} ranks on {document['nodes']:,} nodes, {document['replicas']:,} replicas; a fault every "
        f"{time_words(faults['job_mtbf_s'])} ({1000 * 86400 / faults['node_mtbf_s']:.3g} in 1,000 node-days)",
        *_wrapped(f"faults: {faults['source']}"),
        f"{faults['missing_nodes']:.3g} nodes are in repair on average, for {time_words(faults['repair_s'])} each; "
        f"{spares['needed']:,} spare ones are enough in {ENOUGH:.1%} of the time",
        f"checkpoints: best every {time_words(document['interval']['best_s'])}",
    ]


def _table(document: dict[str, Any]) -> list[str]:
    rows = [["", "training", "with spares", "stop", "again", "slower", "steps", "checkpoints every"]]
    for row in document["strategies"]:
        rows.append(
            [
                row["name"],
                f"{row['share']:.2%}",
                f"{row['of_all_nodes']:.2%}",
                time_words(row["stop_s"]),
                time_words(row["again_s"]),
                "-" if row["slowed"] is None else f"{row['slowed']:.2%}",
                f"{row['overhead']:.2%}",
                time_words(row["interval_s"]),
            ]
        )
    return table(rows)


def _assumptions(document: dict[str, Any]) -> list[str]:
    lines = ["what each strategy does, and what is in its stop"]
    for row in document["strategies"]:
        parts = " + ".join(f"{name} {time_words(value)}" for name, value in row["stop_parts"].items())
        words = f"  {row['name']}: {row['words']}. Stop: {parts}"
        if row["back_s"] is not None:
            words += (
                f". Speed with one node missing: {row['speed_with_one_missing']:.1%}; a node that is back: "
                f"{time_words(row['back_s'])}"
            )
        if row["resting_costs_s"] and row["resting_s"] != row["interval_s"]:
            words += f". Every {time_words(row['resting_s'])}, for {time_words(row['resting_costs_s'])} each"
        lines += _wrapped(words)
    return lines


def _figures(document: dict[str, Any]) -> list[str]:
    lines = ["figures, and where they come from (--set NAME=VALUE for your own)"]
    for name, figure in document["figures"].items():
        lines += _wrapped(f"  {name} {figure['value']:.4g}: {figure['words']}. {figure['source']}")
    return lines


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.lstrip(),
        COLUMNS_MAX,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
    )
