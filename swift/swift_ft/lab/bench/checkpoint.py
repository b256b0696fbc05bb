"""`swift-ft bench checkpoint`: cost of a save for training, in both modes and with torch's DCP, all in one run.

One process trains a model with AdamW. Each round runs every way of saving in turn: a save begins, and steps run until
it is durable. So a busy machine slows all of them. Figures are medians over rounds.

stall      how long `save` blocks training
durable    from its call until the files are synced
cost       the stall, and the extra time of the steps during the save over steps without a save
limits     the same bytes copied in memory; the same bytes written to one file and synced, without steps

``--formats`` measures the cost and the losses of each checkpoint format instead (`swift_ft.lab.bench.formats`).
"""

import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, SwiftError, UsageError
from swift_ft.lab.bench import formats, output
from swift_ft.lab.bench.formats import FORMATS
from swift_ft.lab.bench.output import Rounds
from swift_ft.state import MODES
from swift_ft.state.export import alone
from swift_ft.text import show, table

WIDTH, BATCH = 512, 64
PARAMETERS, ROUNDS = 8_000_000, 7
STEPS_PLAIN = 5
"""Steps without a save in each round, as the baseline."""
STALL_GOAL = 3.0
"""Upper limit of the stall in mode "async" over a copy in memory."""
WAYS = {mode: FORMATS[f"swift {mode}"] for mode in MODES} | {
    name: FORMATS[name] for name in ("dcp", "dcp async")
}
BLOCKING = ("sync", "dcp")

State = dict[str, Any]


class Trainer:
    """A model of about `elements` parameters, and its training steps."""

    def __init__(self, elements: int) -> None:
        torch.manual_seed(0)
        layers = max(1, elements // (WIDTH * WIDTH))
        self._module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self._optimizer = torch.optim.AdamW(self._module.parameters())
        self._x = torch.randn(BATCH, WIDTH)
        self.parameters = sum(p.numel() for p in self._module.parameters())

    def step(self) -> float:
        began = time.monotonic()
        self._optimizer.zero_grad()
        self._module(self._x).square().mean().backward()
        self._optimizer.step()
        return time.monotonic() - began

    def state(self) -> State:
        return {"module": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}


class Bench:
    def __init__(self, place: Path, elements: int) -> None:
        self.trainer = Trainer(elements)
        self.rounds = Rounds()
        """Seconds, such as "async stall"."""
        self._place = place

    def round(self) -> None:
        plain = statistics.median(self.trainer.step() for _ in range(STEPS_PLAIN))
        self.rounds.note("step", plain)
        for limit, seconds in formats.limits(self.trainer.state(), self._place / "limit").items():
            self.rounds.note(limit, seconds)
        for way in WAYS:
            self.save(way, plain)

    def save(self, way: str, plain: float) -> None:
        """Saves in one way, with steps until the save is durable. `plain`: seconds of a step without a save."""
        folder, form = self._place / way, WAYS[way]
        try:
            folder.mkdir()
            with alone():
                began = time.monotonic()
                wait = form.save(self.trainer.state(), folder, True)
                if way in BLOCKING:
                    wait()
                stall = durable = time.monotonic() - began
                longer = 0.0
                if way not in BLOCKING:

                    def end() -> float:
                        wait()
                        return time.monotonic() - began

                    with ThreadPoolExecutor(1) as pool:
                        ending = pool.submit(end)
                        while not ending.done():
                            longer += self.trainer.step() - plain
                        durable = ending.result()
            form.load(folder, self.trainer.state())
        except (OSError, SwiftError, CheckpointException) as error:
            raise ServiceError(f"nothing can be saved in {folder}: {error}") from error
        self.rounds.note(f"{way} stall", stall)
        self.rounds.note(f"{way} durable", durable)
        self.rounds.note(f"{way} cost", stall + longer)
        shutil.rmtree(folder)

    def result(self) -> dict[str, Any]:
        """Returns medians in seconds, and their ratios, each the median of the rounds' ratios."""
        rounds = self.rounds
        return {
            "parameters": self.trainer.parameters,
            "state_bytes": formats.nbytes(self.trainer.state()),
            "step_s": rounds.median("step"),
            "copy_s": rounds.median("copy_s"),
            "write_s": rounds.median("write_fsync_s"),
            "ways": {
                way: {
                    **{f"{what}_s": rounds.median(f"{way} {what}") for what in ("stall", "durable", "cost")},
                    "stall_over_copy": rounds.ratio(f"{way} stall", "copy_s"),
                    "durable_over_write": rounds.ratio(f"{way} durable", "write_fsync_s"),
                    "cost_in_steps": rounds.ratio(f"{way} cost", "step"),
                }
                for way in WAYS
            },
        }


def text(result: dict[str, Any], rounds: int) -> list[str]:
    rows = [["", "stall ms", "durable ms", "cost ms", "stall / copy", "durable / write", "cost in steps"]]
    for way, case in result["ways"].items():
        times = [f"{1e3 * case[name]:.1f}" for name in ("stall_s", "durable_s", "cost_s")]
        ratios = [f"{case[name]:.2f}" for name in ("stall_over_copy", "durable_over_write", "cost_in_steps")]
        rows.append([way, *times, *ratios])
    goal = result["goals"]["async_stall"]
    return [
        f"{result['parameters']} parameters, {result['state_bytes'] / 1e6:.0f} MB of state, medians of {rounds} "
        f"rounds; a step takes {1e3 * result['step_s']:.1f} ms",
        f"limits: a copy in memory {1e3 * result['copy_s']:.1f} ms, written and synced "
        f"{1e3 * result['write_s']:.1f} ms",
        *table(rows),
        output.goal_words(goal, "stall of async over a copy"),
    ]


def add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--parameters", type=int, default=PARAMETERS, metavar="N", help="elements of the model (%(default)s)")
    add("--rounds", type=int, default=ROUNDS, metavar="N", help="that are timed (%(default)s)")
    add("--directory", type=Path, metavar="DIR", help="on the disk to measure (default: temporary)")
    formats.add_arguments(parser)


def run(arguments: Any) -> dict[str, Any]:
    if arguments.parameters < 1 or arguments.rounds < 1:
        raise UsageError("--parameters and --rounds must be positive")
    if arguments.formats is not None:
        return formats.run(arguments)
    on = f"{output.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(on, flush=True)
    with output.place(arguments.directory) as place:
        bench = Bench(Path(place), arguments.parameters)
        bench.round()
        bench.rounds = Rounds()  # the first one was a warm-up
        for _ in range(arguments.rounds):
            bench.round()
    result = {"machine": on, **bench.result()}
    goal = output.goal(result["ways"]["async"]["stall_over_copy"], at_most=STALL_GOAL)
    result["goals"] = {"async_stall": goal}
    show(text(result, arguments.rounds))
    return result
