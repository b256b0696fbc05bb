"""What each benchmark refuses, in one line and before anything runs."""

import pytest

from swift_ft.errors import UsageError
from swift_ft.lab.bench.command import run


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("adaptive --modes quick", "--modes quick: there is no 'quick'; there are fused"),
        ("adaptive --lost one", "--lost one: give STAGE:REPLICA"),
        ("adaptive --lost 9:0", "there is no such rank"),
        ("adaptive --lost 1:0,1:1 --replicas 2", "leave one replica of each stage"),
        ("adaptive --microbatches 2", "at least as many microbatches as stages"),
        ("checkpoint --rounds 0", "must be positive"),
        ("checkpoint --parameters 0", "must be positive"),
        ("checkpoint --directory /nowhere", "--directory /nowhere: "),
        ("checkpoint --formats tar", "there is no 'tar'; there are swift sync"),
        ("checkpoint --formats --sizes 0", "--sizes 0: give numbers above 0"),
        ("checkpoint --formats --sizes nan", "--sizes nan"),
        ("checkpoint --formats --rounds 0", "must be positive"),
        ("checkpoint --formats --directory /nowhere", "--directory /nowhere: "),
        ("coordinator --members=", "give multiples of 8"),
        ("coordinator --members 7", "give multiples of 8"),
        ("coordinator --members 12", "give multiples of 8"),
        ("coordinator --members 8,x", "give multiples of 8"),
        ("coordinator --members 0", "give multiples of 8"),
        ("log --mebibytes 100", "--mebibytes takes a multiple of 64"),
        ("log --rounds 0", "--rounds 1 or more"),
        ("log --json /nowhere/there.json", "--json /nowhere/there.json: give a file"),
        ("overhead --rounds 0", "take 1 or more"),
        ("overhead --slice-steps 0", "take 1 or more"),
        ("overhead --device cuda", "--device cuda: torch finds"),
        ("overhead --paced --size long", "--paced takes neither --size nor --device"),
        ("recovery --kills 0", "--steps of at least 3 times"),
        ("recovery --steps 149", "--steps of at least 3 times"),
    ],
)
def test_what_cannot_be(words: str, problem: str) -> None:
    name, *arguments = words.split()
    with pytest.raises(UsageError) as refused:
        run(name, arguments)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)
