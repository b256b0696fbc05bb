"""Starts the ranks, and gathers what they measure."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from swift.bench.formats.report import Measures, merge
from swift.bench.formats.turns import LIMITS, Pace, Plan, Turn
from swift.bench.workers import Worker, signals_held
from swift.errors import ServiceError

Told = Callable[[dict[str, Any]], None]


def measure(plans: Sequence[Plan], place: Path, save_s_max: float, told: Told) -> Measures:
    """Of all plans, one after the other. `save_s_max`: `Pace`. `told` gets each case once it is whole. ServiceError:
    nothing can be saved."""
    measures = Measures()
    for number, plan in enumerate(plans):
        folder = (place / str(number)).absolute()
        folder.mkdir()
        with ExitStack() as stack:
            with signals_held():
                workers = [
                    stack.enter_context(_worker(rank, plan.ranks, folder)) for rank in range(plan.ranks)
                ]
            for worker in workers:
                worker.begin()
            for each in _each(plan, workers, measures, Pace(save_s_max)):
                told(each)
    return measures


def _worker(rank: int, ranks: int, folder: Path) -> Worker:
    words = [str(rank), str(ranks), str(folder)]
    return Worker([sys.executable, "-P", "-m", "swift.bench.formats.ranks", *words])


def _each(plan: Plan, workers: Sequence[Worker], measures: Measures, pace: Pace) -> Iterator[dict[str, Any]]:
    """Cases, each when its last turn is over."""
    for _, turns in groupby(plan.turns(), key=lambda turn: (turn.parameter_bytes, turn.layout)):
        for turn in turns:
            if (save_s := pace.too_long(turn)) is not None:
                measures.leave_out(plan.ranks, turn, save_s)
                continue
            merged = merge(_answers(turn, workers))
            measures.add(plan.ranks, turn, merged)
            if turn.format != LIMITS:
                pace.note(turn, merged["total_s"])
        yield measures.cases()[-1]


def _answers(turn: Turn, workers: Sequence[Worker]) -> list[Mapping[str, Any]]:
    for worker in workers:
        worker.tell(json.dumps(asdict(turn)))
    said: list[Mapping[str, Any]] = [json.loads(worker.line()) for worker in workers]
    for each in said:
        if "error" in each:
            what = "nothing can be saved" if turn.format == LIMITS else f"{turn.format} cannot save or load"
            raise ServiceError(f"bench checkpoint: {what}: {each['error']}")
    return said
