"""`swift-ft study`: runs every cell that is not done yet, and writes the study as JSON and as one HTML page."""

import importlib.util
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swift_ft.cli_parser import Parser, check_file, import_with_extra, write, write_json
from swift_ft.errors import UsageError
from swift_ft.files import make_directory
from swift_ft.lab.bench import output
from swift_ft.lab.command_line import until_stopped
from swift_ft.lab.drill.config import versions
from swift_ft.lab.study import figures, running
from swift_ft.lab.study.settings import DEFAULT, QUICK, STRATEGIES, TASKS, Cell, Settings
from swift_ft.text import show, tell

FORMAT = 3
Result = dict[str, Any]


class Store:
    """Directory of one study.

    settings.json          settings of the study to which the directory belongs
    cells/NAME.json        result of that cell
    run-*/                 work of the current cell; removed after it
    study.json study.html  the result
    """

    def __init__(self, directory: Path, settings: Settings) -> None:
        """Raises UsageError if the directory cannot be written, or belongs to another study."""
        self._directory = directory
        try:
            make_directory(directory / "cells")
            probe = TemporaryDirectory(prefix="run-", dir=directory)
        except OSError as error:
            raise UsageError(
                f"study: --out {directory}: {error.strerror}: name a directory that can be written"
            ) from None
        probe.cleanup()
        # What bits and times depend on in addition to the settings.
        environment = {**versions(), "processor": output.cpu_model()}
        mine = json.loads(json.dumps({"format": FORMAT, **asdict(settings), "environment": environment}))
        path = directory / "settings.json"
        if not path.exists():
            write_json(path, mine)
            return
        stored = _read(path) or {}
        for name, value in mine.items():
            if stored.get(name) != value:
                raise UsageError(
                    f"study: --out {directory} is of another study: its {name} is {stored.get(name)}, not {value}"
                )

    def path(self, cell: Cell) -> Path:
        return self._directory / "cells" / f"{cell.name}.json"

    def read(self, cell: Cell) -> Result | None:
        """Returns the result of a cell; None if it is still to be done, because its file is damaged as well."""
        return _read(self.path(cell))

    def write(self, cell: Cell, result: Result) -> None:
        """Stores the result of a cell. Raises ServiceError if it cannot be written."""
        write_json(self.path(cell), result)

    def place(self) -> "TemporaryDirectory[str]":
        return TemporaryDirectory(prefix="run-", dir=self._directory.absolute(), ignore_cleanup_errors=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def arguments_of(argv: Sequence[str]) -> tuple[Settings, Any]:
    """Parses and checks the arguments. Raises UsageError."""
    parser = Parser(
        prog="swift-ft study",
        description="Trains two small tasks under failures, and shows what each strategy costs in time and accuracy.",
    )
    add = parser.add_argument
    out = Path("swift-study")
    add(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help="of the study; one that exists goes on (%(default)s)",
    )
    add("--json", type=Path, metavar="PATH", help="the figures (default: study.json in DIR)")
    add("--html", type=Path, metavar="PATH", help="the page (default: study.html in DIR)")
    add("--quick", action="store_true", help="few cells, in about two minutes")
    tasks = ",".join(TASKS)
    add("--task", default=tasks, metavar="NAME,NAME", help=f"of {tasks} (default: all)")
    strategies = ",".join(STRATEGIES)
    add("--strategy", default=DEFAULT, metavar="NAME,NAME", help=f"of {strategies} (default: {DEFAULT})")
    add("--rates", default="0.5,2", metavar="R,R", help="mean failures in 100 steps of the job (%(default)s)")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each kind (%(default)s)")
    add("--steps", type=int, default=300, metavar="N", help="of a run (%(default)s)")
    add("--checkpoint-every", type=int, default=25, metavar="N", help="steps (%(default)s)")
    gone = "how long a lost place is gone, where the others go on without it (%(default)s)"
    add("--repair-s", type=float, default=2.0, metavar="SECONDS", help=gone)
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    given = parser.parse_args(argv)
    check_file("--json", given.json)
    check_file("--html", given.html)
    try:
        rates = [float(f"{float(rate):g}") for rate in given.rates.split(",")]
    except ValueError:
        raise UsageError(f"study: --rates {given.rates}: numbers between commas, such as 0.5,2") from None
    settings = Settings(
        tasks=tuple(output.some(given.task, TASKS, "study: --task")),
        strategies=tuple(output.some(given.strategy, STRATEGIES, "study: --strategy")),
        rates=tuple(dict.fromkeys(rates)),
        seeds=given.seeds,
        steps=given.steps,
        checkpoint_every=given.checkpoint_every,
        repair_s=given.repair_s,
    )
    for cell in settings.cells():
        running.planned(cell, settings)  # raises UsageError if a seed draws more failures than a run may have
    return settings, given


def study(settings: Settings, store: Store) -> dict[str, Any]:
    results = {cell: store.read(cell) or {"failed": "not done"} for cell in settings.cells()}
    missing = [cell for cell, result in results.items() if "failed" in result]
    began = time.monotonic()
    for number, cell in enumerate(missing):
        with store.place() as place:
            result = results[cell] = running.run(cell, settings, Path(place))
        store.write(cell, result)
        took_s = time.monotonic() - began
        told = (
            f"failed: {result['failed']}" if "failed" in result else f"{result['train_s']:.1f} s of training"
        )
        left = len(missing) - number - 1
        tell(f"study: {cell.name}: {told}; {left} runs, {left * took_s / (number + 1):.0f} s left")
    return figures.build(settings, results, output.machine(), _checks(settings, results, store))


def _checks(settings: Settings, results: Mapping[Cell, Result], store: Store) -> list[dict[str, Any]]:
    """Recomputes, per task, an exact cell and one that drops batches in one process of plain torch."""
    checks = []
    for task in settings.tasks:
        hit = {
            cell: result for cell, result in results.items() if cell.task == task and result.get("injected")
        }
        exact = [cell for cell in hit if STRATEGIES[cell.strategy].exact]
        dropped = [cell for cell in hit if not STRATEGIES[cell.strategy].exact and hit[cell]["fewer"]]
        for cells in (exact, dropped):
            if cells:
                cell = max(cells, key=lambda cell: hit[cell]["injected"])
                tell(f"study: {cell.name} is calculated by one process of plain torch")
                with store.place() as place:
                    checks.append(running.calculate(cell, settings, hit[cell], Path(place)))
    return checks


def run(argv: Sequence[str]) -> int:
    """Returns exit code 0 if all cells finished, and exact ones have their bits; else 1."""
    if importlib.util.find_spec("torch") is None:  # for its runs; it is not imported here
        raise UsageError("study: torch is not installed: pip install 'swift-ft[lab]'")
    settings, given = arguments_of(argv)
    page = import_with_extra("swift_ft.lab.study.page", "study", "lab")
    found = study(settings, Store(given.out, settings))
    html = given.html or given.out / "study.html"
    write_json(given.json or given.out / "study.json", found)
    write(html, page.build(found))
    show([*figures.lines(found), "", f"study: {html}"])
    return 1 if found["failed"] or found["differ"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    return until_stopped("study", lambda: run(argv or []))
