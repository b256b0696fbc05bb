"""FSDP2 on session.mesh: two replicas of two shards, or two shards."""

# verdict: same bits
# worlds: 4, 2
# kills: moment, optimizer, tail
# device

import probe
import torch
from torch.distributed.fsdp import fully_shard

import swift_ft

replicas = probe.replicas() // 2
with swift_ft.Session.from_env(replicas=replicas, shards=2, checkpoint_every=5) as session:
    model = probe.net()
    fully_shard(model, mesh=session.mesh)
    session.module(model)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    session.run(probe.usual_step(session, model, optimizer), num_steps=probe.steps())
    probe.end(session, weights=[p.to_local() for p in model.parameters()])
