"""A small trainer to which things happen: `unlucky.py DIRECTORY STEPS MISHAPS [REPLICAS [EVERY [NON_FINITE_LOSS
[RATE]]]]`.

MISHAPS is a JSON list of {"rank", "step", "at", "what", "times", "behind"}: `what` happens at that place of that step,
so many times (default 1) in all processes of the rank together, and not before the mishap with the number `behind` of
the list has happened. Places: "step" (its begin), "backward", "made" (before `run`), "load", "loaded" (around a
checkpoint), "after" (behind `run`). With "reset" every connection to other ranks is broken, by a reset; with
"terminate" the launcher gets SIGTERM, the step goes on when a last checkpoint is agreed on, and the process stands
still once it is complete; with "nan" the data of the step are not numbers; "slow" takes a tenth of a second; "say"
prints a line. "raise when saved" and "die when told" wait until the checkpoint that was due last is complete; the
second one then makes "there<step>" and waits for "die<step>". "stop" ends the run, in replays as well; "die with the
word" kills the rank once it has said that it is at its end.
"""

import ctypes
import json
import math
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
from stages import compute
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft
from swift_ft._pb import coordinator_pb2 as pb
from swift_ft.state.checkpoint_store import CheckpointStore

DIRECTORY, STEPS = Path(sys.argv[1]), int(sys.argv[2])
MISHAPS: list[dict[str, Any]] = json.loads(sys.argv[3])
REPLICAS = int(sys.argv[4]) if sys.argv[4:] else 1
EVERY = int(sys.argv[5]) if sys.argv[5:] else 5
NON_FINITE_LOSS = sys.argv[6] if sys.argv[6:] else "warn"
RATE = float(sys.argv[7]) if sys.argv[7:] else 0.01
RANK = int(os.environ["RANK"])
WIDTH, BATCH = 16, 8
libc = ctypes.CDLL(None, use_errno=True)


def reset_connections() -> int:
    """Breaks the connections to other ranks as a network may: both sides get a reset. How many there were."""
    services = [os.environ["SWIFT_COORDINATOR"], f"x:{os.environ['MASTER_PORT']}", *swift_ports()]
    ports = {int(address.rpartition(":")[2]) for address in services}
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:["):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with own:
            try:
                if own.family not in (socket.AF_INET, socket.AF_INET6) or own.getpeername()[1] in ports:
                    continue
            except OSError:
                continue
            # Linux: to disconnect a connected socket is to reset the connection.
            libc.connect(own.fileno(), struct.pack("H14x", socket.AF_UNSPEC), 16)
            broken += 1
    return broken


def swift_ports() -> list[str]:
    return list(session._engine.log.servers_of_job) if "session" in globals() else []


def happen(at: str, step: int = -1) -> None:
    for number, mishap in enumerate(MISHAPS):
        if mishap["rank"] != RANK or mishap.get("at", "step") != at or mishap.get("step", step) != step:
            continue
        replaying = "session" in globals() and session.replaying
        if replaying and mishap["what"] != "stop":
            continue
        if "behind" in mishap and not (DIRECTORY / f"mishap{mishap['behind']}").exists():
            continue
        done = DIRECTORY / f"mishap{number}"
        times = len(done.read_text()) if done.exists() else 0
        if times >= mishap.get("times", 1):
            continue
        with done.open("a") as file:
            file.write(".")
        suffer(mishap["what"], times)


def suffer(what: str, times: int) -> None:
    match what:
        case "reset":
            print(f"rank {RANK}: {reset_connections()} connections reset", flush=True)
        case "raise":
            raise ValueError("boom")
        case "raise other":
            raise ValueError(f"boom no. {times}")
        case "raise when saved":
            await_checkpoint()
            raise ValueError("boom")
        case "die when told":
            await_checkpoint()
            (DIRECTORY / f"there{now}").touch()
            while not (DIRECTORY / f"die{now}").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "terminate":
            os.kill(os.getppid(), signal.SIGTERM)
            session._member.watcher.wait_for(lambda view: view.HasField("checkpoint_at"), 60.0)
            global leaves_after
            leaves_after = now
        case "nan":
            global factor
            factor = math.nan
        case "slow":
            time.sleep(0.1)
        case "say":
            print(f"rank {RANK}: step {now}", flush=True)
        case "stop":
            session.stop("enough")
        case "die with the word":
            call = session._member.client.call

            def say_and_die(said: Any, **options: Any) -> Any:
                reply = call(said, **options)
                if isinstance(said, pb.FinishRequest):
                    os.kill(os.getpid(), signal.SIGKILL)
                return reply

            session._member.client.call = say_and_die  # type: ignore[method-assign]


def await_checkpoint() -> None:
    session._member.watcher.wait_for(lambda view: now - now % EVERY in view.checkpoints, 60.0)


def stand_still_once_saved() -> None:
    """Goes on while the version that is agreed on lies ahead: a rank that heard of it late has it moved."""

    def saved(view: Any) -> bool:
        return any(version > leaves_after for version in view.checkpoints)

    def ahead(view: Any) -> bool:
        return view.HasField("checkpoint_at") and view.checkpoint_at > now

    if saved(session._member.watcher.wait_for(lambda view: saved(view) or ahead(view), 60.0)):
        time.sleep(3600.0)


def load(store: CheckpointStore, version: int) -> Any:
    happen("load")
    state = loads(store, version)
    happen("loaded")
    return state


class Part(nn.Module):
    """[B, WIDTH] -> [B, WIDTH]"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.linear(x)))
        if y.requires_grad:
            y.register_hook(lambda _gradient: happen("backward", now))
        return y


now = -1
factor = 1.0
leaves_after = STEPS
loads = CheckpointStore.load
if __name__ == "__main__":
    CheckpointStore.load = load  # type: ignore[method-assign]
    session = swift_ft.Session.from_env(
        seed=5, checkpoint_every=EVERY, replicas=REPLICAS, non_finite_loss=NON_FINITE_LOSS
    )
    torch.manual_seed(session.rank)
    module = Part()
    stage = session.pipeline_stage(module, session.pipeline_rank, session.pipeline_ranks)
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=RATE))
    session.register(schedule=schedule)
    happen("made")

    def train_step(step: int) -> None:
        global now, factor
        now, factor = step, 1.0
        happen("step", step)
        if step > leaves_after:
            stand_still_once_saved()
        generator = torch.Generator().manual_seed(2 * step + session.dp_rank)
        x = torch.randn(BATCH, WIDTH, generator=generator) * factor
        optimizer.zero_grad()
        compute(session, schedule, x)
        norm = session.clip_grad_norm_(module.parameters(), 1.0)
        session.log(norm=norm)
        optimizer.step()

    session.run(train_step, num_steps=STEPS)
    happen("after")
    total = sum(parameter.double().sum().item() for parameter in module.parameters())
    (DIRECTORY / f"saved{RANK}").write_text(f"{session.step} {total!r}")
    session.close()
    sys.stdout.flush()
    os._exit(0)
