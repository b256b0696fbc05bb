"""Computes a study's figures from its cells: one row for each task, rate and strategy. Pure.

Each figure is a mean over seeds. Comparisons are made per seed, since both runs begin with the same weights and have
the same batches. The baseline is the run without recovery and failures (`PLAIN`); for the cost of a failure, it is the
run of the same strategy without failures.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from swift_ft.lab.study.settings import PLAIN, STRATEGIES, TASKS, Cell, Settings
from swift_ft.text import table

# Means over seeds, with the 95 % interval of Student's t. Pure.


class Estimate(NamedTuple):
    """Estimate of a mean."""

    mean: float
    half: float | None
    """Half width of the 95 % interval. None: there is only one value."""
    n: int

    @property
    def tells_from_zero(self) -> bool:
        """True if zero is outside of the interval."""
        return self.half is not None and abs(self.mean) > self.half


def estimate(values: Iterable[float]) -> Estimate | None:
    """Returns the mean with its interval; None without values."""
    known = list(values)
    if not known:
        return None
    mean = statistics.fmean(known)
    if len(known) == 1:
        return Estimate(mean, None, 1)
    from scipy.stats import t

    quantile = float(t.ppf(0.975, len(known) - 1))
    return Estimate(mean, quantile * statistics.stdev(known) / math.sqrt(len(known)), len(known))


FORMAT = 1
QUESTION = (
    "What do failures cost in time and in what is learned, by strategy? The same question as in the CCGrid 2022 study "
    "of failures, with tasks of our own: that paper's models and figures are not claimed here."
)
Results = Mapping[Cell, Mapping[str, Any]]


def build(
    settings: Settings,
    results: Results,
    machine: str,
    skipped: Mapping[str, str],
    checks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Builds the study as JSON. `checks`: cells that were recomputed in one process (`running.calculate`)."""
    whole = {cell: result for cell, result in results.items() if "failed" not in result}
    failed = {cell.name: result["failed"] for cell, result in results.items() if "failed" in result}
    return {
        "study": FORMAT,
        "question": QUESTION,
        "machine": machine,
        "settings": settings.as_json(),
        "skipped": dict(skipped),
        "tasks": {task: _task(task, settings, whole) for task in settings.tasks if task not in skipped},
        "checks": [dict(check) for check in checks],
        "failed": failed,
        "differ": _differ(whole)
        + [f"{each['cell']}, by one process" for each in checks if not each["same_bits"]],
        "cells": {cell.name: dict(result) for cell, result in results.items()},
    }


def _differ(results: Results) -> list[str]:
    """Returns cells of exact strategies whose bits differ from the run without recovery and failures."""
    found = []
    for cell, result in results.items():
        plain = results.get(Cell(task=cell.task, strategy=PLAIN, rate=0.0, seed=cell.seed))
        exact = cell.strategy == PLAIN or cell.rate == 0.0 or STRATEGIES[cell.strategy].exact
        wanted = result["digests"][:1] if plain is None else plain["digests"][:1]
        if exact and result["digests"] != wanted:
            found.append(cell.name)
    return found


def _task(task: str, settings: Settings, results: Results) -> dict[str, Any]:
    about = TASKS[task]
    rows = [_row(task, PLAIN, 0.0, settings, results)]
    for rate in (0.0, *settings.rates):
        rows += [_row(task, strategy, rate, settings, results) for strategy in settings.strategies]
    for rate in settings.rates:
        _mark_front([row for row in rows if row["rate"] == rate])
    return {
        "title": about.title,
        "measure": about.measure,
        "unit": about.unit,
        "apart": about.apart or about.unit,
        "higher_is_better": about.higher_is_better,
        "rows": rows,
    }


def _beyond(result: Mapping[str, Any], steps: int) -> float:
    """Returns the seconds that a run took beyond `steps` times its own median step."""
    return float(result["train_s"]) - steps * float(result["step_s"])


