"""`swift-ft study`: runs every cell that is not done yet, and writes the study as JSON and as one HTML page."""

import importlib.util
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swift.arguments import Parser
from swift.bench import output
from swift.errors import SwiftError, UsageError
from swift.study import figures, page, running
from swift.study.cells import Result, Store
from swift.study.settings import TASKS, Cell, Settings
from swift.study.strategies import DEFAULT, QUICK, STRATEGIES
from swift.study.trainers import corpus
from swift.words import one_line, show, tell


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
    """Raises UsageError."""
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
    """Why the task cannot be had here; empty: it can."""
    needs = TASKS[task].needs
    if needs and importlib.util.find_spec(needs) is None:
        return f"it needs {needs}; pip install 'swift-ft[study]'"
    if task == "bytes" and len(corpus.sources()) < corpus.FILES_MAX // 2:
        return "the sources of Python's standard library are not installed"
    return ""


class Progress:
    """What is done, and how long the rest takes, on stderr."""

    def __init__(self, cells: int, done: int) -> None:
        self._cells, self._done, self._new = cells, done, 0
        self._began = time.monotonic()

    def told(self, cell: Cell, result: Result) -> None:
        """After each cell that was run."""
        self._done, self._new = self._done + 1, self._new + 1
        left = (time.monotonic() - self._began) / self._new * (self._cells - self._done)
        words = (
            f"failed: {result['failed']}" if "failed" in result else f"{result['train_s']:.1f} s of training"
        )
        tell(f"study: {self._done} of {self._cells}: {cell.name}: {words}; {_left(left)} left")


def _left(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def study(settings: Settings, store: Store) -> dict[str, Any]:
    """The figures, once all cells are done. Raises UsageError if no task is left."""
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
    """Of each task an exact cell and one that drops batches, by one process of plain torch."""
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
    """Exit code 0: all cells came to their ends, and exact ones have their bits; 1: not all; 2 and 3 as everywhere."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its processes end with it
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
