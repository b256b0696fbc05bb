"""Two stages, a script that a spare runs before it is needed: `warmed_up.py MODE STEPS`.

plain     changes what a process has: its directory, environment, path, a signal's handler, torch's settings, streams
raises, exits, ends, hangs    a warm-up does not come far enough
once    it cannot begin a second time in one process
patches   it changes a function of torch's, once more each time
thread, workers, keeps    it leaves a thread, processes, or its model behind
forks     it forks a process that ends itself
"""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.distributed.pipelining import ScheduleGPipe

import swift_ft

MODE, STEPS = sys.argv[1], int(sys.argv[2])
WIDTH, BATCH = 16, 8
OUT = Path(os.environ["SWIFT_DIGESTS"])
FOUND = {
    "warming": swift_ft.is_warming_up(),
    "rank": int(os.environ["RANK"]),
    "cwd": os.getcwd(),
    "path0": sys.path[0],
    "mine": os.environ.get("STRANGERS"),
    "handler": repr(signal.getsignal(signal.SIGUSR1)),
    "precision": torch.get_float32_matmul_precision(),
    "master": "MASTER_ADDR" in os.environ,
    "stderr": type(sys.stderr).__name__ + getattr(sys.stderr, "name", ""),
    "drawn": torch.rand(1).item(),
}
with (OUT / f"found-{os.getpid()}").open("a") as file:
    file.write(json.dumps(FOUND) + "\n")
print(f"trainer: warming={swift_ft.is_warming_up()}", file=sys.stderr)

if MODE == "once":
    torch.library.define("stranger::op", "(Tensor x) -> Tensor")
if MODE == "forks" and os.fork() == 0:
    sys.exit(0)
if MODE == "patches":
    linear = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *args: linear(*args) * 0.5
if MODE == "thread":
    threading.Thread(
        target=threading.Event().wait if swift_ft.is_warming_up() else print, name="mine"
    ).start()
if MODE == "workers" and swift_ft.is_warming_up():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
if swift_ft.is_warming_up():
    if MODE == "raises":
        raise ValueError("not without the others")
    if MODE == "ends":
        sys.exit(0)
    if MODE == "exits":
        os._exit(7)
    if MODE == "hangs":
        time.sleep(600)


def main() -> None:
    session = swift_ft.Session.from_env(checkpoint_every=4, metrics_listen="127.0.0.1:0")
    rank, ranks = session.pipeline_rank, session.pipeline_ranks
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.1))
    stage = session.pipeline_stage(module, rank, ranks)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = session.optimizer(torch.optim.AdamW(module.parameters(), lr=1e-2))
    session.register(schedule=schedule)
    seen: dict[int, float] = {}

    def step(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x, y = (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(2))
        optimizer.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == ranks - 1 else {}))
        session.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        assert not swift_ft.is_warming_up(), "a warm-up goes no further than to the update"
        seen[number] = sum(p.detach().double().sum().item() for p in module.parameters())

    if MODE == "keeps":
        signal.kept = module  # type: ignore[attr-defined]
    if MODE == "plain":
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        os.chdir("/")
        os.environ["STRANGERS"] = "here"
        sys.path.insert(0, "/nowhere")
        signal.signal(signal.SIGUSR1, lambda *_: None)
        torch.set_float32_matmul_precision("high")
    with session:
        session.run(step, STEPS)
    (OUT / f"bits-{rank}.json").write_text(json.dumps({str(n): value.hex() for n, value in seen.items()}))


if __name__ == "__main__":
    main()
