"""Replicas of one version are alike, whichever way each has come to it: nobody can tell a step that was taken back, or
finished late, from one that never began. So a joiner may copy from all of them, and compares what they say.

Legend: B batch, D width.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.state.carried_gradients import WholeModule
from swift_ft.train.config import SessionConfig
from tests.unit.optim import models
from tests.unit.optim.test_journal import Lazy
from tests.unit.runtime.test_replica import copy, same
from tests.unit.runtime.test_updates import HalvingReducer, Reduction
from tests.unit.runtime.wired import state_of, updates_of

B, D = 4, 5


class Part(nn.Module):
    """Uses one layer in even steps alone; keeps statistics in place, and some that it binds anew: one that grows, one
    that becomes a float."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Linear(D, D)
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.norm = nn.BatchNorm1d(D)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("bank", torch.zeros(0, D))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.mean()
        self.bank = torch.cat([self.bank, x.detach().mean(0, keepdim=True)])
        self.seen = self.seen * 0.5 + len(x) / 3
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x + self.sometimes(x) if step % 2 == 0 else x)


class Loader:
    def __init__(self) -> None:
        self.position = 0

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.randn(B, D, generator=torch.Generator().manual_seed(self.position))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Average:
    """Of the weights; there is none before the first step."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.values: list[torch.Tensor] = []

    def update(self) -> None:
        self.values = self.values or [p.detach().clone() for p in self.parameters]
        for value, parameter in zip(self.values, self.parameters, strict=True):
            value.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = [value.clone() for value in state["values"]]


class Slow(HalvingReducer):
    """Averages of buckets are there only once they are waited for, but for the first `done` ones."""

    done = 1 << 30

    def launch(self, bucket: Any) -> Reduction:
        reduction = super().launch(bucket)
        self.done -= 1
        reduction.task = SimpleNamespace(done=self.done >= 0)
        return reduction


class Lost(Exception):
    """A peer is gone."""


class Rank:
    """One replica, with wait-free updates in five buckets."""

    def __init__(self, optimizer: str):
        torch.manual_seed(0)
        self.module, self.reducer = Part(), Slow()
        config = SessionConfig(replicas=2, updates="wait_free", bucket_bytes=4 * D * D + 1)
        self.updates = updates_of(config, self.reducer, vote=self._vote)
        self.fails = False
        self.state = state_of(0, self.updates)
        unit = WholeModule(self.module)
        self.updates.awaited.add(unit)
        self.state.stages.append(unit)
        parameters = list(self.module.parameters())
        self.optimizer = (
            Lazy(parameters) if optimizer == "unknown" else models.make(optimizer, "default", parameters)
        )
        self.updates.add(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average, self.loader = Average(self.module), Loader()
        self.state.add_object("scheduler", self.scheduler)
        self.state.add_object("average", self.average)
        self.state.add_object("loader", self.loader)

    @property
    def applied(self) -> tuple[int, ...]:
        return self.updates.journals[0].applied

    def begin(self) -> torch.Tensor:
        """The loss of the next step, in which the trainer sets a hyperparameter as well."""
        step = self.state.version
        self.state.begin_step()
        self.optimizer.zero_grad()
        self.optimizer.param_groups[0]["weight_decay"] = 0.001 * step
        loss: torch.Tensor = (self.module(next(self.loader), step) - 1).square().sum()
        return loss

    def finish(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.end()

    def end(self) -> None:
        self.scheduler.step()
        self.average.update()
        self.state.end_step()

    def to(self, version: int) -> "Rank":
        while self.state.version < version:
            self.finish(self.begin())
        return self

    # --- who was cut off, and has gone the way that the plan says ---

    def kept(self) -> "Rank":
        """In the forward."""
        self.begin()
        self.state.drop_step()
        return self

    def half_undone(self, buckets: int) -> "Rank":
        """In the backward, while buckets are applied."""
        loss = self.begin()
        self.reducer.done = buckets
        loss.backward()
        self.reducer.done = 1 << 30
        assert 0 < len(self.applied) < len(self.updates.journals[0].buckets)
        self.state.drop_step()
        assert self.updates.standing(self.state.version).undo_to == self.state.version
        self.state.undo()
        return self

    def _vote(self) -> None:
        if self.fails:
            self.updates.voting = True
            assert self.updates.journals[0].complete
            raise Lost

    def all_undone(self) -> "Rank":
        """In the vote; the plan does not go on with the step."""
        self.fails = True
        with pytest.raises(Lost):
            self.finish(self.begin())
        self.fails = False
        self.state.drop_step()
        self.state.undo()
        return self


def joined(sources: list[Rank], name: str) -> Rank:
    """Raises ReplicaDiffers if they are not alike in every bit, or in what there is of a state."""
    joiner, version = Rank(name), sources[0].state.version
    states = [source.state.state_dict() for source in sources]
    received, sent = copy(states, joiner.state.destinations(), version=version)
    assert {one.digest for one in sent} == {received.digest}
    joiner.state.load_state_dict(received.state)
    return joiner


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", [*models.HYPER, "unknown"])
def test_whichever_way_a_rank_has_come_to_a_version(name: str, version: int) -> None:
    ranks = [
        Rank(name).to(version),
        Rank(name).to(version).kept(),
        Rank(name).to(version).all_undone(),
    ]
    if name != "unknown":  # which is one bucket
        ranks.append(Rank(name).to(version).half_undone(3))
        ranks.append(Rank(name).to(version).half_undone(1).half_undone(4))
    joiner = joined(ranks, name)
    twin = Rank(name).to(version + 1)
    for rank in [*ranks, joiner]:  # they do the step that they dropped as who has never dropped it
        assert same(rank.to(version + 1).state.state_dict(), twin.state.state_dict())


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", ["sgd", "adamw", "amsgrad"])
def test_who_finishes_its_step_is_like_who_was_in_the_next_one(name: str, version: int) -> None:
    forward = Rank(name).to(version)
    loss = forward.begin()
    loss.backward()
    forward.updates.reduce()
    forward.updates.voting = True
    assert forward.updates.standing(version).forward_to == version + 1
    kept = Rank(name).to(version + 1).kept()
    undone = Rank(name).to(version + 1).half_undone(2)
    forward.optimizer.step()  # the plan says so
    forward.end()
    ranks = [forward, kept, undone]
    ranks.append(joined(ranks, name))
    twin = Rank(name).to(version + 2)
    assert all(same(rank.to(version + 2).state.state_dict(), twin.state.state_dict()) for rank in ranks)
