"""`swift-ft study`: runs every cell that is not done yet, and writes the study as JSON and as one HTML page."""

import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.files import make_directory, private
from swift_ft.lab.bench import output
from swift_ft.lab.bench.output import cpu_model, write_text
from swift_ft.lab.study import figures, page, running
from swift_ft.lab.study.settings import DEFAULT, QUICK, STRATEGIES, TASKS, Cell, Settings
from swift_ft.lab.study.trainers import corpus
from swift_ft.text import one_line, show, tell

# Directory of a study: its settings, and one file for each finished cell.
#
# settings.json         settings of the study to which the directory belongs
# lock                  held by the running study
# cells/NAME.json       result of that cell
# run-*/                work of the current cell; removed after it
# study.json study.html the result

FORMAT = 2
SPACE_MIB = 64
"""Free space required before a run, for checkpoints and a log."""
Result = dict[str, Any]


class Store:
    """Directory of one study."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextmanager
    def opened(self, settings: Settings) -> Iterator["Store"]:
        """Holds the directory exclusively for this process. Raises UsageError if it cannot be written, is in use, or
        belongs to another study."""
        try:
            make_directory(self.directory / "cells")
            lock = os.fdopen(private(str(self.directory / "lock"), os.O_WRONLY | os.O_CREAT), "w")
        except OSError as error:
            raise UsageError(
                f"study: --out {self.directory}: {error.strerror}: name a directory that can be written"
            ) from None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"study: --out {self.directory}: another study runs there") from None
            self._agree(settings)
            yield self

    def _agree(self, settings: Settings) -> None:
        path = self.directory / "settings.json"
        here = environment()
        if not path.exists():
            whole = {"format": FORMAT, **settings.as_json(), "environment": here}
            write_text(path, json.dumps(whole, indent=2) + "\n")
            return
        try:
            stored = json.loads(path.read_text())
            before: dict[str, str] = dict(stored["environment"])
            if stored["format"] != FORMAT:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"study: {path} is damaged, or of another version: name another --out") from None
        if difference := settings.difference(stored):
            raise UsageError(f"study: --out {self.directory} is of another study: {difference}")
        for name, found in here.items():
            if before.get(name) != found:
                was = f"{name} {before.get(name)}"
                raise UsageError(
                    f"study: --out {self.directory} was begun with {was}, here is {found}: begin anew"
                )

    def path(self, cell: Cell) -> Path:
        return self.directory / "cells" / f"{cell.name}.json"

    def read(self, cell: Cell) -> Result | None:
        """Returns the result of a cell; None if it is still to be done. A damaged file is reported, and its cell
        done again."""
        try:
            text = self.path(cell).read_text()
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            text = ""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(text)
            if found["cell"] == asdict(cell) and found["check"] == check_cells(found["result"]):
                result: Result = found["result"]
                return result
        tell(f"study: {self.path(cell)} is damaged: this cell is done again")
        return None

    def write(self, cell: Cell, result: Result) -> None:
        """Stores the result of a cell. Raises ServiceError if it cannot be written."""
        whole = {"cell": asdict(cell), "check": check_cells(result), "result": result}
        write_text(self.path(cell), json.dumps(whole, indent=1) + "\n")

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Yields a work directory for one cell. Raises ServiceError if it cannot be created or the disk space is too
        small."""
        for left in self.directory.glob(f"run-{'[0-9a-f]' * 8}"):
            shutil.rmtree(left, ignore_errors=True)
        # A random name, because ranks of a killed study may still write into the previous directory.
        path = (self.directory / f"run-{secrets.token_hex(4)}").absolute()
        try:
            free = shutil.disk_usage(self.directory).free >> 20
            if free < SPACE_MIB:
                raise ServiceError(
                    f"study: {self.directory}: {free} MiB of space, a run needs {SPACE_MIB} MiB: make space, and start "
                    "the study again: it goes on where it was"
                )
            path.mkdir(mode=0o700)
        except OSError as error:
            raise ServiceError(f"study: {path}: {error.strerror}") from None
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def environment() -> dict[str, str]:
    """Returns what bits and times depend on in addition to the settings; the byte task's text depends on the Python
    version."""
    return {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "swift-ft": metadata.version("swift-ft"),
        "processor": cpu_model(),
    }


def check_cells(result: Result) -> int:
    """Returns a checksum of the values that does not depend on their formatting."""
    return zlib.crc32(json.dumps(result, sort_keys=True).encode())


