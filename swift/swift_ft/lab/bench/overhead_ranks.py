"""Ranks of `swift-ft bench overhead`: one training loop, run in plain torch or under a session.

    python -m swift_ft.lab.bench.overhead_ranks CONFIG      CONFIG is JSON
Without swift's launcher (no SWIFT_JOB), it is the loop of a user without swift. Model, data, schedule, optimizer,
clipping and scheduler are the same. Both stop every `slice_steps` steps, report the slice's measurements to the
benchmark over a socket, and wait for the command to continue.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

import swift_ft
from swift_ft import torch_private
from swift_ft.lab.bench.cpu_attribution import Meter, Threads
from swift_ft.lab.drill.model import ByteLoader, loss_fn, make_stage, standard_library
from swift_ft.lab.drill.topology import ModelConfig
from swift_ft.lab.drill.trainer import make_scheduler
from swift_ft.state.rng import Randomness
from swift_ft.train.boundary_log import Channel
from swift_ft.train.recording import Recording, ThoroughWatch
from swift_ft.train.stage import LoggedPipelineStage
from swift_ft.train.step import StepRunner
from swift_ft.train.step_digests import Witness
from swift_ft.train.training_state import TrainerState
from swift_ft.train.updates import Updates

SEED = 0
MAX_NORM = 1.0
ANSWER_S = 300.0
FLUSH_S = 60.0
BURNED_S = 0.01

# Parts that the plain loop has as well.
TRAINER, SCHEDULE, COMPUTE, NORM, OPTIMIZER = (
    "the trainer's own lines",
    "torch's schedule and messages",
    "forward and backward",
    "norm of the gradients",
    "optimizer",
)
RECORDED = "steps recorded for rehearsals"
CHECKPOINT_EVERY = 50
"""Interval of the checkpoints that rehearsals are tied to. With ``rehearse="always"`` one rank records steps for a
rehearsal at each checkpoint, and the ranks take turns."""
# Methods by part: a session's extra work in the trainer's thread. (There is no vote without replicas.)
PARTS: tuple[tuple[str, Any, str], ...] = (
    ("records into the ring", Channel, "_record wait_copied"),
    ("digests of what enters and of losses", Witness, "saw begin forget_below"),
    ("randomness by counter", Randomness, "_set"),
    ("state kept for a step that is dropped", TrainerState, "begin_step end_step"),
    (RECORDED, Recording, "begin_step step_begun end_step"),
    (RECORDED, ThoroughWatch, "gradients _passes"),
    ("loop of the session", StepRunner, "run"),
    (
        "stages that are logged",
        LoggedPipelineStage,
        "forward_one_chunk backward_one_chunk get_fwd_send_ops get_bwd_send_ops",
    ),
    (OPTIMIZER, Updates, "_step"),
    (NORM, swift_ft.Session, "clip_grad_norm_"),
)
THREADS = {
    "swift-": "runner of collectives (the norm)",
    "view-watcher": "watcher of the coordinator, lease, sidecar's line",
    "log-sidecar": "watcher of the coordinator, lease, sidecar's line",
}


class Slices:
    """A rank's connection to the benchmark.

    (every step) ``before(step)``: at the end of a slice reports its measurements, and waits for the next slice
    """

    def __init__(self, path: str, steps: int, meter: Meter, loop: "Plain | UnderSession"):
        self._steps = steps
        self._meter = meter
        self._loop = loop
        self._threads = Threads(THREADS)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(ANSWER_S)
        self._line.connect(path)
        self._heard = self._line.makefile("r")
        self._began = self._main = 0.0
        self._metered = False

    def before(self, step: int) -> None:
        """Runs before each step. At the end of a slice it reports the measurements and waits for the next command."""
        if step % self._steps:
            return
        if step == 0:
            self._say(pid=os.getpid(), reading_s=Meter.cost_s(), **self._loop.about())
        else:
            now, main_s = time.perf_counter(), time.thread_time() - self._main
            parts = self._meter.taken() if self._metered else {}
            self._loop.drain()
            self._say(
                seconds=now - self._began,
                drained_s=time.perf_counter() - now,
                main_s=main_s,
                parts=parts,
                threads=self._threads.taken(),
            )
        command = json.loads(self._heard.readline() or '{"do": "end"}')
        if command["do"] == "end":
            os._exit(0)
        self._metered = bool(command["metered"])
        self._threads.taken()
        self._began, self._main = time.perf_counter(), time.thread_time()
        if self._metered:
            self._meter.go()

    def _say(self, **words: Any) -> None:
        self._line.sendall(json.dumps(words).encode() + b"\n")


class Plain:
    """The loop in plain torch, with the interface that `train` uses."""

    def __init__(self, config: dict[str, Any], meter: Meter):
        meter.wrap(torch.optim.AdamW, "step", OPTIMIZER)
        self.clip_grad_norm_: Callable[..., Any] = meter.wrapped(clip_grad_norm, NORM)
        self.rank = int(os.environ["RANK"])
        store = FileStore(config["store"], config["stages"])
        backend = dist.get_default_backend_for_device("cpu")
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=config["stages"])

    def pipeline_stage(self, module: torch.nn.Module, index: int, count: int) -> Any:
        return pipelining.PipelineStage(module, index, count, next(module.parameters()).device)

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def register(self, **things: Any) -> None:
        pass

    def about(self) -> dict[str, Any]:
        return {}

    def drain(self) -> None:
        pass

    def run(self, train_step: Callable[[int], None], num_steps: int) -> None:
        for step in range(num_steps):
            train_step(step)


class UnderSession:
    """The loop under a session, with the same interface as `Plain`."""

    def __init__(self, config: dict[str, Any], meter: Meter):
        for part, owner, methods in PARTS:
            if part == config["burned"]:
                _slow_down(owner, methods)
            meter.wrap(owner, methods, part)
        # A checkpoint is never due: users without swift save checkpoints, too, so their cost is not compared.
        self._session = session = swift_ft.Session.from_env(
            seed=SEED, checkpoint_every=config["steps"] + 1, last_checkpoint=False
        )
        self.rank = session.rank
        self.pipeline_stage, self.optimizer = session.pipeline_stage, session.optimizer
        self.clip_grad_norm_ = session.clip_grad_norm_
        self.register = session.register

    def run(self, train_step: Callable[[int], None], num_steps: int) -> None:
        """Records steps as with ``rehearse="always"``, but rehearses none."""
        recording, ranks = self._session._engine._recording, self._session.world_size

        def step(number: int) -> None:
            train_step(number)
            version = number + 1
            if version % CHECKPOINT_EVERY == 0 and version // CHECKPOINT_EVERY % ranks == self.rank:
                recording._from = version

        self._session.run(step, num_steps)

    def about(self) -> dict[str, Any]:
        """Returns the pid of this rank's sidecar, or None."""
        return {"sidecar": self._session._engine.log.writer.pid}

    def drain(self) -> None:
        """Waits until the ring's records are durable, so that a slice leaves no work to the next one."""
        self._session._engine.log.writer.flush(FLUSH_S)


