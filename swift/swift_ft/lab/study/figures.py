"""Computes a study's figures from its cells: one row for each task, rate and strategy. Pure.

Each figure is a mean over seeds. Comparisons are made per seed, since both runs begin with the same weights and have
the same batches. The baseline is the run without recovery and failures (`PLAIN`); for the cost of a failure, it is the
run of the same strategy without failures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from swift_ft.lab.study.settings import PLAIN, STRATEGIES, TASKS, Cell, Settings
from swift_ft.text import table

# Means over seeds, with the 95 % interval of Student's t. Pure.


Estimate = Mapping[str, Any] | None
"""``mean``; ``half``: half width of the 95 % interval, None if there is only one value; ``n``: number of values."""


def estimate(values: Iterable[float]) -> Estimate:
    known = list(values)
    if not known:
        return None
    from scipy.stats import sem, t

    half = float(t.ppf(0.975, len(known) - 1) * sem(known)) if len(known) > 1 else None
    return {"mean": fmean(known), "half": half, "n": len(known)}


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
    checks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Builds the study as JSON. `checks`: cells that were recomputed in one process (`running.calculate`)."""
    whole = {cell: result for cell, result in results.items() if "failed" not in result}
    failed = {cell.name: result["failed"] for cell, result in results.items() if "failed" in result}
    return {
        "study": FORMAT,
        "question": QUESTION,
        "machine": machine,
        "settings": asdict(settings),
        "tasks": {task: _task(task, settings, whole) for task in settings.tasks},
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
    rows = [_row(task, PLAIN, 0.0, settings, results)]
    for rate in (0.0, *settings.rates):
        rows += [_row(task, strategy, rate, settings, results) for strategy in settings.strategies]
    return {**asdict(TASKS[task]), "rows": rows}


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
        "measured": estimate(result["measured"] for result in own.values()),
        "worse": estimate(sign * (a["measured"] - b["measured"]) for a, b in both),
        "overhead": estimate(a["train_s"] / b["train_s"] - 1 for a, b in both),
        "step_overhead": estimate(a["step_s"] / b["step_s"] - 1 for a, b in both),
        "memory_mib": estimate(a["peak_mib"] - b["peak_mib"] for a, b in both),
        "lost_s": estimate((_beyond(a, steps) - _beyond(b, steps)) / a["injected"] for a, b in hit),
        "again_s": estimate(fmean(result["again_s"]) for result in own.values() if result["again_s"]),
        "steps_lost": estimate(a["steps_lost"] / a["injected"] for a, _ in hit),
        "batches_dropped": estimate(a["batches_dropped"] / a["injected"] for a, _ in hit),
    }


# --- in words ---


def number(found: Estimate, digits: int = 3, factor: float = 1.0) -> str:
    if found is None:
        return "-"
    half = "" if found["half"] is None else f" ± {found['half'] * factor:.{digits}f}"
    return f"{found['mean'] * factor:.{digits}f}{half}"


def percent(found: Estimate) -> str:
    return "-" if found is None else f"{number(found, 0, 100.0)} %"


PER_FAILURE = "seconds lost, seconds till it runs again, steps done again and batches dropped are per failure"


def cells_of(row: Mapping[str, Any]) -> dict[str, str]:
    calm, plain, memory = row["rate"] == 0.0, row["strategy"] == PLAIN, row["memory_mib"]
    return {
        "strategy": "no recovery" if plain else row["strategy"],
        "same bits": f"{row['same_bits']} of {row['runs']}",
        "failures": "" if calm else f"{row['failures']} of {row['planned']}",
        "at the end": number(row["measured"]),
        "worse by": "" if plain else number(row["worse"]),
        "longer by": "" if plain else percent(row["overhead"]),
        "a step by": percent(row["step_overhead"]) if calm and not plain else "",
        "s lost": "" if calm else number(row["lost_s"], 2),
        "s till again": "" if calm else number(row["again_s"], 2),
        "steps again": "" if calm else number(row["steps_lost"], 1),
        "dropped": "" if calm else number(row["batches_dropped"], 1),
        "memory": "" if plain else "-" if memory is None else f"{memory['mean']:+.0f} MiB",
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Formats rows as a table, without the columns that are empty in all of them."""
    cells = [cells_of(row) for row in rows]
    named = [name for name in cells[0] if any(each[name] for each in cells)]
    return table([named, *([each[name] for name in named] for each in cells)], left=len(named))


def rate_words(rate: float) -> str:
    return f"{rate:g} failure{'' if rate == 1 else 's'} per 100 steps"


def lines(found: Mapping[str, Any]) -> list[str]:
    out = [found["machine"], found["question"]]
    for task in found["tasks"].values():
        head = f"{task['title']}: {task['measure']} in {task['unit']}, means and 95 % intervals over seeds"
        out += ["", head]
        for rate in dict.fromkeys(row["rate"] for row in task["rows"]):
            title = f"{rate_words(rate)} on average" if rate else "without failures"
            out += ["", title, *table_of([row for row in task["rows"] if row["rate"] == rate])]
    out += ["", PER_FAILURE, ""]
    out += [f"checked by one process of plain torch: {check_words(check)}" for check in found["checks"]]
    out += [f"failed: {name}: {why}" for name, why in found["failed"].items()]
    return out + [f"other bits than without failures: {name}" for name in found["differ"]]


def check_words(check: Mapping[str, Any]) -> str:
    had = f"{check['cell']} ({check['failures']} failures, {check['batches_dropped']} batches dropped)"
    if "failed" in check:
        return f"{had}: not calculated: {check['failed']}"
    bits = "the same bits" if check["same_bits"] else "OTHER BITS"
    return f"{had}: {bits}; {check['calculated']:.5g} against {check['measured']:.5g}"
