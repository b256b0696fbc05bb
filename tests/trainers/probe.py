"""What trainers of this folder have in common, and what each says of itself: its losses, and all it has in the end.

Nothing of `swift` is used here, and nothing is told to it (but for a number of replicas, if the harness wants them).
A trainer has what is special about it as its author would write it; ``net``, ``update`` and ``usual_step`` (a whole
model), ``pipeline``, ``through`` and ``usual_pass`` (stages) are the rest of it. ``batch(step, dp_rank)`` is its data.
``note(step, loss)`` stands last in its step; the harness may kill the rank there, or some time after it. ``run``
does all steps, and then ``end(session, name=thing, ...)``.
"""

import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B

ENV_DIRECTORY = "TRAINERS_DIRECTORY"
ENV_KILLS = "TRAINERS_KILLS"
"""JSON: a list of ``{"id", "rank", "step", "after", "again"}``; `after`: steps (of the time that one took),
0: at once; `again`: only where the rank has noted the step before."""
ENV_STEPS = "TRAINERS_STEPS"
ENV_SLOW = "TRAINERS_SLOW"
ENV_REHEARSED = "TRAINERS_REHEARSED"
"""The last step before each checkpoint waits until the ones before it were rehearsed, on all ranks."""
ENV_DEVICE = "TRAINERS_DEVICE"
"""Set: "simulated" (`tests/device`), for trainers that compute where `device` says; "simulated-nccl": there, with
communicators."""
ENV_REPLICAS = "TRAINERS_REPLICAS"
"""So many, also of a trainer whose session has one."""
_DEPTH_MAX = 12
_CHECKPOINT_EVERY = 5
_REHEARSED_WITHIN_S = 60.0
_CALM_S = 0.04
"""After each step of a run with kills. A step takes a millisecond here: without a pause no checkpoint is complete
before the next kill, and every replacement begins at step 0, with whatever its script makes there."""

_where = os.environ.get(ENV_DEVICE)
if _where:
    from tests.device import simulated

    if _where == simulated.OVER_NCCL:
        simulated.load_with_communicators(Path(os.environ[ENV_DIRECTORY]))
    simulated.load()

_kills = json.loads(os.environ.get(ENV_KILLS) or "[]")
# The harness's own, not a variable of the trainer's: nothing in a step depends on it, and a logger observes.
_clock: Any = logging.getLogger("probe")
_clock.noted, _clock.step_s = time.monotonic(), 0.01


if os.environ.get(ENV_REPLICAS):
    from swift_ft import Session

    _from_env = Session.from_env.__func__  # type: ignore[attr-defined]

    def _with_replicas(cls: Any, **settings: Any) -> Any:
        return _from_env(cls, **{"replicas": int(os.environ[ENV_REPLICAS]), **settings})

    Session.from_env = classmethod(_with_replicas)  # type: ignore[assignment,method-assign]


def steps() -> int:
    """How many the harness wants."""
    return int(os.environ.get(ENV_STEPS, "12"))


def is_protected() -> bool:
    """Whether the trainer runs under a session; else torchrun has started it."""
    return "SWIFT_COORDINATOR" in os.environ


def replicas() -> int:
    """Of a trainer without a pipeline: as many as there are ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def device() -> str:
    """Where the trainer computes."""
    return simulated.NAME if _where else "cpu"


def batch(step: int, dp_rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """The same whenever it is asked for: another one for each step and replica."""
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(1000 * step + dp_rank)).to(device())
    return x, x.sum(1, keepdim=True)


def net() -> nn.Sequential:
    """The model of most trainers that have no pipeline."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device())


