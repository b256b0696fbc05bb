"""weight_norm and spectral_norm by parametrization, and the old spectral_norm: an attribute made by a hook."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    first, second, last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)
    model = session.module(
        nn.Sequential(
            spectral_norm(first), nn.Tanh(), nn.utils.spectral_norm(second), nn.Tanh(), weight_norm(last)
        )
    )
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    probe.run(session, probe.usual_step(session, model, optimizer), model=model, optimizer=optimizer)
