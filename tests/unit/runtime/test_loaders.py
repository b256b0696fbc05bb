"""A data loader's iterator that is made again gives the batches of the one that was lost."""

import copy
import random
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from swift_ft import torch_private
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.rng import Randomness
from swift_ft.train.training_state import TrainerState
from tests.unit.runtime.wired import state_of, updates_of


class Noisy(Dataset[Any]):
    """Augmented by everything that people draw from."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()])


class Data:
    there: ClassVar["weakref.WeakSet[Data]"] = weakref.WeakSet()

    def __init__(self, eager: bool, length: int = 12, **options: Any) -> None:
        self.there.add(self)
        self.loader = DataLoader(Noisy(length), batch_size=4, **options)
        self.epoch = self.position = 0
        self.eager = eager
        self.it: Any = iter(self.loader) if eager else None

    def __next__(self) -> torch.Tensor:
        if self.it is None:
            self.it = iter(self.loader)
            for _ in range(self.position):
                next(self.it)
        try:
            batch = next(self.it)
        except StopIteration:
            self.epoch, self.position, self.it = self.epoch + 1, 0, iter(self.loader)
            batch = next(self.it)
        self.position += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self.it = state["epoch"], state["position"], None
        if self.eager:
            self.it = iter(self.loader)
            for _ in range(self.position):
                next(self.it)


@pytest.fixture(autouse=True)
def afterwards() -> Any:
    yield
    torch_private.undo_patches()
    # Freed one by one, iterators end their workers at once. The collector of cycles ends the queues to the workers
    # first, and torch waits 5 s for each of them.
    for data in list(Data.there):
        data.it = data.loader._iterator = None


def make(
    eager: bool, others: Callable[[], dict[str, Any]] = dict, **options: Any
) -> tuple[TrainerState, Data]:
    torch.manual_seed(3)
    state = state_of(1, updates_of())
    state.randomness = state.iterators.randomness = Randomness(5, 1)
    state.iterators.install()
    module = nn.Linear(1, 1)
    state.add_stage(WholeModule(module))
    state.updates.add(torch.optim.SGD(module.parameters()))
    if options.pop("weighted", False):
        options["sampler"] = WeightedRandomSampler([1.0] * 12, 12)
    data = Data(eager, **options)
    for name, one in {"data": data, **others()}.items():
        state.add_object(name, one)
    state.remember()
    return state, data


def run(state: TrainerState, data: Any, count: int) -> list[torch.Tensor]:
    found = []
    state.iterators.install()
    for _ in range(count):
        state.begin_step()
        batch = next(data)
        found.append(torch.cat([batch.flatten(), torch.rand(2).double()]))  # a mask, behind it
        state.end_step()
    return found


def comes_back(
    made: Callable[[], tuple[TrainerState, Any]],
    at: int,
    of: int,
    drop: Callable[[Any], Any],
    *,
    placed: bool = True,
) -> None:
    """After `at` of the steps, one that is dropped and another process go on with the batches of a run of them all.

    `placed`: loaders stay at their places in what is registered.
    """

    def told(state: TrainerState) -> list[Any]:
        return [iterator if placed else iterator[:3] for iterator in state.state_dict()["iterators"]]

    twin = run(*made(), of)
    state, data = made()
    assert all(map(torch.equal, run(state, data, at), twin))
    saved, before = copy.deepcopy(state.state_dict()), told(state)
    state.begin_step()
    drop(data)
    state.drop_step()
    assert told(state) == before
    assert all(map(torch.equal, run(state, data, of - at), twin[at:])), "a step was dropped"
    other, theirs = made()
    other.load_state_dict(saved)
    assert told(other) == before
    assert all(map(torch.equal, run(other, theirs, of - at), twin[at:])), "another process"


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {"weighted": True},
        {"shuffle": True, "num_workers": 1},
        {"shuffle": True, "num_workers": 1, "persistent_workers": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "lazy"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_rebuilt_iterator_gives_the_same_batches(options: dict[str, Any], eager: bool, at: int) -> None:
    def drop(data: Data) -> None:  # goes on into another epoch
        next(data), next(data), next(data)

    comes_back(lambda: make(eager, **options), at, 8, drop)


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "lazy"])
@pytest.mark.parametrize("held", ["apart", "in one"])
@pytest.mark.parametrize("at", range(1, 8))
def test_two_loaders_that_look_alike_keep_their_own_numbers(eager: bool, held: str, at: int) -> None:
    """Of different lengths, so that the one that was made first is not always the older one."""

    class Both:
        def __init__(self) -> None:
            self.parts = {"a": Data(eager, 8, shuffle=True), "b": Data(eager, 20, shuffle=True)}

        def __next__(self) -> torch.Tensor:
            return torch.cat([next(part) for part in self.parts.values()])

        def state_dict(self) -> dict[str, Any]:
            return {name: part.state_dict() for name, part in self.parts.items()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])

    def made() -> tuple[TrainerState, Both]:
        found: list[Both] = []

        def others() -> dict[str, Any]:
            found.append(Both())
            return {"both": found[0]} if held == "in one" else dict(found[0].parts)

        state, _ = make(False, others)
        return state, found[0]

    def drop(both: Both) -> None:
        next(both.parts["b"]), next(both.parts["a"])

    comes_back(made, at, 9, drop)


def test_a_state_of_before_places_were_told_is_read() -> None:
    state, data = make(False, shuffle=True)
    run(state, data, 2)
    saved = copy.deepcopy(state.state_dict())
    assert [made[3:] for made in saved["iterators"]] == [["data.loader"]]
    twin = run(state, data, 3)
    saved["iterators"] = [made[:3] for made in saved["iterators"]]
    other, theirs = make(False, shuffle=True)
    other.load_state_dict(saved)
    assert all(map(torch.equal, run(other, theirs, 3), twin))


def test_epochs_are_shuffled_apart_and_ranks_of_a_pipeline_alike() -> None:
    state, data = make(False, shuffle=True)
    batches = run(state, data, 6)
    first, second = (torch.cat([b[:16:4] for b in batches[i : i + 3]]) for i in (0, 3))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(12))
    assert first.tolist() != second.tolist()


class Foreign(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: it makes its iterator in its own way, and tells the seed of its workers."""

    def __iter__(self) -> Any:
        self.made = self._get_iterator()
        return self.made

    def state_dict(self) -> dict[str, Any]:
        return {"base_seed": self.made._base_seed} if self.num_workers else {}


