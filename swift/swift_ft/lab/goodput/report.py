"""Builds the whole calculation as one document, and as tables. Needs the simulation, and so numpy."""

import math
import textwrap
from dataclasses import asdict
from typing import Any

from swift_ft.lab.goodput import simulation, ways
from swift_ft.lab.goodput.cluster import Cluster, Faults
from swift_ft.lab.goodput.ways import Request, Way
from swift_ft.lab.plan.interval import daly_s, expected_s, young_s
from swift_ft.text import table, time_words

# The share of time that is training, in closed form.
#
# Assumptions: times between faults are exponential, regardless of the job's state; a fault during a recovery restarts
# it; a replacement node is always available; the state for a recovery is never lost as well. Where these do not hold,
# the simulation is the reference.
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


def useful_share(way: Way, cluster: Cluster, faults: Faults, repair_s: float) -> float:
    """Returns useful time over all time, 0 to 1."""
    mtbf_s = faults.job_mtbf_s(cluster)
    missing = repair_s / mtbf_s
    if way.speeds:
        return way.share_of_runs * running(way, mtbf_s) * mean_speed(way, cluster, missing)
    expected = expected_s(way.work_s, way.stall_s, way.stop_s, way.ratio, mtbf_s)
    running_share = (way.work_s + way.stall_s) / expected
    ready = 1.0 if way.spares is None else _at_most(way.spares, missing)
    return way.share_of_runs * running_share * ready


def _at_most(count: int, mean: float) -> float:
    """Returns the probability of at most so many, by Poisson's distribution."""
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


AGREE_SIGMA = 3.2905
"""Half width of the 99.9 % interval, in standard errors."""
AGREE_LEAST = 1e-3
"""Differences below this are not reported: the formula omits terms of second order (docs/planning.md)."""
WORTH_TELLING = 0.2
"""Share of the difference that a violated assumption must explain to be reported."""
COLUMNS_MAX = 118


def build(request: Request) -> dict[str, Any]:
    """Builds the document."""
    cluster, faults = request.cluster, request.faults
    mtbf_s = faults.job_mtbf_s(cluster)
    missing = request.repair_s / mtbf_s
    save_s = request.figures["save_s"].value
    rows = _rows(request)
    return {
        "ranks": cluster.ranks,
        "ranks_per_node": cluster.ranks_per_node,
        "nodes": cluster.nodes,
        "replicas": cluster.replicas,
        "stages": cluster.stages,
        "microbatches": cluster.microbatches,
        "seed": request.seed,
        "faults": {
            "source": request.source,
            "node_mtbf_s": faults.mtbf_s,
            "job_mtbf_s": mtbf_s,
            "shape": None if faults.trace is not None else faults.shape,
            "cv": faults.cv,
            "together": faults.trace.together if faults.trace is not None else 0.0,
            "repair_s": request.repair_s,
            "missing_nodes": missing,
        },
        "spares": {"given": cluster.spares, "needed": rows[0]["spares_needed"]},
        "interval": {
            "best_s": ways.Maker(request).best_s,
            "young_s": young_s(save_s, 1.0, mtbf_s),
            "daly_s": daly_s(save_s, 1.0, mtbf_s),
            "given_s": request.every_s,
        },
        "figures": {name: asdict(figure) for name, figure in request.figures.items()},
        "strategies": rows,
    }


def _rows(request: Request) -> list[dict[str, Any]]:
    cluster, faults, repair_s = request.cluster, request.faults, request.repair_s
    drawn = simulation.sample(faults, cluster, repair_s, seed=request.seed)
    needed = simulation.spares_needed(drawn)
    rows = []
    for way in ways.Maker(request).ways():
        share = useful_share(way, cluster, faults, repair_s)
        outcome = simulation.simulate(way, cluster, drawn)
        spares = 0 if way.speeds else (needed if way.spares is None else way.spares)
        row = {
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
            "formula": share,
            "simulated": outcome.useful,
            "error": outcome.error,
            "spares": spares,
            "spares_needed": needed,
            "of_all_nodes": outcome.useful * cluster.nodes / (cluster.nodes + spares),
            "stopped": outcome.stopped,
            "waited": outcome.waited,
            "slowed": outcome.slowed,
            "faults": outcome.faults,
            "faults_in_recovery": outcome.in_recovery,
            "fell_back": outcome.fell,
        }
        row["agrees"], row["why"] = _compared(way, faults, row, faults.job_mtbf_s(cluster))
        rows.append(row)
    return rows


