"""Ranks of `swift-ft bench overhead`: one training loop, run in plain torch or under a session.

    python -m swift_ft.lab.bench.overhead_ranks CONFIG      CONFIG is JSON
Without swift's launcher (no SWIFT_JOB), it is the loop of a user without swift. Model, data, schedule, optimizer,
clipping and scheduler are the same. Both stop every `slice_steps` steps, report the slice's seconds to the benchmark
over a socket, and wait for a line to continue.
"""

import json
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import swift_ft
from swift_ft.lab.bench.overhead import LATE
from swift_ft.lab.drill.model import ByteLoader, loss_fn, make_stage, standard_library
from swift_ft.lab.drill.topology import ModelConfig
from swift_ft.lab.drill.trainer import make_scheduler
from swift_ft.train.boundary_log import DeviceCapture, HostCapture

SEED = 0
MAX_NORM = 1.0
ANSWER_S = 300.0
FLUSH_S = 60.0


class Slices:
    """A rank's connection to the benchmark."""

    def __init__(
        self, path: str, steps: int, drain: Callable[[], None], watch: "Watch | RecordTimes", **about: Any
    ) -> None:
        self._steps, self._drain, self._watch, self._about = steps, drain, watch, about
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_S)
            line.connect(path)
            self._line = line.makefile("rw")
        self._began = 0.0

    def before(self, step: int) -> None:
        """Runs before each step. At the end of a slice it reports the seconds and waits for the next one."""
        if step % self._steps:
            return
        seconds = time.perf_counter() - self._began
        self._drain()
        seen = self._watch.seen()
        answer = {"seconds": seconds, **seen} if step else {"pid": os.getpid(), **self._about}
        self._line.write(json.dumps(answer) + "\n")
        self._line.flush()
        if not (line := self._line.readline()):
            os._exit(0)
        self._watch.begin(late=line.strip() == LATE)
        self._began = time.perf_counter()


class RecordTimes:
    """Measures what each record takes of the trainer's thread."""

    def __init__(self) -> None:
        self._records_s: list[float] = []
        record = HostCapture.record

        def recorded(capture: HostCapture, *args: Any, **options: Any) -> None:
            began = time.perf_counter()
            record(capture, *args, **options)
            self._records_s.append(time.perf_counter() - began)

        patched: Any = HostCapture
        patched.record = recorded

    def begin(self, *, late: bool) -> None:
        assert not late

    def seen(self) -> dict[str, Any]:
        """Returns what was seen since the last call."""
        seen, self._records_s = self._records_s, []
        return {"records_s": seen}


LATE_CYCLES = 8_000_000
"""For about so many nanoseconds the device's copies of records are late, if they are to be."""


class Watch:
    """Sees what recording does on a device: host waits, host time of each record, and for how long the training stream
    stands still for a copy. Late copies are those of a slow copy engine.

    CUDA tells of torch's own waits alone."""

    def __init__(self, kind: str) -> None:
        self._module: Any = torch.get_device_module(kind)
        self._late = False
        self._waits = 0
        self._records_s: list[float] = []
        self._held: list[tuple[torch.Event, torch.Event]] = []
        self._copies: list[tuple[torch.Event, torch.Event]] = []
        warnings.filterwarnings("always", "called a synchronizing")
        warnings.showwarning = self._note
        record, wait_copied = DeviceCapture.record, DeviceCapture.wait_copied

        def recorded(capture: DeviceCapture, *args: Any, **options: Any) -> None:
            before, side = self._mark(), capture._side
            with side:
                begun = self._mark()
                if self._late:
                    self._module._sleep(LATE_CYCLES)
            began = time.perf_counter()
            record(capture, *args, **options)
            self._records_s.append(time.perf_counter() - began)
            with side:
                self._copies.append((begun, self._mark()))
            self._held.append((before, self._mark()))

        def waited(capture: DeviceCapture) -> None:
            before = self._mark()
            wait_copied(capture)
            self._held.append((before, self._mark()))

        patched: Any = DeviceCapture
        patched.record, patched.wait_copied = recorded, waited

    def _note(self, message: Warning | str, *_: Any, **__: Any) -> None:
        self._waits += "called a synchronizing" in str(message)

    def _mark(self) -> torch.Event:
        event = torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True)
        event.record(torch.accelerator.current_stream())
        return event

    def begin(self, *, late: bool) -> None:
        self._late, self._waits = late, 0
        self._module.set_sync_debug_mode("warn")

    def seen(self) -> dict[str, Any]:
        """Returns what was seen since `begin`."""
        self._module.set_sync_debug_mode("default")
        torch.accelerator.synchronize()
        found = {
            "waits": self._waits,
            "records_s": self._records_s,
            "copies_s": [first.elapsed_time(last) / 1e3 for first, last in self._copies],
            "held_s": sum(first.elapsed_time(last) for first, last in self._held) / 1e3,
        }
        self._records_s, self._copies, self._held = [], [], []
        return found


