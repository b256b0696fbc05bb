"""Quantization-aware training: observers and fake quantizers keep scales, zero points and switches in buffers."""

# verdict: same bits
# worlds: 1

import warnings

import probe
import torch
from torch import nn

import swift_ft

warnings.simplefilter("ignore")
from torch.ao import quantization  # noqa: E402

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    net = nn.Sequential(
        quantization.QuantStub(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), quantization.DeQuantStub()
    )
    net.qconfig = quantization.get_default_qat_qconfig("x86")
    quantization.prepare_qat(net.train(), inplace=True)
    model = session.module(net)
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))

    def train_step(step: int) -> None:
        x = torch.randn(16, 8)
        if step == 8:
            net.apply(quantization.disable_observer)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        probe.note(step, loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(session, model=model, optimizer=optimizer)