def train(config: dict[str, Any], kind: type[Plain] | type[UnderSession]) -> None:
    """Runs the training loop of one rank, of `kind`: plain torch, or under a session."""
    torch.set_num_threads(1)
    model, stages, microbatches = ModelConfig(**config["model"]), config["stages"], config["microbatches"]
    meter = Meter()
    meter.wrap(torch_private.StageBase, "forward_one_chunk backward_one_chunk", COMPUTE)
    loop = kind(config, meter)
    module = make_stage(model, loop.rank, stages, SEED)
    parameters = list(module.parameters())
    stage = loop.pipeline_stage(module, loop.rank, stages)
    schedule = schedules.Schedule1F1B(stage, microbatches, loss_fn=loss_fn)
    optimizer = loop.optimizer(torch.optim.AdamW(parameters))
    scheduler = make_scheduler(optimizer, config["steps"])
    loader = ByteLoader(standard_library(), microbatches * model.microbatch, model.sequence, SEED)
    loop.register(schedule=schedule, scheduler=scheduler, loader=loader)
    first, last = loop.rank == 0, loop.rank == stages - 1
    slices = Slices(config["socket"], config["slice_steps"], meter, loop)
    schedule.step = meter.wrapped(schedule.step, SCHEDULE)  # type: ignore[method-assign]

    def train_step(step: int) -> None:
        slices.before(step)
        inputs, targets = next(loader)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        given: dict[str, Any] = {"target": targets, "losses": losses} if last else {}
        schedule.step(*([inputs] if first else []), **given, return_outputs=False)
        loop.clip_grad_norm_(parameters, MAX_NORM)
        optimizer.step()
        scheduler.step()

    loop.run(meter.wrapped(train_step, TRAINER), config["steps"])


def _slow_down(owner: Any, methods: str) -> None:
    """(a control of this benchmark) Makes each of the methods compute for `BURNED_S` in addition."""
    for name in methods.split():
        original = getattr(owner, name)

        def burning(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            until = time.thread_time() + BURNED_S
            while time.thread_time() < until:
                pass
            return original(*args, **kwargs)

        setattr(owner, name, burning)


def clip_grad_norm(parameters: list[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Clips by the norm over all stages, as a pipeline without swift does it."""
    own = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole = own.square()
    dist.all_reduce(whole)
    norm = whole.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), UnderSession if "SWIFT_JOB" in os.environ else Plain)
    sys.stdout.flush()
    os._exit(0)
