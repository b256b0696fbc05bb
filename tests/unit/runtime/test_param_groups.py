"""Optimizers whose parameters have another order, other groups or other hyperparameters than a state's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from swift_ft.errors import UsageError
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.train.training_state import TrainerState, agree_on_groups
from tests.unit.runtime.wired import state_of, updates_of

FORWARDS, BACKWARDS, TWO_GROUPS = [[0, 1, 2, 3]], [[3, 2, 1, 0]], [[0, 1], [2, 3]]


class Process:
    """Layers of one shape, so that no moment fails to fit a parameter that it does not belong to."""

    def __init__(self, groups: list[list[int]] = FORWARDS, *, named: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
        self.named = list(self.model.named_parameters())
        given = self.named if named else [parameter for _, parameter in self.named]
        made: Any = [{"params": [given[number] for number in numbers]} for numbers in groups]
        self.optimizer = torch.optim.AdamW(made, **settings)
        self.state: TrainerState = state_of(0, updates_of())
        self.state.add_stage(WholeModule(self.model))
        self.state.add_optimizer(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.state.add_object("scheduler", self.scheduler)
        self.state.check_complete()
        self.state.remember()
        self.state.begin_step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model(torch.ones(2, 3)) - 1).square().sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.state.end_step()
        self.state.begin_step()

    def bits(self) -> dict[str, list[torch.Tensor]]:
        return {
            name: [
                p.detach().clone(),
                *(torch.as_tensor(v).clone() for v in self.optimizer.state[p].values()),
            ]
            for name, p in self.named
        }


def same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, tensors, other[name])) for name, tensors in one.items())


@pytest.mark.parametrize("named", [False, True])
def test_moments_go_to_the_parameter_of_their_name(named: bool) -> None:
    one, other = Process(FORWARDS, named=named), Process(BACKWARDS, named=named)
    one.step()
    other.state.load_state_dict(copy.deepcopy(one.state.state_dict()))
    assert same(other.bits(), one.bits())
    one.step()
    other.step()
    assert same(other.bits(), one.bits())


# --- replicas ---

Broadcast = Callable[[list[torch.Tensor]], None]


def told_by(first: Process) -> Broadcast:
    """What a replica is told that begins with that one."""
    told: list[torch.Tensor] = []
    agree_on_groups(
        first.state._named_parameters(),
        [first.optimizer],
        lambda tensors: told.extend(map(torch.clone, tensors)),
    )
    values = iter(told)

    def broadcast(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            tensor.copy_(next(values))

    return broadcast


@pytest.mark.parametrize("named", [False, True])
def test_replicas_begin_with_the_order_of_the_first_one(named: bool) -> None:
    first, second = Process(FORWARDS, named=named), Process(BACKWARDS, named=named)
    agree_on_groups(second.state._named_parameters(), [second.optimizer], told_by(first))
    mine, theirs = second.optimizer.state_dict(), first.optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    names = {id(p): name for name, p in second.named}
    assert [names[id(p)] for p in second.optimizer.param_groups[0]["params"]] == [n for n, _ in first.named]


def test_replicas_with_other_groups_are_refused_by_the_first_parameter_that_differs() -> None:
    first, second = Process(TWO_GROUPS), Process()
    with pytest.raises(UsageError, match=r"^0\.2\.weight has .* in another group .* on all replicas$"):
        agree_on_groups(second.state._named_parameters(), [second.optimizer], told_by(first))


def test_so_are_replicas_with_parameters_of_another_type() -> None:
    first, second = Process(), Process()
    second.model[3].double()
    with pytest.raises(UsageError, match=r"^0\.3\.weight has another shape or type"):
        agree_on_groups(second.state._named_parameters(), [second.optimizer], told_by(first))


# --- another script ---


def continued(capsys: pytest.CaptureFixture[str], script: Process) -> str:
    """What is said when a job that began otherwise goes on with this script."""
    job = Process(lr=0.1, weight_decay=0.01)
    for _ in range(2):
        job.step()
    script.state.load_state_dict(copy.deepcopy(job.state.state_dict()))
    assert script.optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
    return capsys.readouterr().err


def test_a_script_as_the_job_began_with_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Although a scheduler has changed the rate since."""
    assert continued(capsys, Process(BACKWARDS, lr=0.1, weight_decay=0.01)) == ""


def test_hyperparameters_that_a_state_wins_over_are_told_once_with_both_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Process(lr=0.4, weight_decay=0.01, betas=(0.5, 0.9))
    assert continued(capsys, script) == (
        "swift: the script has other hyperparameters than when the job began, and what the job has goes on: lr=0.025 "
        "of optimizer 0 (AdamW), not 0.4; betas=(0.9, 0.999) of optimizer 0 (AdamW), not (0.5, 0.9); "
        "initial_lr=0.1 of optimizer 0 (AdamW), not 0.4; to change them, set them in train_step, from a step on\n"
    )
    script.state.load_state_dict(copy.deepcopy(script.state.state_dict()))
    assert capsys.readouterr().err == ""


def test_other_groups_are_told_too(capsys: pytest.CaptureFixture[str]) -> None:
    said = continued(capsys, Process(TWO_GROUPS, lr=0.1, weight_decay=0.01))
    assert "goes on: the parameters of optimizer 0 (AdamW); " in said
