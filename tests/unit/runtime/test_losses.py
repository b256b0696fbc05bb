"""A loss that is not finite."""

from types import SimpleNamespace

import pytest
import torch

from swift_ft.device import Readings
from swift_ft.errors import NonFiniteLoss
from swift_ft.train.step_digests import Witness, watch_forwards
from swift_ft.train.transcript import LOSS, OUTPUT
from swift_ft.train.updates import Losses

BAD = torch.tensor(float("nan"))
GOOD = torch.tensor(1.5)


def witness_of(choice: str, *, replaying: bool = False) -> Witness:
    losses = Losses(choice, SimpleNamespace(rank=3, replaying=replaying, readings=Readings()))
    return Witness(lambda step, words: None, lambda: False, losses.check)


def test_it_is_said_where_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    witness = witness_of("warn")
    for step, losses in enumerate([[GOOD], [GOOD, BAD, BAD], [BAD], [GOOD], [torch.tensor(float("inf"))]]):
        witness.begin(step)
        for microbatch, loss in enumerate(losses):
            witness.saw(LOSS, 1, microbatch, 0, loss)
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        "swift: rank 3: the loss of microbatch 1 of step 1 is nan",
        "swift: rank 3: the loss of microbatch 0 of step 4 is inf",
    ]


def test_it_may_end_the_job_or_be_nobodys_business(capsys: pytest.CaptureFixture[str]) -> None:
    witness = witness_of("fail")
    witness.begin(7)
    witness.saw(LOSS, 1, 2, 0, GOOD)
    with pytest.raises(NonFiniteLoss, match="the loss of microbatch 2 of step 7 is nan") as caught:
        witness.saw(LOSS, 1, 2, 0, torch.stack([GOOD, BAD]))
    assert caught.value.exit_code == 1
    witness_of("ignore").saw(LOSS, 1, 2, 0, BAD)
    assert capsys.readouterr().err == ""


def test_what_a_module_returns_as_its_loss_counts_and_nothing_else_does() -> None:
    witness = witness_of("fail")
    witness.saw(OUTPUT, 0, 0, 0, torch.stack([GOOD, BAD]))  # logits: a mask may well be infinite
    witness.saw(OUTPUT, 0, 0, 1, torch.tensor(3))
    with torch.no_grad():
        witness.saw(LOSS, 0, 0, 0, BAD)  # a validation
    witness_of("fail", replaying=True).saw(LOSS, 0, 0, 0, BAD)  # it went on, the first time
    with pytest.raises(NonFiniteLoss, match="output 1 of the module"):
        witness.saw(OUTPUT, 0, 1, 1, BAD)


class WithLoss(torch.nn.Module):
    """A whole module that computes its loss, as those of transformers do."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.linear, self.alone = torch.nn.Linear(2, 3), alone

    def forward(self, x: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        logits = self.linear(x)
        return logits.mean() if self.alone else {"logits": logits, "loss": logits.mean()}


@pytest.mark.parametrize(("alone", "which"), [(True, 0), (False, 1)])
def test_a_forward_that_returns_its_loss_is_looked_at(alone: bool, which: int) -> None:
    witness, module = witness_of("fail"), WithLoss(alone=alone)
    watch_forwards(module, lambda: witness)
    witness.begin(4)
    module(torch.ones(1, 2))
    with torch.no_grad():
        module(BAD.expand(1, 2))  # a validation
    with pytest.raises(
        NonFiniteLoss, match=f"output {which} of the module in its forward 1 of step 4 is nan"
    ):
        module(BAD.expand(1, 2))


def test_what_comes_of_a_lost_peer_is_no_loss() -> None:
    losses = Losses("fail", SimpleNamespace(rank=0, replaying=False, readings=Readings()))
    broken = Witness(lambda step, words: None, lambda: True, losses.check)
    broken.saw(LOSS, 0, 0, 0, BAD)
