"""`swift-ft bench checkpoint --formats`: what each format of a checkpoint costs, and what it loses.

In each round every format has its turns, beside the machine's limits for the same bytes, so that a busy machine slows
all of them. Times are medians over rounds, ratios those of the rounds. A warm-up round finds what is lost.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.formats.kinds import FORMATS
from swift_ft.lab.bench.formats.ranks import LIMITS, Turn
from swift_ft.lab.bench.formats.states import together
from swift_ft.lab.bench.output import Rounds, Worker
from swift_ft.text import show, table

RANKS_MAX = 64
MIB = 1 << 20
LIMIT_NAMES = ("copy_s", "write_s", "write_fsync_s", "read_s")
SLOWEST = ("blocked_s", "total_s", "load_s", *LIMIT_NAMES)
"""Of these the slowest rank counts; of all other figures the sum."""
Losses = dict[str, dict[str, list[str]]]


def measure(
    ranks: int, sizes: Sequence[int], rounds: int, names: Sequence[str], place: Path
) -> Iterator[tuple[dict[str, Any], Losses]]:
    """Yields for each size the case, and what each format loses. Raises ServiceError if a save or a load fails."""
    kinds = [(LIMITS, False), *((name, fsync) for name in names for fsync in FORMATS[name].fsync)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker("swift_ft.lab.bench.formats.ranks", rank, ranks, place.absolute()))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.begin()
        for size in sizes:
            found, losses = Rounds(), Losses()
            for number in range(-1, rounds):
                for name, fsync in kinds:
                    turn = Turn(parameter_bytes=size, format=name, fsync=fsync, compare=number < 0)
                    merged = merge(_answers(turn, workers))
                    lost = merged.pop("losses", None)
                    if number >= 0:
                        for figure, value in merged.items():
                            found.note(f"{name} {fsync} {figure}", value)
                    elif lost is not None:
                        losses[name] = lost
            yield case(size, ranks, rounds, kinds[1:], found), losses


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


def case(
    size: int, ranks: int, rounds: int, kinds: Sequence[tuple[str, bool]], found: Rounds
) -> dict[str, Any]:
    """Computes one case: medians, and ratios as medians of the rounds' ratios."""

    def row(name: str, fsync: bool) -> dict[str, Any]:
        at, base = f"{name} {fsync}", f"{LIMITS} False"
        return {
            "format": name,
            "fsync": fsync,
            **{key: found.median(f"{at} {key}") for key in ("blocked_s", "total_s", "cpu_s", "load_s")},
            "bytes": round(found.median(f"{at} bytes")),
            "size": found.ratio(f"{at} bytes", f"{at} state_bytes"),
            "blocked_over_copy": found.ratio(f"{at} blocked_s", f"{base} copy_s"),
            "total_over_write": found.ratio(
                f"{at} total_s", f"{base} {'write_fsync_s' if fsync else 'write_s'}"
            ),
            "load_over_read": found.ratio(f"{at} load_s", f"{base} read_s"),
        }

    return {
        "parameter_bytes": size,
        "state_bytes": max(found.median(f"{name} {fsync} state_bytes") for name, fsync in kinds),
        "ranks": ranks,
        "rounds": rounds,
        "limits": {name: found.median(f"{LIMITS} False {name}") for name in LIMIT_NAMES},
        "formats": [row(name, fsync) for name, fsync in kinds],
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


def losses_text(losses: Losses) -> list[str]:
    """Formats what each format loses, a column per group."""
    groups = list(next(iter(losses.values())))
    rows = [[name, *(",".join(of[group]) or "-" for group in groups)] for name, of in losses.items()]
    return ["what is lost (-: nothing):", *table([["", *groups], *rows])]


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group(
        "formats", "What each format of a checkpoint costs and loses, instead of what a save costs training."
    )
    names = f"measure these formats (without names: all): {', '.join(FORMATS)}"
    group.add_argument("--formats", nargs="?", const=",".join(FORMATS), metavar="NAME,...", help=names)
    group.add_argument("--sizes", default="1,8", metavar="MIB,...", help="of parameters (%(default)s)")
    group.add_argument("--ranks", default="1,2", metavar="N,...", help="processes that save (%(default)s)")


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Runs the benchmark of formats and returns its document."""
    names = output.some(given.formats, FORMATS, "--formats")
    sizes = _numbers("--sizes", given.sizes, float, 1 << 20)
    ranks = _numbers("--ranks", given.ranks, int, RANKS_MAX)
    machine = output.machine()
    print(f"{machine}; medians of {given.rounds} rounds", flush=True)
    cases = []
    losses: Losses = {}
    with output.place(given.directory) as place:
        for count in ranks:
            folder = Path(place, str(count))
            folder.mkdir()
            bytes_of_sizes = [int(size * MIB) for size in sizes]
            for found, lost in measure(count, bytes_of_sizes, given.rounds, names, folder):
                cases.append(found)
                losses |= {name: together([losses.get(name, of), of]) for name, of in lost.items()}
                show(["", *text(found)])
    show(["", *losses_text(losses)])
    about = {"bench": "checkpoint --formats", "machine": machine, "rounds": given.rounds}
    return {**about, "cases": cases, "losses": losses}


def _numbers(option: str, words: str, kind: type, most: float) -> list[Any]:
    """Parses comma-separated numbers: ascending, without duplicates. Raises UsageError."""
    try:
        numbers = sorted({kind(word) for word in words.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= most for number in numbers):
        raise UsageError(f"{option} {words}: give numbers above 0 and up to {most}, with commas between")
    return numbers