def backward(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """A batch, its loss, which is returned, and the gradients of that."""
    x, y = batch(step, session.dp_rank)
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    return loss


def update(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """A batch, its loss, which is returned, and an update by it."""
    loss = backward(session, model, optimizer, step)
    optimizer.step()
    return loss


def descend(step: int, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """An update by this loss, and a note of it."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    note(step, loss)


def usual_step(session: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """A train_step in which nothing else happens."""
    return lambda step: note(step, update(session, model, optimizer, step))


def pipeline(session: Any, make: Callable[[], nn.Module] | None = None) -> tuple[Any, Schedule1F1B, Any]:
    """This rank's module (by `make`), a schedule of four microbatches, registered, and the module's optimizer."""
    torch.manual_seed(session.pipeline_rank)
    module = make() if make else nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module = module.to(device())
    stage = session.pipeline_stage(module, session.pipeline_rank, session.pipeline_ranks, device())
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)
    return module, schedule, optimizer


def through(session: Any, call: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """A batch's way through the stages. `call`: a schedule's step or eval. Returns the losses, on the last rank."""
    losses: list[torch.Tensor] = []
    if session.pipeline_rank == 0:
        call(x)
    elif session.pipeline_rank == session.pipeline_ranks - 1:
        call(target=x.roll(1, 1), losses=losses)
    else:
        call()
    return losses


def usual_pass(session: Any, schedule: Any, optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    """A train_step of a pipeline in which nothing else happens."""

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        losses = through(session, schedule.step, batch(step, session.dp_rank)[0])
        optimizer.step()
        note(step, losses)

    return train_step


def run(session: Any, train_step: Callable[[int], object], **things: Any) -> None:
    """All steps, and the end."""
    session.run(train_step, num_steps=steps())
    end(session, **things)


def logged(session: Any) -> list[dict[str, Any]]:
    """The lines of `session.log`, of this rank."""
    folder = Path(os.environ["SWIFT_CHECKPOINT_DIR"], os.environ["SWIFT_JOB"], "metrics")
    return [json.loads(line) for line in (folder / f"rank{session.rank}.jsonl").read_text().splitlines()]


def note(step: int, *values: Any) -> None:
    """One line, by the bits of every value: a step that is done again must say the same."""
    rank = os.environ["RANK"]
    if os.environ.get(ENV_SLOW):
        time.sleep(_CALM_S)
    if os.environ.get(ENV_REHEARSED) and step % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
        _await_rehearsals(step - _CHECKPOINT_EVERY + 1)
    now = time.monotonic()
    _clock.step_s, _clock.noted = now - _clock.noted, now
    _perhaps_die(int(rank), step)
    text = " ".join(digest(value)[:16] for value in values)
    with (Path(os.environ[ENV_DIRECTORY]) / f"rank{rank}.losses").open("a") as file:
        file.write(f"{step} {text}\n")
    _note_time(step)


def _note_time(step: int) -> None:
    """-1: the process begins."""
    with (Path(os.environ[ENV_DIRECTORY]) / f"rank{os.environ['RANK']}.times").open("a") as file:
        file.write(f"{step} {os.getpid()} {time.time()}\n")


if ENV_DIRECTORY in os.environ and "RANK" in os.environ:
    _note_time(-1)


def _await_rehearsals(version: int) -> None:
    """Of all ranks from the checkpoint of that version. A step takes a millisecond here, a rehearsal a second."""
    until = time.monotonic() + _REHEARSED_WITHIN_S
    while time.monotonic() < until:
        done = set()
        for path in Path(os.environ["SWIFT_EVENTS"]).glob("launcher-*.jsonl"):
            for line in path.read_text().splitlines(keepends=True):
                if (
                    '"rehearsal_end"' in line
                    and line.endswith("\n")
                    and json.loads(line)["version"] == version
                ):
                    done.add(json.loads(line)["rank"])
        if len(done) == int(os.environ["WORLD_SIZE"]):
            return
        time.sleep(0.05)


def _perhaps_die(rank: int, step: int) -> None:
    for kill in _kills:
        if (kill["rank"], kill["step"]) != (rank, step) or (kill["again"] and not _noted_before(rank, step)):
            continue
        try:
            mark = os.open(
                Path(os.environ[ENV_DIRECTORY]) / f"{kill['id']}.fired", os.O_CREAT | os.O_EXCL | os.O_WRONLY
            )
        except FileExistsError:
            continue
        os.close(mark)
        if kill["after"] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        # No thread that waits for the interpreter: the kernel ends the process wherever it is by then.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, max(1e-5, kill["after"] * _clock.step_s))


def _noted_before(rank: int, step: int) -> bool:
    path = Path(os.environ[ENV_DIRECTORY]) / f"rank{rank}.losses"
    return path.exists() and any(line.startswith(f"{step} ") for line in path.read_text().splitlines())


def end(session: Any, **things: Any) -> None:
    """Writes a digest of each of them. `session`: None without one."""
    rank = os.environ["RANK"]
    path = Path(os.environ[ENV_DIRECTORY]) / f"rank{rank}.end"
    about = {
        "place": [session.pipeline_rank, session.dp_rank] if session else [int(rank), 0],
        "alike": sorted(name for name, thing in things.items() if isinstance(thing, nn.Module)),
        "digests": {name: digest(thing) for name, thing in things.items()},
    }
    path.with_suffix(".part").write_text(json.dumps(about))
    path.with_suffix(".part").rename(path)


def digest(thing: Any) -> str:
    found = hashlib.sha256()
    _feed(found, thing, 0)
    return found.hexdigest()


def _feed(found: Any, thing: Any, depth: int) -> None:
    assert depth < _DEPTH_MAX, f"too deep: {type(thing).__name__}"
    found.update(type(thing).__name__.encode())
    if isinstance(thing, torch.Tensor):
        values = thing.detach()
        values = values.full_tensor() if hasattr(values, "full_tensor") else values
        found.update(f"{values.dtype}{tuple(values.shape)}".encode())
        found.update(values.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(thing, numpy.ndarray):
        found.update(f"{thing.dtype}{thing.shape}".encode() + thing.tobytes())
    elif isinstance(thing, nn.Module):
        _feed_module(found, thing, depth)
    elif isinstance(thing, Mapping):
        for key in thing:
            found.update(str(key).encode())
            _feed(found, thing[key], depth + 1)
    elif isinstance(thing, (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size)):
        found.update(repr(thing).encode())
    elif hasattr(thing, "state_dict"):
        _feed(found, thing.state_dict(), depth + 1)
    elif is_dataclass(thing):
        _feed(found, {field.name: getattr(thing, field.name) for field in fields(thing)}, depth + 1)
    elif isinstance(thing, Iterable):
        for each in thing:
            _feed(found, each, depth + 1)
    else:
        raise TypeError(f"no digest of a {type(thing).__name__}")


def _feed_module(found: Any, module: nn.Module, depth: int) -> None:
    """Parameters, all buffers, and what its author has kept in plain attributes."""
    for name, each in module.named_modules():
        found.update(name.encode())
        for tensors in (each._parameters, each._buffers):
            _feed(found, {n: t for n, t in tensors.items() if t is not None}, depth + 1)
        plain = {n: v for n, v in vars(each).items() if not n.startswith("_") and _is_plain(v)}
        _feed(found, plain, depth + 1)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(
        value, (bool, int, float, str, torch.Tensor, numpy.ndarray, type(None))
    ) or is_dataclass(value)
