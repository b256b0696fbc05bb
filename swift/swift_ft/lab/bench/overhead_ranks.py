"""Processes of `swift-ft bench overhead`: the trainer, and a load that is unrelated to it.

    overhead_ranks trainer CONFIG     answers {"do": "run", "steps", "logged"}, {"do": "clear"}
    overhead_ranks load CONFIG        answers {"do": "go", "record_bytes", "rate"}, {"do": "stop"}, {"do": "clear"}

CONFIG, commands and answers are JSON, one line each. The first line that a process prints describes it.
Both write to the log through `Writing`, the only place of this benchmark that uses the session's interfaces.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from swift_ft.log.record import RecordKey
from swift_ft.log.sidecar_client import open_writer
from swift_ft.train.boundary_log import capture_for

GENERATION, TIMEOUT_S = 1, 120.0
TRAINER_JOB, LOAD_JOB = "trainer", "load"
MICROBATCHES = 4
RECORDS = 2 * MICROBATCHES
"""Boundary tensors per step: an activation and a gradient for every microbatch."""
# kind -> (width of a layer, rows of a microbatch)
SHAPES = {"small": (32, 16), "large": (1024, 128)}


class Writing:
    """A writer of the log, opened as a session opens it, with the channel's capture of sent tensors."""

    def __init__(self, address: str, job: str):
        self.writer = open_writer([address], job, GENERATION, name=job)
        self._capture = capture_for(self.writer, torch.get_default_device())
        self.writer.await_ready()

    def log(self, stream: str, key: RecordKey, tensor: Tensor) -> None:
        """Logs one tensor. A writer with a ring references its memory until the bytes are copied."""
        self._capture.record(stream, key, tensor, now=False, keep=False)

    def cpu_s(self) -> float:
        """Returns the sidecar's CPU seconds so far, by its process's CPU clock (see clock_getcpuclockid(3))."""
        pid = self.writer.pid
        return 0.0 if pid is None else time.clock_gettime((~pid << 3) | 2)

    def before_optimizer(self) -> None:
        """Waits for the copies, as the engine does before the optimizer."""
        self._capture.wait_copied()


# --- loggers that take a step's boundary tensors ---


class Logger(Protocol):
    """A way to log boundary tensors, chosen for one trainer."""

    def log(self, step: int, number: int, tensor: Tensor) -> None:
        """(trainer's thread) Logs one boundary tensor."""

    def before_optimizer(self) -> None:
        """Runs right before the optimizer's step."""

    def cpu_s(self) -> float:
        """Returns the CPU seconds used in other processes."""

    def drain(self) -> None:
        """Waits until everything is durable."""

    def clear(self) -> None:
        """Restarts the writer after the log has been emptied."""


