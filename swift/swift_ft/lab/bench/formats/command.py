"""The options of `swift-ft bench checkpoint --formats`, and its output."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.formats import report
from swift_ft.lab.bench.formats import report as plot
from swift_ft.lab.bench.formats.kinds import FORMATS, lacking
from swift_ft.lab.bench.formats.report import LIMITS, Measures, Pace, Plan, Turn, merge
from swift_ft.lab.bench.output import Worker, signals_held

# Starts the ranks and gathers their measurements.

Told = Callable[[dict[str, Any]], None]


def measure(plans: Sequence[Plan], place: Path, save_s_max: float, told: Told) -> Measures:
    """Runs all plans, one after the other. `save_s_max`: see `Pace`. `told` is called with each complete case.
    Raises ServiceError if a save or a load fails."""
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
    return Worker([sys.executable, "-P", "-m", "swift_ft.lab.bench.formats.ranks", *words])


def _each(plan: Plan, workers: Sequence[Worker], measures: Measures, pace: Pace) -> Iterator[dict[str, Any]]:
    """Yields each case when its last turn is over."""
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


RANKS_MAX = 64
SIZES, RANKS, ROUNDS, SAVE_S_MAX = "1,8,32", "1,2", 3, 5.0
QUICK_SIZES, QUICK_ROUNDS = "1", 1
ALL = "all"
_OWN = ("sizes", "ranks", "save_max", "svg", "quick")


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group(
        "formats", "What each format of a checkpoint costs and loses, instead of what a save costs training."
    )
    group.add_argument(
        "--formats",
        nargs="?",
        const=ALL,
        metavar="NAME,...",
        help=f"measure these formats (without names: all): {', '.join(FORMATS)}",
    )
    group.add_argument("--sizes", metavar="MIB,...", help=f"MiB of parameters of the model ({SIZES})")
    group.add_argument("--ranks", metavar="N,...", help=f"processes that save it ({RANKS})")
    group.add_argument(
        "--save-max",
        type=float,
        metavar="S",
        help=f"leave out what would take longer to save, by its time at smaller sizes ({SAVE_S_MAX:g})",
    )
    group.add_argument("--svg", type=Path, metavar="PATH", help="draw time against size there")
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_SIZES} MiB and {QUICK_ROUNDS} round, if not told otherwise",
    )


def check_unused(given: argparse.Namespace) -> None:
    """Raises UsageError for an option of this part without ``--formats``."""
    for name in _OWN:
        if getattr(given, name):
            raise UsageError(f"--{name.replace('_', '-')} is for --formats; give both")


def main(given: argparse.Namespace) -> int:
    """Runs the benchmark of formats and returns the exit code."""
    names, skipped = _formats(given.formats)
    if not names:
        raise UsageError(f"--formats {given.formats}: {next(iter(skipped.values()))}")
    sizes = _numbers("--sizes", given.sizes or (QUICK_SIZES if given.quick else SIZES), float, 1 << 20)
    ranks = _numbers("--ranks", given.ranks or RANKS, int, RANKS_MAX)
    rounds = given.rounds or (QUICK_ROUNDS if given.quick else ROUNDS)
    save_s_max = SAVE_S_MAX if given.save_max is None else given.save_max
    if save_s_max <= 0:
        raise UsageError(f"--save-max {save_s_max:g}: give seconds above 0")
    output.check_json(given.json)
    output.check_json(given.svg, "--svg")
    plans = [
        Plan(
            ranks=count,
            sizes=tuple(int(size * report.MIB) for size in sizes),
            rounds=rounds,
            formats={name: FORMATS[name].fsync for name in names},
        )
        for count in ranks
    ]
    machine = output.machine()
    print(f"{machine}; medians of {rounds} rounds", flush=True)
    with _ended_in_order(), output.place(given.directory) as place:
        measures = measure(plans, Path(place), save_s_max, _show)
    losses = measures.losses()
    print(f"\n{report.losses_table(losses, skipped)}")
    result: dict[str, Any] = {
        "bench": "checkpoint --formats",
        "machine": machine,
        "rounds": rounds,
        "cases": measures.cases(),
        "losses": losses,
        "skipped": skipped,
    }
    output.write_json(given.json, result)
    if given.svg is not None:
        output.write_text(given.svg, plot.draw_formats(result))
    return 0


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C in the block, so that the ranks are ended and their files removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(case: dict[str, Any]) -> None:
    print(f"\n{report.table(case)}", flush=True)


def _formats(words: str) -> tuple[list[str], dict[str, str]]:
    """Returns the formats that can be measured, and by name the reason why others cannot."""
    names = list(FORMATS) if words == ALL else [word.strip() for word in words.split(",")]
    for name in names:
        if name not in FORMATS:
            raise UsageError(f"--formats: there is no format {name!r}; there are: {', '.join(FORMATS)}")
    skipped = {name: why for name in names if (why := lacking(name))}
    return [name for name in dict.fromkeys(names) if name not in skipped], skipped


def _numbers(option: str, words: str, kind: type, most: float) -> list[Any]:
    """Parses comma-separated numbers: ascending, without duplicates. Raises UsageError."""
    try:
        numbers = sorted({kind(word) for word in words.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= most for number in numbers):
        raise UsageError(f"{option} {words}: give numbers above 0 and up to {most}, with commas between")
    return numbers