def _row(task: str, strategy: str, rate: float, settings: Settings, results: Results) -> dict[str, Any]:
    steps = settings.steps

    def of(strategy: str, rate: float) -> dict[int, Mapping[str, Any]]:
        cells = {
            seed: Cell(task=task, strategy=strategy, rate=rate, seed=seed) for seed in range(settings.seeds)
        }
        return {seed: results[cell] for seed, cell in cells.items() if cell in results}

    own, plain, calm = of(strategy, rate), of(PLAIN, 0.0), of(strategy, 0.0)
    sign = -1.0 if TASKS[task].higher_is_better else 1.0
    both = [(own[seed], plain[seed]) for seed in own if seed in plain]
    hit = [(own[seed], calm[seed]) for seed in own if seed in calm and own[seed]["injected"]]
    return {
        "strategy": strategy,
        "rate": rate,
        "exact": strategy == PLAIN or STRATEGIES[strategy].exact,
        "runs": len(own),
        "same_bits": sum(a["digests"] == b["digests"][:1] for a, b in both),
        "failures": sum(result["injected"] for result in own.values()),
        "planned": sum(result["planned"] for result in own.values()),
        "hit": sum(result["injected"] > 0 for result in own.values()),
        "hit_same_bits": sum(a["digests"] == b["digests"][:1] for a, b in both if a["injected"]),
        "measured": _json(result["measured"] for result in own.values()),
        "worse": _json(sign * (a["measured"] - b["measured"]) for a, b in both),
        "overhead": _json(a["train_s"] / b["train_s"] - 1 for a, b in both),
        "step_overhead": _json(a["step_s"] / b["step_s"] - 1 for a, b in both),
        "memory_mib": _json(a["peak_mib"] - b["peak_mib"] for a, b in both),
        "lost_s": _json((_beyond(a, steps) - _beyond(b, steps)) / a["injected"] for a, b in hit),
        "again_s": _json(fmean(result["again_s"]) for result in own.values() if result["again_s"]),
        "steps_lost": _json(a["steps_lost"] / a["injected"] for a, _ in hit),
        "batches_dropped": _json(a["batches_dropped"] / a["injected"] for a, _ in hit),
        "losses": _mean_curve([result["losses"] for result in own.values()]),
        "front": False,
    }


def _json(values: Iterable[float]) -> dict[str, Any] | None:
    found = estimate(values)
    return None if found is None else found._asdict()


def read(row: Mapping[str, Any], name: str) -> Estimate | None:
    """Returns a figure of a row."""
    found = row[name]
    return None if found is None else Estimate(**found)


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Returns the mean per step of curves over the same steps."""
    losses: dict[float, list[float]] = {}
    for curve in curves:
        for step, loss in curve:
            losses.setdefault(step, []).append(loss)
    return [[step, fmean(each)] for step, each in sorted(losses.items())]


def _mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Marks the rows of the Pareto front in accuracy and time."""
    known = [row for row in rows if row["worse"] is not None]

    def at(row: Mapping[str, Any]) -> tuple[float, float]:
        worse = read(row, "worse")
        assert worse is not None
        # A difference that is not significant counts as zero.
        chance = worse.half is not None and not worse.tells_from_zero
        return 0.0 if chance else worse.mean, row["overhead"]["mean"]

    for row in known:
        x, y = at(row)
        row["front"] = not any(a <= x and b <= y and (a, b) != (x, y) for a, b in map(at, known))


# --- in words ---


def conclusions(found: Mapping[str, Any]) -> list[str]:
    """Formats the conclusions, one sentence each."""
    words = []
    for task in found["tasks"].values():
        rows = [row for row in task["rows"] if row["rate"] > 0 and row["runs"]]
        exact = [row for row in rows if row["exact"]]
        if exact:
            same, runs = sum(row["hit_same_bits"] for row in exact), sum(row["hit"] for row in exact)
            words.append(
                f"{task['title']}: exact strategies ended with the bits of the run without failures in {same} of "
                f"{runs} runs with failures ({sum(row['failures'] for row in exact)} failures)."
            )
        for rate in sorted({row["rate"] for row in rows}):
            words += _of_rate(task, rate, [row for row in rows if row["rate"] == rate])
    return words