def make_parser() -> Parser:
    parser = Parser(
        prog="swift-ft study",
        description="Trains two small tasks under failures, and shows what each strategy costs in time and accuracy.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("swift-study"),
        metavar="DIR",
        help="of the study; one that exists goes on (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="the figures (default: study.json in DIR)")
    parser.add_argument("--html", type=Path, metavar="PATH", help="the page (default: study.html in DIR)")
    parser.add_argument("--quick", action="store_true", help="few cells, in about two minutes")
    parser.add_argument("--task", metavar="NAME,NAME", help=f"of {', '.join(TASKS)} (default: all)")
    parser.add_argument(
        "--strategy", metavar="NAME,NAME", help=f"of {', '.join(STRATEGIES)} (default: {', '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--rates", metavar="R,R", help="failures in 100 steps of the job, on average (default: 0.5,2)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each kind (default: 3)")
    parser.add_argument("--steps", type=int, metavar="N", help="of a run (default: 300)")
    parser.add_argument("--checkpoint-every", type=int, metavar="N", help="steps (default: 25)")
    parser.add_argument(
        "--repair-s",
        type=float,
        metavar="SECONDS",
        help="how long a lost place is gone, where the others go on without it (default: 2)",
    )
    return parser


class Places(NamedTuple):
    out: Path
    json: Path
    html: Path


def settings_of(argv: Sequence[str]) -> tuple[Settings, Places]:
    """Parses and checks the arguments. Raises UsageError."""
    given = make_parser().parse_args(argv)
    output.check_json(given.json)
    output.check_json(given.html, "--html")
    tasks = _names(given.task) or tuple(TASKS)
    if given.quick and not given.task:
        tasks = ("bytes",)
    default: dict[str, Any] = {"seeds": 1 if given.quick else 3, "steps": 120 if given.quick else 300}
    default |= {"checkpoint_every": 25, "repair_s": 2.0}
    chosen = {
        name: default[name] if getattr(given, name) is None else getattr(given, name) for name in default
    }
    settings = Settings(
        tasks=tuple(tasks),
        strategies=_names(given.strategy) or (QUICK if given.quick else DEFAULT),
        rates=_rates(given.rates or ("2" if given.quick else "0.5,2")),
        **chosen,
    )
    running.check_failures(settings.cells(), settings)
    return settings, Places(
        given.out, given.json or given.out / "study.json", given.html or given.out / "study.html"
    )


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"study: --rates {text}: numbers between commas, such as 0.5,2") from None


def missing(task: str) -> str:
    """Returns the reason why the task is not available here; empty if it is."""
    needs = TASKS[task].needs
    if needs and importlib.util.find_spec(needs) is None:
        return f"it needs {needs}; pip install 'swift-ft[lab]'"
    if task == "bytes" and len(corpus.sources()) < corpus.FILES_MAX // 2:
        return "the sources of Python's standard library are not installed"
    return ""


class Progress:
    """Reports finished cells and the remaining time on stderr."""

    def __init__(self, cells: int, done: int) -> None:
        self._cells, self._done, self._new = cells, done, 0
        self._began = time.monotonic()

    def told(self, cell: Cell, result: Result) -> None:
        """Reports one cell that was run."""
        self._done, self._new = self._done + 1, self._new + 1
        left = (time.monotonic() - self._began) / self._new * (self._cells - self._done)
        words = (
            f"failed: {result['failed']}" if "failed" in result else f"{result['train_s']:.1f} s of training"
        )
        tell(f"study: {self._done} of {self._cells}: {cell.name}: {words}; {_left(left)} left")


def _left(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def study(settings: Settings, store: Store) -> dict[str, Any]:
    """Runs all missing cells and returns the figures. Raises UsageError if no task is left."""
    skipped = {task: why for task in settings.tasks if (why := missing(task))}
    for task, why in skipped.items():
        tell(f"study: {task} is skipped: {why}")
    cells = [cell for cell in settings.cells() if cell.task not in skipped]
    if not cells:
        raise UsageError("study: no task is left")
    results = {
        cell: found for cell in cells if (found := store.read(cell)) is not None and "failed" not in found
    }
    progress = Progress(len(cells), len(results))
    for cell in cells:
        if cell not in results:
            with store.place() as place:
                result = running.run(cell, settings, place)
            store.write(cell, result)
            results[cell] = result
            progress.told(cell, result)
    checks = _checks(settings, results, store)
    return figures.build(settings, results, output.machine(), skipped, checks)


def _checks(settings: Settings, results: Mapping[Cell, Result], store: Store) -> list[dict[str, Any]]:
    """Recomputes, per task, an exact cell and one that drops batches in one process of plain torch."""
    checks = []
    for task in dict.fromkeys(cell.task for cell in results):
        whole = {
            cell: result for cell, result in results.items() if cell.task == task and "failed" not in result
        }
        hit = {cell: result for cell, result in whole.items() if cell.rate > 0 and result["injected"]}
        exact = [cell for cell in hit if STRATEGIES[cell.strategy].exact]
        dropped = [cell for cell in hit if not STRATEGIES[cell.strategy].exact and hit[cell]["fewer"]]
        chosen = [max(exact, key=lambda cell: hit[cell]["injected"])] if exact else []
        chosen += [max(dropped, key=lambda cell: hit[cell]["injected"])] if dropped else []
        for cell in chosen:
            tell(f"study: {cell.name} is calculated by one process of plain torch")
            with store.place() as place:
                checks.append(running.calculate(cell, settings, hit[cell], place))
    return checks


def main(argv: Sequence[str] | None = None) -> int:
    """Returns exit code 0 if all cells finished, and exact ones have their bits; else 1. 2 and 3 as everywhere."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises, so that child processes are ended
    try:
        settings, places = settings_of(argv if argv is not None else [])
        if importlib.util.find_spec("torch") is None:
            raise UsageError("study: it needs torch; pip install 'swift-ft[train]'")
        with Store(places.out).opened(settings) as store:
            found = study(settings, store)
            output.write_json(places.json, found)
            output.write_text(places.html, page.build(found))
        show([*figures.lines(found), "", f"study: {places.html}"])
        return 1 if found["failed"] or found["differ"] else 0
    except SwiftError as error:
        tell(one_line(error))
        return error.exit_code