def _compared(way: ways.Way, faults: Faults, row: dict[str, Any], mtbf_s: float) -> tuple[bool, str]:
    """Returns whether the formula is within the simulation's 99.9 % interval, and if not, the assumption that is
    violated."""
    difference = abs(row["simulated"] - row["formula"])
    if difference <= max(AGREE_LEAST, row["error"] * AGREE_SIGMA / simulation.SIGMA_95):
        return True, ""
    reasons = []
    if not faults.exponential:
        reasons.append(
            f"times between faults are not exponential (coefficient of variation {faults.cv:.2f}): "
            f"{row['faults_in_recovery'] / max(1, row['faults']):.0%} of the faults came in a recovery"
        )
    fallen = row["fell_back"] / max(1, row["faults"])
    if fallen * (way.fall_stop_s + way.fall_ratio * way.every_s / 2) / mtbf_s > WORTH_TELLING * difference:
        reasons.append(
            f"{row['fell_back']} of {row['faults']} faults took the last node that could bring a state back"
        )
    if row["waited"] > WORTH_TELLING * difference:
        reasons.append(f"the job waited for a repair in {row['waited']:.1%} of the time, and faults went on")
    if way.speeds and not reasons:
        reasons.append("missing nodes and stops come together, which the formula leaves out")
    return False, "; ".join(reasons) or "by chance: give another --seed"


# --- as text ---


def text(document: dict[str, Any]) -> list[str]:
    """Formats the tables and the explanation of their columns."""
    return [
        *_head(document),
        "",
        *_table(document),
        "",
        *_wrapped(
            "formula: in closed form; simulated: by discrete events, with its 95 % interval; with spares: of all "
            "nodes' time, the spare ones among them; stop: what all ranks wait for after a fault; again: what is then "
            "done again, on average; slower: what is lost because nodes are missing; steps: what is added to each step"
        ),
        "",
        *_differences(document),
        *_assumptions(document),
        "",
        *_figures(document),
    ]


def _head(document: dict[str, Any]) -> list[str]:
    faults, interval, spares = document["faults"], document["interval"], document["spares"]
    lines = [
        f"{document['ranks']:,} ranks on {document['nodes']:,} nodes, {document['replicas']:,} replicas; a fault every "
        f"{time_words(faults['job_mtbf_s'])} ({1000 * 86400 / faults['node_mtbf_s']:.3g} in 1,000 node-days)",
        *_wrapped(f"faults: {faults['source']}"),
        f"{faults['missing_nodes']:.3g} nodes are in repair on average, for {time_words(faults['repair_s'])} each; "
        f"{spares['needed']:,} spare ones are enough in 99.9 % of the time",
        f"checkpoints: best every {time_words(interval['best_s'])} (Young 1974: "
        f"{time_words(interval['young_s'])}, Daly 2006: {time_words(interval['daly_s'])}; docs/planning.md)",
    ]
    if faults["shape"] is None:
        lines += _wrapped(
            "the intervals below are of the simulation: what another trace of the same cluster would say, one trace "
            "cannot tell"
        )
    if faults["together"]:
        lines.append(f"{faults['together']:.1%} of the faults come at the moment of the one before")
    return lines


def _table(document: dict[str, Any]) -> list[str]:
    rows = [
        ["", "formula", "simulated", "with spares", "stop", "again", "slower", "steps", "checkpoints every"]
    ]
    for row in document["strategies"]:
        mark = "" if row["agrees"] else " *"
        rows.append(
            [
                row["name"],
                f"{row['formula']:.2%}",
                f"{row['simulated']:.2%} ± {100 * row['error']:.2f}{mark or '  '}",
                f"{row['of_all_nodes']:.2%}",
                time_words(row["stop_s"]),
                time_words(row["again_s"]),
                f"{row['slowed']:.2%}" if row["speed_with_one_missing"] is not None else "-",
                f"{row['overhead']:.2%}",
                time_words(row["interval_s"]),
            ]
        )
    return table(rows)


def _differences(document: dict[str, Any]) -> list[str]:
    differ = [row for row in document["strategies"] if not row["agrees"]]
    if not differ:
        return ["formula and simulation agree for every strategy", ""]
    lines = ["* where formula and simulation differ, and why"]
    for row in differ:
        lines += _wrapped(f"  {row['name']}: {row['simulated'] - row['formula']:+.2%}; {row['why']}")
    return [*lines, ""]


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
    """Wraps a line to the width of a terminal."""
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(
        line.lstrip(),
        COLUMNS_MAX,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
    )