def _of_rate(task: Mapping[str, Any], rate: float, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    words = []
    exact = sorted(
        (row for row in rows if row["exact"] and row["overhead"]), key=lambda row: row["overhead"]["mean"]
    )
    front = f"{task['title']}, {rate_words(rate)}:"
    if exact:
        told = ", ".join(f"{row['strategy']} {percent(read(row, 'overhead'))}" for row in exact)
        words.append(
            f"{front} training takes longer than without recovery and failures by: {told} (exact ones)."
        )
    for row in rows:
        worse = read(row, "worse")
        if row["exact"] or worse is None:
            continue
        if worse.half is None:
            kind = "one seed does not say whether that is chance"
        elif not worse.tells_from_zero:
            kind = "no difference that these seeds can tell from chance"
        else:
            kind = "worse" if worse.mean > 0 else "better"
        words.append(
            f"{front} {row['strategy']} takes {percent(read(row, 'overhead'))} longer; its {task['measure']} is worse "
            f"by {number(worse)} {task['apart']}: {kind}."
        )
    return words


def number(found: Estimate | None, digits: int = 3) -> str:
    """Formats a mean, with its interval if it has one."""
    if found is None:
        return "-"
    mean = f"{found.mean:.{digits}f}"
    return mean if found.half is None else f"{mean} ± {found.half:.{digits}f}"


def percent(found: Estimate | None) -> str:
    if found is None:
        return "-"
    mean = f"{found.mean * 100:.0f}"
    return f"{mean} %" if found.half is None else f"{mean} ± {found.half * 100:.0f} %"


COLUMNS = {
    "strategy": "strategy",
    "bits": "same bits",
    "failures": "failures",
    "measured": "at the end",
    "worse": "worse by",
    "overhead": "longer by",
    "step_overhead": "a step by",
    "lost_s": "s lost",
    "again_s": "s till again",
    "steps_lost": "steps again",
    "batches_dropped": "dropped",
    "memory_mib": "memory",
}
"""Figure and title of the columns of a table."""
PER_FAILURE = "seconds lost, seconds till it runs again, steps done again and batches dropped are per failure"


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Formats the cells of a row, by column."""
    calm = row["rate"] == 0.0
    plain = row["strategy"] == PLAIN
    memory = read(row, "memory_mib")
    told = {
        "strategy": "no recovery" if plain else row["strategy"],
        "bits": f"{row['same_bits']} of {row['runs']}",
        "failures": "" if calm else f"{row['failures']} of {row['planned']}",
        "measured": number(read(row, "measured")),
    }
    if not plain:
        told |= {"worse": number(read(row, "worse")), "overhead": percent(read(row, "overhead"))}
        told["memory_mib"] = "-" if memory is None else f"{memory.mean:+.0f} MiB"
    if calm and not plain:
        told["step_overhead"] = percent(read(row, "step_overhead"))
    if not calm:
        told |= {name: number(read(row, name), 2) for name in ("lost_s", "again_s")}
        told |= {name: number(read(row, name), 1) for name in ("steps_lost", "batches_dropped")}
    return {name: told.get(name, "") for name in COLUMNS}


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats rows as a table, without the columns that are empty in all of them."""
    cells = [cells_of(row) for row in rows]
    named = [name for name in COLUMNS if any(each[name] for each in cells)]
    lines = [[COLUMNS[name] for name in named], *([each[name] for name in named] for each in cells)]
    return table(lines, left=len(named))


def heading(rate: float) -> str:
    if rate == 0.0:
        return "without failures"
    return f"{rate_words(rate)} on average"


def rate_words(rate: float) -> str:
    return f"{rate:g} failure{'' if rate == 1 else 's'} per 100 steps"


def groups(task: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Returns the rows of a task by rate, each group with its heading."""
    rates = list(dict.fromkeys(row["rate"] for row in task["rows"]))
    by = [(rate, [row for row in task["rows"] if row["rate"] == rate]) for rate in rates]
    return [(heading(rate), rows) for rate, rows in by]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Formats the study for a terminal."""
    out = [found["machine"], found["question"]]
    for task in found["tasks"].values():
        out += [
            "",
            f"{task['title']}: {task['measure']} in {task['unit']}, means and 95 % intervals over seeds",
        ]
        for title, rows in groups(task):
            out += ["", title, *table_of(rows)]
    out += ["", PER_FAILURE, "", *conclusions(found)]
    out += [f"checked by one process of plain torch: {check_words(check)}" for check in found["checks"]]
    out += [f"failed: {name}: {why}" for name, why in found["failed"].items()]
    return out + [f"other bits than without failures: {name}" for name in found["differ"]]


def check_words(check: Mapping[str, Any]) -> str:
    """Formats the result of a recomputation."""
    had = f"{check['cell']} ({check['failures']} failures, {check['batches_dropped']} batches dropped)"
    if "failed" in check:
        return f"{had}: not calculated: {check['failed']}"
    bits = "the same bits" if check["same_bits"] else "OTHER BITS"
    return f"{had}: {bits}; {check['calculated']:.5g} against {check['measured']:.5g}"
