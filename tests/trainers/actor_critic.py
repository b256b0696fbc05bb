"""Actor and critic: the actor learns every second step only (a delayed actor)."""

# verdict: same bits
# worlds: 1, 2

import probe
import torch
from torch import nn

import swift_ft

with swift_ft.Session.from_env(replicas=probe.replicas(), checkpoint_every=5) as session:
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())
    critic = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    session.module(nn.ModuleDict({"actor": actor, "critic": critic}))
    actor_optimizer = session.optimizer(torch.optim.Adam(actor.parameters(), lr=1e-2))
    critic_optimizer = session.optimizer(torch.optim.Adam(critic.parameters(), lr=1e-2))

    def train_step(step: int) -> None:
        x, y = probe.batch(step, session.dp_rank)
        value = critic(torch.cat([x, actor(x).detach()], dim=1))
        critic_loss = nn.functional.mse_loss(value, y)
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        if step % 2 == 1:
            actor_loss = -critic(torch.cat([x, actor(x)], dim=1)).mean()
            actor_optimizer.zero_grad()
            actor_loss.backward()
            actor_optimizer.step()
        probe.note(step, critic_loss)

    session.run(train_step, num_steps=probe.steps())
    probe.end(
        session,
        actor=actor,
        critic=critic,
        actor_optimizer=actor_optimizer,
        critic_optimizer=critic_optimizer,
    )
