"""A collective before `session.run` that a loss interrupts, on a rank that survives it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swift_ft.comm.worker_thread import Task
from swift_ft.errors import ServiceError
from swift_ft.train.set_up import SetUp

KEY = "set-up/world-0/0"


class Store(dict[str, str]):
    """The keys that ranks share."""

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self

    def set(self, key: str, value: str) -> None:
        self[key] = value


class World:
    """Rank 1 of two. A peer dies at the collective's `interrupted`; rank 0 has told of its result before."""

    def __init__(self, interrupted: str) -> None:
        self.store = Store()
        self.ranks, self.label = (0, 1), "world"
        self._interrupted = interrupted
        self.membership = SimpleNamespace(
            generation=1, finished=False, has_run=False, members=lambda: [3, 4], join_newest=lambda: None
        )
        site: Any = SimpleNamespace(rank=1, communicator=SimpleNamespace(store=self.store))
        failures: Any = SimpleNamespace(handle=self._next_generation)
        self.set_up = SetUp(site, self.membership, failures, alone=False)  # type: ignore[arg-type]

    def submit(self, run: Any) -> Task:
        def lose(*_: object) -> None:
            raise RuntimeError("Connection closed by peer")

        calls = {name: lambda *_: None for name in ("reduce", "barrier")} | {self._interrupted: lose}
        task = Task(lambda: run(SimpleNamespace(**calls)))
        task.carry_out()
        return task

    def _next_generation(self, error: Exception, generation: int) -> None:
        assert generation == 1, error
        told = {"name": "reduce", "forms": [], "data": [], "generation": 1, "newest": 4}
        self.store[KEY] = json.dumps(told)
        self.membership.generation = 2

    def reduced(self) -> torch.Tensor:
        result = torch.tensor([1.0])

        def run(collectives: Any) -> None:
            result.fill_(3.0)
            collectives.reduce()

        self.set_up.begin(self, "reduce", [result], run, alike=False).wait()  # type: ignore[arg-type]
        return result


def test_a_rank_that_has_its_result_keeps_it_for_itself_and_its_successor() -> None:
    world = World("barrier")
    assert world.reduced().tolist() == [3.0]
    own = json.loads(world.store[f"{KEY}/1"])
    assert (own["generation"], len(own["data"])) == (1, 1)
    assert json.loads(world.store[KEY])["generation"] == 1


def test_a_rank_that_has_none_says_so() -> None:
    world = World("reduce")
    with pytest.raises(ServiceError, match=r"rank 1 cannot get what dist\.reduce gives it"):
        world.reduced()
