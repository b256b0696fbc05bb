"""`swift-ft bench checkpoint --formats`: what each format of a checkpoint costs, and what it loses.

In each round every format has its turns, beside the machine's limits for the same bytes, so that a busy machine slows
all of them. Times are medians over rounds, ratios those of the rounds. A warm-up round finds what is lost.
"""

import argparse
import mmap
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.formats.kinds import FORMATS
from swift_ft.lab.bench.formats.states import State, bytes_of, leaves, losses, make, nbytes, write_tensors
from swift_ft.lab.bench.output import Rounds
from swift_ft.state.tree import split
from swift_ft.text import show, table

MIB = 1 << 20
SIZE_MAX = 1 << 20
LIMITS = "limits"
LIMIT_NAMES = ("copy_s", "write_s", "write_fsync_s", "read_s")
Losses = dict[str, dict[str, list[str]]]


def measure(size: int, rounds: int, names: Sequence[str], place: Path) -> tuple[dict[str, Any], Losses]:
    """Returns the case of a model with so many bytes of parameters, and what each format loses. Raises ServiceError if
    a save or a load fails."""
    state, found, lost = make(size, seed=0), Rounds(), Losses()
    kinds = [(name, fsync) for name in names for fsync in FORMATS[name].fsync]
    for number in range(-1, rounds):
        measured: dict[str, dict[str, float]] = {}
        with _folder(place, "nothing can be saved") as folder:
            measured[LIMITS] = limits(state, folder / "limit")
        for name, fsync in kinds:
            with _folder(place, f"{name} cannot save or load") as folder:
                measured[f"{name} {fsync}"], loaded = save_and_load(state, folder, name, fsync)
            if number < 0:
                lost[name] = losses(state, loaded)
        if number >= 0:
            for at, figures in measured.items():
                for figure, value in figures.items():
                    found.note(f"{at} {figure}", value)
    return case(size, rounds, kinds, found), lost


@contextmanager
def _folder(place: Path, failed: str) -> Iterator[Path]:
    """Gives an empty folder, which is gone afterwards. Turns any error into a ServiceError in one line."""
    folder = place / "state"
    folder.mkdir()
    try:
        yield folder
    except (Exception, CheckpointException) as error:  # noqa: BLE001  (whatever a format's library raises)
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ServiceError(f"bench checkpoint: {failed}: {said}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save_and_load(state: State, folder: Path, name: str, fsync: bool) -> tuple[dict[str, float], State]:
    began, worked = time.monotonic(), time.process_time()
    wait = FORMATS[name].save(state, folder, fsync)
    blocked = time.monotonic() - began
    wait()
    total, worked = time.monotonic() - began, time.process_time() - worked
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    began = time.monotonic()
    loaded = FORMATS[name].load(folder, state)
    touch(loaded)
    measured = {"blocked_s": blocked, "total_s": total, "cpu_s": worked, "load_s": time.monotonic() - began}
    return measured | {"bytes": size, "state_bytes": nbytes(state)}, loaded


def touch(state: State) -> None:
    """Reads a byte of each page, because a file that is only mapped into memory is not loaded before that."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor) and value.numel():
            bytes_of(value)[:: mmap.PAGESIZE].sum()


def limits(state: State, path: Path) -> dict[str, float]:
    """Measures the same bytes copied in memory, written to one file, written and synced, read again: the seconds of
    each. Raises OSError."""
    rounds = Rounds()
    tensors = [tensor for tensor in split(state)[0].values() if tensor.nbytes]
    with rounds.timed("copy_s"):
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for name, fsync in (("write_s", False), ("write_fsync_s", True)):
        path.unlink(missing_ok=True)
        with rounds.timed(name):
            write_tensors(path, copies, fsync=fsync)
    with rounds.timed("read_s"), path.open("rb", buffering=0) as file:
        for tensor in copies:
            into = memoryview(bytes_of(tensor).numpy().data)
            while into:
                into = into[file.readinto(into) :]
    path.unlink()
    return {name: seconds for name, (seconds,) in rounds.values.items()}


def case(size: int, rounds: int, kinds: Sequence[tuple[str, bool]], found: Rounds) -> dict[str, Any]:
    def row(name: str, fsync: bool) -> dict[str, Any]:
        at, written = f"{name} {fsync}", "write_fsync_s" if fsync else "write_s"
        return {
            "format": name,
            "fsync": fsync,
            **{key: found.median(f"{at} {key}") for key in ("blocked_s", "total_s", "cpu_s", "load_s")},
            "bytes": round(found.median(f"{at} bytes")),
            "size": found.ratio(f"{at} bytes", f"{at} state_bytes"),
            "blocked_over_copy": found.ratio(f"{at} blocked_s", f"{LIMITS} copy_s"),
            "total_over_write": found.ratio(f"{at} total_s", f"{LIMITS} {written}"),
            "load_over_read": found.ratio(f"{at} load_s", f"{LIMITS} read_s"),
        }

    return {
        "parameter_bytes": size,
        "state_bytes": max(found.median(f"{name} {fsync} state_bytes") for name, fsync in kinds),
        "rounds": rounds,
        "limits": {name: found.median(f"{LIMITS} {name}") for name in LIMIT_NAMES},
        "formats": [row(name, fsync) for name, fsync in kinds],
    }


def text(case: Mapping[str, Any]) -> list[str]:
    limits = {name: f"{1e3 * seconds:.1f} ms" for name, seconds in case["limits"].items()}
    rows = [["", "fsync", "blocked ms", "total ms", "CPU ms", "load ms", "size"]]
    rows[0] += ["blocked / copy", "total / write", "load / read"]
    for row in case["formats"]:
        times = [f"{1e3 * row[name]:.1f}" for name in ("blocked_s", "total_s", "cpu_s", "load_s")]
        ratios = ("size", "blocked_over_copy", "total_over_write", "load_over_read")
        fsync = "yes" if row["fsync"] else "no"
        rows.append([row["format"], fsync, *times, *(f"{row[name]:.2f}" for name in ratios)])
    return [
        f"{case['parameter_bytes'] / MIB:g} MiB of parameters ({case['state_bytes'] / MIB:.1f} MiB of state)",
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


def run(given: argparse.Namespace) -> dict[str, Any]:
    names = output.some(given.formats, FORMATS, "--formats")
    sizes = _sizes(given.sizes)
    machine = output.machine()
    print(f"{machine}; medians of {given.rounds} rounds", flush=True)
    cases, lost = [], Losses()
    torch.set_num_threads(1)
    with output.place(given.directory) as place, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        for size in sizes:
            found, lost = measure(int(size * MIB), given.rounds, names, Path(place))
            cases.append(found)
            show(["", *text(found)])
    show(["", *losses_text(lost)])
    about = {"bench": "checkpoint --formats", "machine": machine, "rounds": given.rounds}
    return {**about, "cases": cases, "losses": lost}


def _sizes(words: str) -> list[float]:
    """Parses comma-separated numbers: ascending, without duplicates. Raises UsageError."""
    try:
        sizes = sorted({float(word) for word in words.split(",")})
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size <= SIZE_MAX for size in sizes):
        raise UsageError(f"--sizes {words}: give numbers above 0 and up to {SIZE_MAX}, with commas between")
    return sizes
