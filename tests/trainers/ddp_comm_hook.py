"""DistributedDataParallel by session.ddp, with gradients compressed to float16 by a communication hook."""

# verdict: refused
# says: has a communication hook (fp16_compress_hook)
# worlds: 2

import probe
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    wrapped = session.ddp(probe.net())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    model = session.module(wrapped)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