class Holder:
    def __init__(self, workers: int) -> None:
        self.loader = Foreign(Noisy(), num_workers=workers)
        self.it = iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.it = iter(self.loader)


def test_the_seed_of_its_workers_is_the_same_on_all_replicas_and_another_one_for_each_iterator() -> None:
    told = []
    for dp_rank in range(2):
        state, _ = make(False)
        state.randomness = state.iterators.randomness = Randomness(5, dp_rank)
        state.begin_step()
        torch.rand(dp_rank)
        told.append([Holder(1).state_dict()["base_seed"] for _ in range(2)])
    assert told[0] == told[1]
    assert told[0][0] != told[0][1]


def test_a_loader_with_a_generator_of_its_own_is_left_alone() -> None:
    state, _ = make(False)
    loader = DataLoader(Noisy(), shuffle=True, generator=torch.Generator().manual_seed(1))
    one = [int(batch[0, 0]) for batch in loader]
    again = DataLoader(Noisy(), shuffle=True, generator=torch.Generator().manual_seed(1))
    assert [int(batch[0, 0]) for batch in torch_private._iter(again)] == one
    assert state.iterators.state() == []


class Phases:
    """A curriculum: each phase has a loader of its own, and what goes on later makes only the present one again."""

    def __init__(self) -> None:
        self.loaders: list[Any] = []
        self.start(0)

    def start(self, phase: int) -> None:
        self.phase, self.place = phase, 0
        self.loaders.append(DataLoader(Noisy(), batch_size=4, shuffle=True))
        self.iterator = iter(self.loaders[-1])

    def __next__(self) -> torch.Tensor:
        if self.place == 3:
            self.start(self.phase + 1)
        self.place += 1
        return next(self.iterator)  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, int]:
        return {"phase": self.phase, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaders = []
        self.start(state["phase"])
        for _ in range(state["place"]):
            next(self)


@pytest.mark.parametrize("at", range(1, 8))
def test_a_loader_that_is_made_again_at_another_place_has_its_own_numbers(at: int) -> None:
    def made() -> tuple[TrainerState, Phases]:
        torch.manual_seed(3)
        phases: list[Phases] = []

        def others() -> dict[str, Any]:
            phases.append(Phases())
            return {"phases": phases[0]}

        state, _ = make(False, others)
        return state, phases[0]

    comes_back(made, at, 10, next, placed=False)


def test_persistent_workers_are_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    state, data = make(False, shuffle=True, num_workers=1, persistent_workers=True)
    run(state, data, 7)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "persistent_workers" in line]
    assert line.startswith(
        "swift: a DataLoader has persistent_workers=True: with a session its workers start anew"
    )