class Plain:
    """The loop in plain torch, with what `train` uses of a session."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.rank = int(os.environ["RANK"])
        store = FileStore(config["store"], config["stages"])
        backend = dist.get_default_backend_for_device("cpu")
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=config["stages"])

    def pipeline_stage(self, module: torch.nn.Module, index: int, count: int, device: str) -> Any:
        return pipelining.PipelineStage(module, index, count, torch.device(device))

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def register(self, **things: Any) -> None:
        pass

    def clip_grad_norm_(self, parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
        """Clips by the norm over all stages, as a pipeline without swift does it."""
        own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = own.square()
        dist.all_reduce(whole)
        norm = whole.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def run(self, train_step: Callable[[int], None], num_steps: int) -> None:
        for step in range(num_steps):
            train_step(step)


def train(config: dict[str, Any]) -> None:
    """Runs the training loop of one rank: under a session if swift's launcher has started it, else in plain torch."""
    torch.set_num_threads(1)
    model, stages, microbatches = ModelConfig(**config["model"]), config["stages"], config["microbatches"]
    loop: Any
    device = config.get("device", "cpu")
    watch: Watch | RecordTimes = RecordTimes()
    if device != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
        torch.use_deterministic_algorithms(torch.device(device).type == "cuda")
        watch = Watch(device)
    if "SWIFT_JOB" in os.environ:
        # A checkpoint is never due: users without swift save checkpoints, too, so their cost is not compared.
        loop = swift_ft.Session.from_env(
            seed=SEED,
            checkpoint_every=config["steps"] + 1,
            last_checkpoint=False,
            groups=config.get("groups", ""),
        )
        writer = loop._engine.log.writer
        # Until the ring's records are durable, so that a slice leaves no work to the next one.
        about = {"drain": lambda: writer.flush(FLUSH_S), "sidecar": writer.pid}
    else:
        loop, about = Plain(config), {"drain": lambda: None}
    slices = Slices(config["socket"], config["slice_steps"], watch=watch, **about)
    module = make_stage(model, loop.rank, stages, SEED).to(device)
    parameters = list(module.parameters())
    stage = loop.pipeline_stage(module, loop.rank, stages, device)
    schedule = schedules.Schedule1F1B(stage, microbatches, loss_fn=loss_fn)
    optimizer = loop.optimizer(torch.optim.AdamW(parameters))
    scheduler = make_scheduler(optimizer, config["steps"])
    loader = ByteLoader(standard_library(), microbatches * model.microbatch, model.sequence, SEED)
    loop.register(schedule=schedule, scheduler=scheduler, loader=loader)
    first, last = loop.rank == 0, loop.rank == stages - 1

    def train_step(step: int) -> None:
        slices.before(step)
        inputs, targets = (part.to(device) for part in next(loader))
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), **given, return_outputs=False)
        loop.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        scheduler.step()

    loop.run(train_step, config["steps"])


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
