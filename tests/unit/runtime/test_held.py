"""Generators that registered objects hold: what their states lack is captured besides."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from swift.runtime import held
from swift.runtime.origin_loaders import OriginLoader
from swift.runtime.script import Script
from swift.runtime.state import TrainerState
from swift.runtime.whole_module import WholeModule
from tests.unit.runtime.test_beside import through_json
from tests.unit.runtime.wired import state_of, updates_of

Rng = Callable[[], Any]


def drawn(rng: Any) -> float:
    if isinstance(rng, torch.Generator):
        return float(torch.rand(1, generator=rng))
    return float(rng.random() if hasattr(rng, "random") else rng.random_sample())


class Augmented(Dataset[Any]):
    def __init__(self, rng: Rng) -> None:
        self.rng = rng()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> float:
        return index + (0.0 if self.rng is None else drawn(self.rng))


class Batches:
    """As the documents have it."""

    def __init__(self, rng: Rng) -> None:
        self.dataset, self.epoch, self.place = Augmented(rng), 0, 0
        self.start()

    def seeded(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.epoch)

    def start(self) -> None:
        loader = DataLoader(self.dataset, batch_size=2, shuffle=True, generator=self.seeded())
        self.length, self.iterator = len(loader), iter(loader)

    def __next__(self) -> Any:
        if self.place == self.length:
            self.epoch, self.place = self.epoch + 1, 0
            self.start()
        self.place += 1
        return next(self.iterator)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.start()
        for _ in range(self.place):
            next(self.iterator)


class SeededAgain(Batches):
    """One generator for all epochs, and a position to which it goes only with the next batch: the generator of a state
    that was put into this would shuffle otherwise."""

    def seeded(self) -> torch.Generator:
        self.__dict__.setdefault("generator", torch.Generator()).manual_seed(self.seed())
        return self.generator

    def seed(self) -> int:
        return 100 + self.epoch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.start()
        self.late = self.place

    def __next__(self) -> Any:
        for _ in range(self.__dict__.pop("late", 0)):
            next(self.iterator)
        return super().__next__()


class OfItsRank(SeededAgain):
    rank = 0

    def seed(self) -> int:
        return 1000 * self.rank + self.epoch


class Told(Batches):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rng": self.dataset.rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.dataset.rng.bit_generator.state = state["rng"]


class Ahead(Batches):
    """Where its generator is says nothing of what it has given."""

    def start(self) -> None:
        super().start()
        self.thread = threading.Thread()


def process(loader: Any) -> TrainerState:
    state, module = state_of(1, updates_of()), torch.nn.Linear(1, 1)
    state.add_stage(WholeModule(module))
    state.updates.add(torch.optim.SGD(module.parameters()))
    state.add_object("loader", loader)
    state.remember()
    return state


def step(state: TrainerState, loader: Any) -> Any:
    state.begin_step()
    batch = next(loader)
    state.end_step()
    return batch


RNGS: list[Rng] = [
    lambda: np.random.default_rng(0),
    lambda: np.random.RandomState(0),
    lambda: np.random.Generator(np.random.Philox(0)),
    lambda: np.random.Generator(np.random.SFC64(0)),
    lambda: random.Random(0),
    lambda: torch.Generator().manual_seed(0),
]


KINDS = [*((Batches, rng) for rng in RNGS), (SeededAgain, lambda: None)]


@pytest.mark.parametrize(("kind", "rng"), KINDS)
@pytest.mark.parametrize("done", [2, 5])
def test_another_process_draws_what_the_lost_one_would_have(kind: Any, rng: Rng, done: int) -> None:
    mine, theirs = kind(rng), kind(rng)
    state, other = process(mine), process(theirs)
    first = through_json(state)
    begun = [step(state, mine) for _ in range(done)]
    other.load_state_dict(through_json(state))
    assert other.beside.lost == []
    for _ in range(4):
        assert torch.equal(step(state, mine), step(other, theirs))
    other.load_state_dict(first)  # a survivor goes back to the first version
    for batch in begun:
        assert torch.equal(step(other, theirs), batch)


@pytest.mark.parametrize(("kind", "rng"), KINDS)
def test_a_step_that_is_cut_short_takes_back_what_it_has_drawn(kind: Any, rng: Rng) -> None:
    mine, twin = kind(rng), kind(rng)
    state, other = process(mine), process(twin)
    for number in range(8):
        if number in (2, 3, 6):
            state.begin_step()
            next(mine)
            state.present = True
            state.drop_step()
        assert torch.equal(step(state, mine), step(other, twin))


def test_a_generator_of_each_replica_is_lost_with_it_unless_its_object_seeds_it_anew() -> None:
    seeds = iter([1, 2])
    mine, theirs = (OfItsRank(lambda: np.random.default_rng(next(seeds))) for _ in range(2))
    theirs.rank = 1
    theirs.start()
    state, other = process(mine), process(theirs)
    for _ in range(2):
        step(state, mine)
    saved = through_json(state)
    other.load_state_dict(saved)
    assert other.beside.lost == ["loader.dataset.rng"]
    assert theirs.generator.initial_seed() == 1000
    other.beside.transient.add("rng")
    other.load_state_dict(saved)
    assert other.beside.lost == []


def test_what_a_state_has_is_what_its_object_makes_of_it() -> None:
    mine, theirs = Told(RNGS[0]), Told(RNGS[0])
    state, other = process(mine), process(theirs)
    for _ in range(4):
        step(state, mine)
    other.load_state_dict(through_json(state))
    assert torch.equal(step(state, mine), step(other, theirs))
    assert other.beside.lost == []


class FastForward(Batches):
    """It goes to its epoch by drawing what the epochs before have drawn."""

    def __init__(self, rng: Rng) -> None:
        self.rng, self.epoch, self.place = rng(), 0, 0
        self.order = self.shuffled()

    def shuffled(self) -> list[float]:
        return [drawn(self.rng) for _ in range(6)]

    def __next__(self) -> Any:
        if self.place == 6:
            self.epoch, self.place, self.order = self.epoch + 1, 0, self.shuffled()
        self.place += 1
        return torch.tensor(self.order[self.place - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        while self.epoch < state["epoch"]:
            self.epoch, self.order = self.epoch + 1, self.shuffled()
        self.place = state["place"]


@pytest.mark.parametrize("rng", RNGS)
def test_an_object_that_cannot_go_back_to_an_earlier_epoch_is_named(rng: Rng) -> None:
    mine, theirs = FastForward(rng), FastForward(rng)
    state, other = process(mine), process(theirs)
    first = through_json(state)
    for number in range(7):
        step(state, mine)
        if number in (4, 5):  # the batch behind the sixth one is the first of another epoch
            state.begin_step()
            next(mine)
            state.present = True
            state.drop_step()
            state.begin_step()
            said = " ".join(state.loads.news())
            assert ("register(loader=...)" in said and "epoch is 1, not 0" in said) == (number == 5)
            assert state.loads.news() == []
    other.load_state_dict(through_json(state))  # forward
    step(other, theirs)
    assert other.loads.news() == []
    other.load_state_dict(first)  # a survivor goes back to the first version
    step(other, theirs)
    assert len(other.loads.news()) == 1


class BySeed(Batches):
    """It seeds others by the seed that its own generator had first."""

    def seeded(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.dataset.rng.initial_seed() + self.epoch)


def replica_of(state: TrainerState) -> dict[str, Any]:
    return through_json(state) | {"beside": through_json(state)["beside"] | {"apart": []}}


@pytest.mark.parametrize("kind", [Batches, FastForward])
@pytest.mark.parametrize("rng", RNGS)
@pytest.mark.parametrize("replica", [False, True])
@pytest.mark.parametrize("done", [3, 7, 20])
def test_an_object_that_loads_finds_its_generators_as_they_were(
    kind: Any, rng: Rng, replica: bool, done: int
) -> None:
    mine, theirs = kind(rng), kind(rng)
    state, other = process(mine), process(theirs)
    for number in range(done):
        step(state, mine)
        if number == 4:
            state.begin_step()
            next(mine)
            state.present = True
            state.drop_step()
    other.load_state_dict(replica_of(state) if replica else through_json(state))
    for _ in range(8):
        assert torch.equal(step(state, mine), step(other, theirs))
    assert other.beside.lost == []


def test_the_seed_of_a_generator_is_what_it_was_while_its_object_loads() -> None:
    mine, twin = BySeed(RNGS[-1]), BySeed(RNGS[-1])
    state, other = process(mine), process(twin)
    for number in range(8):
        if number in (2, 4):
            state.begin_step()
            next(mine)
            state.present = True
            state.drop_step()
        assert torch.equal(step(state, mine), step(other, twin))


class SeededInPlace(Batches):
    """By its rank, when an epoch begins."""

    rank = 0

    def start(self) -> None:
        seed = 1000 * self.rank + self.epoch
        rng = self.dataset.rng
        if isinstance(rng, torch.Generator):
            rng.manual_seed(seed)
        elif hasattr(rng, "seed"):
            rng.seed(seed)
        else:
            rng.bit_generator.state = type(rng.bit_generator)(seed).state
        super().start()


@pytest.mark.parametrize(
    "rng", [rng for rng in RNGS if "SFC64" not in str(getattr(rng(), "bit_generator", ""))]
)
def test_a_rank_that_seeds_its_generator_in_place_keeps_its_own_numbers(rng: Rng) -> None:
    """Another one's state begins with the same numbers, and has others since."""
    one, mine, theirs = SeededInPlace(rng), SeededInPlace(rng), SeededInPlace(rng)
    mine.rank = theirs.rank = 1
    ranks = process(one), process(mine), process(theirs)
    for loader in (one, mine, theirs):
        loader.dataset.rng = rng()  # as one that is not seeded before the first epoch
    for state in ranks:
        state.remember()
    for _ in range(5):
        step(ranks[0], one)
        step(ranks[1], mine)
    ranks[2].load_state_dict(replica_of(ranks[0]))
    for _ in range(4):
        assert torch.equal(step(ranks[1], mine), step(ranks[2], theirs))


