"""A thread that draws batches ahead, into a queue, from a generator of its own."""

# verdict: named inexact
# worlds: 1, 2
# says: external input 0 of stage 0

import queue
import threading

import numpy as np
import probe
import torch
from torch import nn

import swift_ft


def draw(batches: "queue.Queue[torch.Tensor]", seed: int) -> None:
    rng = np.random.default_rng(seed)
    while True:
        batches.put(torch.from_numpy(rng.normal(size=(16, 8)).astype(np.float32)))


with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    model = session.module(probe.net())
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    batches: queue.Queue[torch.Tensor] = queue.Queue(3)
    threading.Thread(target=draw, args=(batches, session.dp_rank), daemon=True).start()

    def train_step(step: int) -> None:
        x = batches.get()
        probe.descend(step, optimizer, nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)))

    probe.run(session, train_step, model=model, optimizer=optimizer)
