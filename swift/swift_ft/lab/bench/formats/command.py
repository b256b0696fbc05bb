"""`swift-ft bench checkpoint --formats`: what each format of a checkpoint costs, and what it loses.

In each round every format has its turns, beside the machine's limits for the same bytes, so that a busy machine slows
all of them. Times are medians over rounds, ratios those of the rounds. A warm-up round finds what is lost.
"""

import argparse
import json
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.formats.kinds import FORMATS, lacking
from swift_ft.lab.bench.formats.ranks import LIMITS, Turn
from swift_ft.lab.bench.formats.states import together
from swift_ft.lab.bench.output import Worker, signals_held
from swift_ft.text import show, table

RANKS_MAX = 64
SIZES, RANKS = "1,8", "1,2"
ALL = "all"
MIB = 1 << 20
SLOWEST = ("blocked_s", "total_s", "load_s", "copy_s", "write_s", "write_fsync_s", "read_s")
"""Of these the slowest rank counts; of all other figures the sum."""
Losses = dict[str, dict[str, list[str]]]


def measure(
    ranks: int, sizes: Sequence[int], rounds: int, names: Sequence[str], place: Path
) -> Iterator[tuple[dict[str, Any], Losses]]:
    """Yields for each size the case, and what each format loses. Raises ServiceError if a save or a load fails."""
    kinds = [(LIMITS, False), *((name, fsync) for name in names for fsync in FORMATS[name].fsync)]
    with ExitStack() as stack:
        with signals_held():
            workers = [
                stack.enter_context(Worker("swift_ft.lab.bench.formats.ranks", rank, ranks, place.absolute()))
                for rank in range(ranks)
            ]
        for worker in workers:
            worker.begin()
        for size in sizes:
            found: dict[tuple[str, bool], list[dict[str, Any]]] = {kind: [] for kind in kinds}
            losses: Losses = {}
            for number in range(-1, rounds):
                for name, fsync in kinds:
                    turn = Turn(parameter_bytes=size, format=name, fsync=fsync, compare=number < 0)
                    merged = merge(_answers(turn, workers))
                    if number >= 0:
                        found[name, fsync].append(merged)
                    elif name != LIMITS:
                        losses[name] = merged["losses"]
            yield case(size, ranks, found), losses


