"""`swift-ft bench checkpoint`: cost of a save for training, in both modes and with torch's DCP, all in one run.

One process trains a model with AdamW. Each round runs every way of saving in turn: a save begins, and steps run until
it is durable. So a busy machine slows all of them. Figures are medians over rounds.

stall      how long `save` blocks training
durable    from its call until the files are synced
cost       the stall, and the extra time of the steps during the save over steps without a save
limits     the same bytes copied in memory; the same bytes written to one file and synced, without steps

``--formats`` measures the cost and the losses of each checkpoint format instead (`swift_ft.lab.bench.formats`).
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from swift_ft.cli_parser import Parser
from swift_ft.errors import ServiceError, UsageError
from swift_ft.lab.bench import output
from swift_ft.lab.bench.formats import command as formats
from swift_ft.state import MODES
from swift_ft.state.checkpoint_store import CheckpointStore
from swift_ft.state.export import Reading, alone
from swift_ft.state.tree import split
from swift_ft.text import show, table

WIDTH, BATCH = 512, 64
PARAMETERS, ROUNDS = 8_000_000, 7
STEPS_PLAIN = 5
"""Steps without a save in each round, as the baseline."""
STALL_GOAL = 3.0
"""Upper limit of the stall in mode "async" over a copy in memory."""
WAYS = (*MODES, "dcp", "dcp async")

State = dict[str, Any]
Over = Callable[[], None]


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
        """Runs a step and returns its seconds."""
        began = time.monotonic()
        self._optimizer.zero_grad()
        self._module(self._x).square().mean().backward()
        self._optimizer.step()
        return time.monotonic() - began

    def state(self) -> State:
        return {"module": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}

    def tensors(self) -> list[torch.Tensor]:
        return list(split(self.state())[0].values())


class Saves:
    """The ways to save, each in its own folder. ``begin`` returns when training may continue; ``end`` comes last."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._version = 0
        self._stores = {mode: CheckpointStore(place / mode, 0, Reading()) for mode in MODES}
        self._failed = ""

    def begin(self, way: str, state: State, over: Over) -> None:
        """Begins a save. `over` is called once it is durable or has failed. Raises ServiceError if "dcp" fails."""
        self._version += 1
        if way in MODES:
            self._begin_ours(way, state, over)
            return
        writer = FileSystemWriter(self._place / way / str(self._version), sync_files=True)
        if way == "dcp":
            try:
                save(state, storage_writer=writer, no_dist=True)
            except (OSError, CheckpointException) as error:
                raise ServiceError(f"torch cannot save in {self._place}: {error}") from error
            over()
        else:
            future: Any = async_save(state, storage_writer=writer, no_dist=True)
            future.add_done_callback(lambda done: self._over(str(done.exception() or ""), over))

    def _begin_ours(self, mode: str, state: State, over: Over) -> None:
        self._stores[mode].save(
            self._version,
            state,
            lambda _version: self._over("", over),
            lambda unsaved: self._over(unsaved.reason, over),
            sync=mode == "sync",
        )

    def _over(self, failed: str, over: Over) -> None:
        self._failed = failed
        over()

    def end(self, way: str) -> None:
        """Removes the saved files; swift's are loaded before. Raises ServiceError if the save failed."""
        if self._failed:
            if way in MODES:
                self._stores[way].close()  # without another attempt
            raise ServiceError(f"nothing can be saved in {self._place}: {self._failed}")
        if way in MODES:
            self._stores[way].wait()
            self._stores[way].load(self._version)
        shutil.rmtree(self._place / way)


class Bench:
    """Rounds with the same trainer."""

    def __init__(self, place: Path, elements: int) -> None:
        self.trainer = Trainer(elements)
        self._saves = Saves(place)
        self._place = place
        self.seconds: dict[str, list[float]] = {}
        """Seconds of each round by measurement, such as "async stall"."""

    def round(self) -> None:
        plain = statistics.median(self.trainer.step() for _ in range(STEPS_PLAIN))
        self._note("step", plain)
        self._limits()
        for way in WAYS:
            self._save(way, plain)

    def forget(self) -> None:
        """Discards the times of the warm-up round."""
        self.seconds.clear()

    def _save(self, way: str, plain: float) -> None:
        ended: list[float] = []
        began = time.monotonic()
        with alone():
            self._saves.begin(way, self.trainer.state(), lambda: ended.append(time.monotonic()))
            stall = time.monotonic() - began
            longer = 0.0
            while not ended:
                longer += self.trainer.step() - plain
        self._note(f"{way} stall", stall)
        self._note(f"{way} durable", ended[0] - began)
        self._note(f"{way} cost", stall + longer)
        self._saves.end(way)

    def _limits(self) -> None:
        tensors = self.trainer.tensors()
        began = time.monotonic()
        copies = [tensor.clone() for tensor in tensors]
        self._note("copy", time.monotonic() - began)
        path = self._place / "limit"
        began = time.monotonic()
        with path.open("wb", buffering=0) as file:
            for tensor in copies:
                left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
                while left:
                    left = left[file.write(left) :]
            os.fsync(file)
        self._note("write", time.monotonic() - began)
        path.unlink()

    def _note(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)

    def result(self) -> dict[str, Any]:
        """Returns medians in seconds, and their ratios, each the median of the rounds' ratios."""
        sizes = [tensor.nbytes for tensor in self.trainer.tensors()]
        return {
            "parameters": self.trainer.parameters,
            "state_bytes": sum(sizes),
            **{f"{name}_s": statistics.median(self.seconds[name]) for name in ("step", "copy", "write")},
            "ways": {
                way: {
                    **{
                        f"{what}_s": statistics.median(self.seconds[f"{way} {what}"])
                        for what in ("stall", "durable", "cost")
                    },
                    "stall_over_copy": self._ratio(f"{way} stall", "copy"),
                    "durable_over_write": self._ratio(f"{way} durable", "write"),
                    "cost_in_steps": self._ratio(f"{way} cost", "step"),
                }
                for way in WAYS
            },
        }

    def _ratio(self, one: str, other: str) -> float:
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return statistics.median(mine / base for mine, base in pairs)


def text(result: dict[str, Any], rounds: int) -> list[str]:
    """Formats the result: the limits, a line for each way, and the goal."""
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
    parser.add_argument("--parameters", type=int, metavar="N", help=f"elements of the model ({PARAMETERS:,})")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="that are timed (%(default)s)"
    )
    parser.add_argument(
        "--directory", type=Path, metavar="DIR", help="on the disk to measure (default: temporary)"
    )
    formats.add_arguments(parser)


def run(arguments: Any) -> dict[str, Any]:
    if any(number is not None and number < 1 for number in (arguments.parameters, arguments.rounds)):
        raise UsageError("--parameters and --rounds must be positive")
    if arguments.formats is not None:
        if arguments.parameters is not None:
            raise UsageError("--parameters is not for --formats; give --sizes")
        return formats.run(arguments)
    formats.check_unused(arguments)
    on = f"{output.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(on, flush=True)
    with output.place(arguments.directory) as place:
        bench = Bench(Path(place), arguments.parameters or PARAMETERS)
        for index in range(arguments.rounds + 1):
            if index == 1:
                bench.forget()
            bench.round()
    result = {"machine": on, **bench.result()}
    goal = output.goal(result["ways"]["async"]["stall_over_copy"], at_most=STALL_GOAL)
    result["goals"] = {"async_stall": goal}
    show(text(result, arguments.rounds))
    return result