class AttributesAsItems(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Delegates:
    def __init__(self) -> None:
        self.__dict__["_parts"] = {"a": 1}

    def __getattr__(self, name: str) -> Any:
        return self._parts[name]


class Slots:
    __slots__ = ("a",)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize("make", [lambda: AttributesAsItems(a=1), Delegates, Slots, random.SystemRandom])
def test_objects_of_any_kind_may_be_held(make: Callable[[], Any]) -> None:
    loader = Batches(RNGS[0])
    loader.thing = make()
    loader.dataset.thing = make()
    state = process(loader)
    step(state, loader)
    state.load_state_dict(through_json(state))
    assert state.beside.lost == []


def test_objects_that_draw_ahead_are_left_alone() -> None:
    loader = Ahead(RNGS[0])
    state = process(loader)
    step(state, loader)
    assert state.state_dict()["beside"]["held"] == {}


def test_a_large_object_costs_a_step_little(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Batches(RNGS[0])
    loader.history = [[number] for number in range(100_000)]
    loader.chain = chain = []
    for _ in range(10_000):
        chain.append([])
        chain = chain[0]
    looked: list[Any] = []
    parts_of = held._parts_of
    monkeypatch.setattr(held, "_parts_of", lambda value: looked.append(value) or parts_of(value))
    step(process(loader), loader)
    assert len(looked) < 500


class Counting(Augmented):
    """`draws` is in no state, `position` is; the rest it makes for itself."""

    def __init__(self) -> None:
        super().__init__(RNGS[0])
        self.draws, self.position, self.size = 0, 0, 6
        self.weights = np.zeros(6)
        self.file: Any = None
        self.cache: dict[int, float] = {}

    def __getitem__(self, index: int) -> float:
        self.file = self.file or object()
        self.length = self.size
        self.cache[index] = index
        if self.counts:
            self.draws += 1
            self.weights[index] += 1
        return super().__getitem__(index) + self.draws + self.weights[index] + self.length


class Positioned(Batches):
    def __init__(self, counts: bool) -> None:
        Counting.counts = counts
        super().__init__(Counting)  # type: ignore[arg-type]
        self.dataset = self.dataset.rng  # type: ignore[assignment]
        self.start()

    def __next__(self) -> Any:
        batch = super().__next__()
        self.dataset.position = self.place
        return batch


@pytest.mark.parametrize("counts", [True, False])
def test_numbers_of_a_data_set_that_no_state_has_are_seen_to_change(counts: bool) -> None:
    loader = Positioned(counts)
    state, said = process(loader), list[str]()
    script = Script(
        state.told,
        set(),
        lambda step, words: said.append(words),
        warns=False,
        untellable=state.beside.untellable,
        held=state.beside.held.numbers,
    )

    def train_step(_step: int) -> None:
        assert loader.dataset.position >= 0
        next(loader)

    for number in range(3, 8):  # as in a process that takes over
        script.begin(number, train_step, lambda: (loader,))
        train_step(number)
        script.end(number, checkpoint=True)
    script.look()
    names = "loader.dataset.draws, loader.dataset.weights of the script began anew with the process"
    assert [words.partition(":")[0] for words in said] == ([names] if counts else [])


def test_the_numbers_of_many_data_sets_take_one_state_of_their_object() -> None:
    class Mixed(Batches):
        def __init__(self) -> None:
            super().__init__(lambda: None)
            Counting.counts = True
            self.parts = [Counting() for _ in range(12)]
            self.asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return super().state_dict()

        def __next__(self) -> Any:
            for part in self.parts:
                part[0]
            return super().__next__()

    loader = Mixed()
    state = process(loader)
    numbers = state.beside.held.numbers
    script = Script(state.told, set(), lambda *_: None, warns=False, untellable=dict, held=numbers)

    def train_step(_step: int) -> None:
        next(loader)

    for number in range(6):
        loader.asked = 0
        script.begin(number, train_step, lambda: (loader,))
        train_step(number)
        script.end(number, checkpoint=True)
        assert loader.asked <= 6, "a look asks once"


@pytest.mark.parametrize("kind", [lambda: np.random.default_rng(3), lambda: random.Random(3)])
def test_a_loader_that_is_made_for_another_rank_draws_on_where_this_ranks_own_is(kind: Rng) -> None:
    now = [0]
    loader: Any = OriginLoader(lambda origin: Batches(kind), 0, lambda: now[0])
    state = state_of(1, updates_of())
    state.add_stage(WholeModule(torch.nn.Linear(1, 1)))
    state.add_object("loader", loader)
    state.remember()
    for _ in range(4):
        state.begin_step()
        next(loader)
        state.end_step()
    found = []
    for _ in range(2):
        state.begin_step()
        now[0] = 1
        loader.begin(1)
        state.draw_as_other(["loader"])
        found.append(next(loader))
        now[0] = 0
        state.drop_step()
    state.begin_step()
    assert all(torch.equal(batch, next(loader)) for batch in found[:1])
    assert torch.equal(*found)