class ToLog:
    """Logs as the session's channel does."""

    def __init__(self, config: dict[str, Any]):
        self._writing = Writing(config["address"], TRAINER_JOB)

    def log(self, step: int, number: int, tensor: Tensor) -> None:
        stream = "s1.B" if number % 2 else "s0.F"
        self._writing.log(stream, RecordKey(step, number // 2, 0), tensor)

    def before_optimizer(self) -> None:
        self._writing.before_optimizer()

    def cpu_s(self) -> float:
        return self._writing.cpu_s()

    def drain(self) -> None:
        self._writing.writer.flush(TIMEOUT_S)

    def clear(self) -> None:
        self._writing.writer.restart(GENERATION)


class Nothing:
    """A control: a logger without cost."""

    def __init__(self, config: dict[str, Any]):
        pass

    def log(self, step: int, number: int, tensor: Tensor) -> None:
        pass

    def before_optimizer(self) -> None:
        pass

    def cpu_s(self) -> float:
        return 0.0

    def drain(self) -> None:
        pass

    def clear(self) -> None:
        pass


class Burn(Nothing):
    """A control: a logger that computes in the trainer's thread for a share of a step."""

    def __init__(self, config: dict[str, Any]):
        self._seconds = config["burned_share"] * config["step_s"] / RECORDS

    def log(self, step: int, number: int, tensor: Tensor) -> None:
        until = time.thread_time() + self._seconds
        while time.thread_time() < until:
            pass


LOGGERS: dict[str, type[ToLog | Nothing | Burn]] = {"log": ToLog, "nothing": Nothing, "burn": Burn}


# --- the trainer ---


class Training:
    """A model deep enough that a step takes `step_s` seconds, its training steps, and their boundary tensors."""

    def __init__(self, kind: str, dtype: torch.dtype, step_s: float, rate: float):
        self._width, rows = SHAPES[kind]
        self._dtype = dtype
        torch.manual_seed(0)
        self._inputs = torch.randn(rows, self._width).to(dtype)
        self.layers = 4
        self._build(0)
        for _ in range(3):  # the time of a step is not quite linear in its layers
            self._build(max(1, round(self.layers * step_s / self._time())))
        for _ in range(2):  # the creation of the boundary tensors is part of a step
            self.step_s = self._time()
            self.record_bytes = max(64, int(rate * self.step_s / RECORDS) // 64 * 64)
            self._source = torch.randn(self.record_bytes // dtype.itemsize).to(dtype)

    def _build(self, layers: int) -> None:
        self.layers = layers or self.layers
        made: list[nn.Module] = []
        for _ in range(self.layers):
            made += [nn.Linear(self._width, self._width), nn.ReLU()]
        self._model = nn.Sequential(*made).to(self._dtype)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-4)
        self._source = torch.zeros(32, dtype=self._dtype)

    def _time(self) -> float:
        """Returns the median of seven steps without logging."""
        self.step(0, None)
        times = []
        for _ in range(7):
            began = time.perf_counter()
            self.step(0, None)
            times.append(time.perf_counter() - began)
        return sorted(times)[3]

    def step(self, number: int, logger: Logger | None) -> None:
        """Runs one step. The work with and without a logger differs only in the calls of the logger."""
        self._optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            output = self._model(self._inputs)
            activation = self._source + output.detach()[0, 0]
            if logger is not None:
                logger.log(number, 2 * microbatch, activation)
            torch.autograd.backward(output.float().square().mean())
            gradient = self._source - output.detach()[0, 0]
            if logger is not None:
                logger.log(number, 2 * microbatch + 1, gradient)
        if logger is not None:
            logger.before_optimizer()
        self._optimizer.step()


def train(config: dict[str, Any]) -> None:
    """Runs the trainer's process: does the steps of each command on stdin and prints their times."""
    torch.set_num_threads(1)
    logger = LOGGERS[config["logger"]](config)
    # From here on, for this thread only: threads that the logger has started keep their affinity.
    os.sched_setaffinity(0, {config["core"]})
    training = Training(config["kind"], getattr(torch, config["dtype"]), config["step_s"], config["rate"])
    say(step_s=training.step_s, layers=training.layers, record_bytes=training.record_bytes)
    number = 0
    for command in commands():
        if command["do"] == "end":
            return
        if command["do"] == "clear":
            logger.clear()
            say(cleared=True)
            continue
        chosen: Logger | None = logger if command["logged"] else None
        cpu, began = time.process_time() + logger.cpu_s(), time.perf_counter()
        for _ in range(command["steps"]):
            training.step(number, chosen)
            number += 1
        seconds = time.perf_counter() - began
        if chosen is not None:
            chosen.drain()
        drained = time.perf_counter() - began - seconds
        cpu = (
            time.process_time() + logger.cpu_s() - cpu
        )  # what a writer does after the step is its work as well
        say(step_s=seconds / command["steps"], cpu_s=cpu / command["steps"], drain_s=drained)


# --- the unrelated load ---


def load(config: dict[str, Any]) -> None:
    """Copies and logs as many bytes per second as the trainer would log."""
    writing = Writing(config["address"], LOAD_JOB)
    arrived: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for command in commands():
            arrived.put(command)

    threading.Thread(target=listen, daemon=True).start()
    say(ready=True)
    step = 0
    while (command := arrived.get())["do"] != "end":
        if command["do"] == "clear":
            writing.writer.restart(GENERATION)
            say(cleared=True)
            continue
        size, rate = int(command["record_bytes"]), float(command["rate"])
        source = torch.randint(0, 256, (size,), dtype=torch.uint8)
        say(going=True)
        began, sent = time.monotonic(), 0
        while arrived.empty():
            late = time.monotonic() - (began + sent * size / rate)
            if late < 0:
                time.sleep(min(-late, 0.01))
                continue
            writing.log("load", RecordKey(step, 0, 0), source)
            step, sent = step + 1, sent + 1
        seconds = time.monotonic() - began
        assert arrived.get()["do"] == "stop"
        writing.writer.flush(TIMEOUT_S)
        say(rate=sent * size / seconds)


def commands() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)
    yield {"do": "end"}


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    {"trainer": train, "load": load}[sys.argv[1]](json.loads(sys.argv[2]))