def _answers(turn: Turn, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    for worker in workers:
        worker.tell(json.dumps(asdict(turn)))
    try:
        return [worker.result() for worker in workers]
    except ServiceError as error:
        what = "nothing can be saved" if turn.format == LIMITS else f"{turn.format} cannot save or load"
        raise ServiceError(f"bench checkpoint: {what}: {error}") from None


def merge(measures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges all ranks' measurements of one turn: the slowest rank's seconds; sums of CPU time and bytes."""
    merged: dict[str, Any] = {
        name: (max if name in SLOWEST else sum)(each[name] for each in measures)
        for name in measures[0]
        if name != "losses"
    }
    if "losses" in measures[0]:
        merged["losses"] = together([each["losses"] for each in measures])
    return merged


def case(size: int, ranks: int, found: Mapping[tuple[str, bool], list[dict[str, Any]]]) -> dict[str, Any]:
    """Computes one case from its rounds: medians, and ratios as medians of the rounds' ratios."""
    limits = found[LIMITS, False]

    def median(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
        return float(statistics.median(each[name] for each in rounds))

    def ratio(rounds: Sequence[Mapping[str, Any]], name: str, limit: str) -> float:
        ratios = [each[name] / base[limit] for each, base in zip(rounds, limits, strict=True)]
        return float(statistics.median(ratios))

    rows = [
        {
            "format": name,
            "fsync": fsync,
            **{key: median(rounds, key) for key in ("blocked_s", "total_s", "cpu_s", "load_s")},
            "bytes": round(median(rounds, "bytes")),
            "size": statistics.median(each["bytes"] / each["state_bytes"] for each in rounds),
            "blocked_over_copy": ratio(rounds, "blocked_s", "copy_s"),
            "total_over_write": ratio(rounds, "total_s", "write_fsync_s" if fsync else "write_s"),
            "load_over_read": ratio(rounds, "load_s", "read_s"),
        }
        for (name, fsync), rounds in found.items()
        if name != LIMITS
    ]
    state_bytes = max(
        each["state_bytes"] for kind, rounds in found.items() if kind[0] != LIMITS for each in rounds
    )
    return {
        "parameter_bytes": size,
        "state_bytes": state_bytes,
        "ranks": ranks,
        "rounds": len(limits),
        "limits": {name: median(limits, name) for name in limits[0]},
        "formats": rows,
    }


def text(case: Mapping[str, Any]) -> list[str]:
    """Formats one case."""
    limits = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in case["limits"].items()}
    rows = [["", "fsync", "blocked ms", "total ms", "CPU ms", "load ms", "size"]]
    rows[0] += ["blocked / copy", "total / write", "load / read"]
    for row in case["formats"]:
        times = [f"{1e3 * row[name]:.1f}" for name in ("blocked_s", "total_s", "cpu_s", "load_s")]
        ratios = ("size", "blocked_over_copy", "total_over_write", "load_over_read")
        fsync = "yes" if row["fsync"] else "no"
        rows.append([row["format"], fsync, *times, *(f"{row[name]:.2f}" for name in ratios)])
    ranks = f"{case['ranks']} rank" + ("s, each with its shard" if case["ranks"] > 1 else "")
    return [
        f"{case['parameter_bytes'] / MIB:g} MiB of parameters ({case['state_bytes'] / MIB:.1f} MiB of state), {ranks}",
        f"limits: copied in memory {limits['copy_s']}, written {limits['write_s']}, with fsync "
        f"{limits['write_fsync_s']}, read {limits['read_s']}",
        *table(rows),
    ]


def losses_text(losses: Losses, skipped: Mapping[str, str]) -> list[str]:
    """Formats what each format loses, a column per group, and the reasons why others were not measured."""
    lines = []
    if losses:
        groups = list(next(iter(losses.values())))
        rows = [[name, *(",".join(of[group]) or "-" for group in groups)] for name, of in losses.items()]
        lines = ["what is lost (-: nothing):", *table([["", *groups], *rows])]
    return [*lines, *(f"{name} is skipped: {why}" for name, why in skipped.items())]


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


def check_unused(given: argparse.Namespace) -> None:
    """Raises UsageError for an option of this part without ``--formats``."""
    for name in ("sizes", "ranks"):
        if getattr(given, name):
            raise UsageError(f"--{name} is for --formats; give both")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark of formats and returns its document."""
    names, skipped = measurable(given.formats)
    sizes = _numbers("--sizes", given.sizes or SIZES, float, 1 << 20)
    ranks = _numbers("--ranks", given.ranks or RANKS, int, RANKS_MAX)
    machine = output.machine()
    print(f"{machine}; medians of {given.rounds} rounds", flush=True)
    cases = []
    losses: Losses = {}
    with _ended_in_order(), output.place(given.directory) as place:
        for count in ranks:
            folder = Path(place, str(count))
            folder.mkdir()
            bytes_of_sizes = [int(size * MIB) for size in sizes]
            for found, lost in measure(count, bytes_of_sizes, given.rounds, names, folder):
                cases.append(found)
                losses |= {name: together([losses.get(name, of), of]) for name, of in lost.items()}
                show(["", *text(found)])
    show(["", *losses_text(losses, skipped)])
    return {
        "bench": "checkpoint --formats",
        "machine": machine,
        "rounds": given.rounds,
        "cases": cases,
        "losses": losses,
        "skipped": skipped,
    }


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C in the block, so that the ranks are ended and their files removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def measurable(words: str) -> tuple[list[str], dict[str, str]]:
    """Returns the formats that can be measured, and by name the reason why others cannot. Raises UsageError if none
    can."""
    names = list(FORMATS) if words == ALL else output.some(words, FORMATS, "--formats")
    skipped = {name: why for name in names if (why := lacking(name))}
    if len(skipped) == len(names):
        raise UsageError(f"--formats {words}: {next(iter(skipped.values()))}")
    return [name for name in names if name not in skipped], skipped


def _numbers(option: str, words: str, kind: type, most: float) -> list[Any]:
    """Parses comma-separated numbers: ascending, without duplicates. Raises UsageError."""
    try:
        numbers = sorted({kind(word) for word in words.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= most for number in numbers):
        raise UsageError(f"{option} {words}: give numbers above 0 and up to {most}, with commas between")
    return numbers
