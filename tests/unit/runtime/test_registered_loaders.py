"""A registered loader's iterators go on behind whatever the loader is put back to."""

import copy
import random
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, Sampler

from swift_ft import torch_private
from swift_ft.errors import ServiceError, UsageError
from swift_ft.state.carried_gradients import WholeModule
from swift_ft.state.rng import Randomness
from tests.unit.runtime.test_loaders import Noisy
from tests.unit.runtime.wired import state_of, updates_of


class Late(RandomSampler):
    """As accelerate's: its generator is there once it has begun."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = self.generator or torch.Generator()
        self.generator.manual_seed(self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)


class Documents(IterableDataset[Any]):
    """As a stream of documents that are packed: the state is this rank's own, and holds what is left of one."""

    def __init__(self, rank: int) -> None:
        self.rank, self.place, self.buffer = rank, 0, list[int]()

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            length = 3 + (self.place * 7 + self.rank * 3) % 5
            self.buffer += range(self.place * 100, self.place * 100 + length)
            self.place += 1
            while len(self.buffer) >= 4:
                found, self.buffer = self.buffer[:4], self.buffer[4:]
                yield torch.tensor([float(self.rank), *found])

    def state_dict(self) -> dict[str, Any]:
        return {f"rank{self.rank}": {"place": self.place, "buffer": list(self.buffer)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = state[f"rank{self.rank}"]
        self.place, self.buffer = own["place"], list(own["buffer"])


class Stateful(DataLoader[Any]):
    """As torchdata's: a loaded state holds for the next iterator; it is of the last snapshot, and of the batches given
    since; and to be asked for it before there is an iterator makes one."""

    _iterator: Any = None
    _next: Any = None
    EVERY = 3

    def __iter__(self) -> Any:
        if not getattr(self, "_asked", False):
            self._iterator = Iterating(self, self._next)
            self._next = None
        self._asked = False
        if self._iterator.ended:
            self._iterator = Iterating(self, None)
        return self._iterator

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator, self._asked = Iterating(self, self._next), True
        return copy.deepcopy(self._iterator.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self._asked, self._next = None, False, state or None


class Iterating:
    def __init__(self, loader: Stateful, state: Any) -> None:
        self.loader, self.ended = loader, False
        self.stream = isinstance(loader.dataset, IterableDataset)
        if state is None:
            own = loader.dataset.state_dict() if self.stream else None
            state = {
                "dataset": own,
                "since": 0,
                "ended": False,
                "seed": int(torch.empty(()).uniform_(0, 1e6)),
            }
        elif self.stream:
            loader.dataset.load_state_dict(state["dataset"])
        since, self.ended = state["since"], state["ended"]
        self.state = {**state, "since": 0}
        self.inner = iter(loader.dataset) if self.stream else self.shuffled()
        for _ in range(since):
            next(self)

    def shuffled(self) -> Iterator[Any]:
        size = self.loader.batch_size
        assert size is not None
        order = torch.randperm(20, generator=torch.Generator().manual_seed(self.state["seed"])).tolist()
        for place in range(0, 20, size):
            yield torch.stack([self.loader.dataset[index] for index in order[place : place + size]])

    def __iter__(self) -> "Iterating":
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self.inner)
        except StopIteration:
            self.ended = self.state["ended"] = True
            raise
        self.state["since"] += 1
        if self.stream and self.state["since"] == Stateful.EVERY:
            self.state |= {"dataset": self.loader.dataset.state_dict(), "since": 0}
        return batch


@pytest.fixture(autouse=True)
def afterwards() -> Any:
    yield
    torch_private.undo_patches()


class Trainer:
    """One process. `lazily`: it asks for an iterator in its first step."""

    def __init__(self, make: Callable[[int], Any], *, dp_rank: int = 0, lazily: bool = False) -> None:
        self.state = state_of(1, updates_of())
        self.state.randomness = self.state.iterators.randomness = Randomness(5, dp_rank)
        self.state.iterators.install()
        module = nn.Linear(1, 1)
        self.state.add_stage(WholeModule(module))
        self.state.updates.add(torch.optim.SGD(module.parameters()))
        self.loader = make(dp_rank)
        self.state.add_object("loader", self.loader)
        self.epoch = 0
        self.stream = self.batches()
        if not lazily:
            self.iterator = iter(self.loader)
            self.stream = self.eagerly()
        self.state.remember()

    def batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def eagerly(self) -> Iterator[Any]:
        while True:
            yield from self.iterator
            self.iterator = iter(self.loader)

    def step(self, count: int = 1) -> list[torch.Tensor]:
        found = [next(self.stream) for _ in range(count)]
        return [batch.clone() for batch in found]

    def run(self, steps: int) -> list[torch.Tensor]:
        self.state.iterators.install()
        found = []
        for _ in range(steps):
            self.state.begin_step()
            found += self.step()
            found.append(torch.rand(1))  # a mask, behind it
            self.state.end_step()
        return found

    def load(self, state: Any) -> None:
        self.state.iterators.install()
        self.state.load_state_dict(copy.deepcopy(state))

    def drop(self, count: int, *, changed: bool = False) -> None:
        self.state.begin_step()
        for batch in (next(self.stream) for _ in range(count)):
            if changed:
                batch.zero_()
        self.state.drop_step()


class Shuffled(Sampler[int]):
    """Goes on over iterations, by a generator or a counter of its own."""

    def __init__(self, kind: Any) -> None:
        self.rng = kind(1)

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 20


class Counting:
    def __init__(self, count: int) -> None:
        self.count = count

    def shuffle(self, order: list[int]) -> None:
        self.count += 1
        random.Random(self.count).shuffle(order)


def shuffled_by(kind: Any) -> Callable[[int], Any]:
    return lambda _: DataLoader(Noisy(20), batch_size=4, sampler=Shuffled(kind))


LOADERS: dict[str, Callable[[int], Any]] = {
    "plain": lambda _: DataLoader(Noisy(20), batch_size=4, shuffle=True),
    "sampler": lambda rank: DataLoader(
        Noisy(20), batch_size=2, sampler=DistributedSampler(Noisy(20), 2, rank)
    ),
    "late": lambda _: DataLoader(Noisy(20), batch_size=4, sampler=Late(Noisy(20))),
    "generator": lambda rank: DataLoader(
        Noisy(20), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(rank)
    ),
    "numpy's": shuffled_by(np.random.RandomState),
    "numpy's newer": shuffled_by(np.random.default_rng),
    "random's": shuffled_by(random.Random),
    "stateful": lambda _: Stateful(Noisy(20), batch_size=4, shuffle=True),
    "stream": lambda rank: Stateful(Documents(rank), batch_size=1),
    "dataset": Documents,
}


def workers(_: int) -> Any:
    return DataLoader(Noisy(20), batch_size=4, shuffle=True, num_workers=1)


def saved(trainer: Trainer) -> Any:
    return copy.deepcopy(trainer.state.state_dict())


def ran(make: Callable[[int], Any], steps: int = 0, **options: Any) -> Trainer:
    """It has told its state of version 0, and done these steps."""
    trainer = Trainer(make, **options)
    trainer.state.state_dict()
    trainer.run(steps)
    return trainer


def loaded(make: Callable[[int], Any], state: Any, **options: Any) -> Trainer:
    trainer = Trainer(make, **options)
    trainer.load(state)
    return trainer


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """As far as those go that are found."""
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("lazily", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("at", [1, 5, 7])
def test_a_dropped_step_and_another_process_get_the_batches_again(kind: str, lazily: bool, at: int) -> None:
    twin = Trainer(LOADERS[kind], lazily=lazily).run(12)
    first = ran(LOADERS[kind], lazily=lazily)
    assert same(first.run(at), twin), "a state that is asked for changes nothing"
    state = saved(first)
    first.drop(6)
    first.drop(2, changed=True)
    assert same(first.run(12 - at), twin[2 * at :]), "a step was dropped"
    other = loaded(LOADERS[kind], state, lazily=lazily)
    assert same(other.run(12 - at), twin[2 * at :]), "another process"
    first.load(state)
    assert same(first.run(12 - at), twin[2 * at :]), "all go back to a checkpoint"


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("base", "at"), [(0, 3), (3, 9), (5, 5)])
def test_a_copy_of_a_replica_goes_on_with_batches_of_its_own(kind: str, base: int, at: int) -> None:
    """`base`: the version of the rank's own checkpoint."""
    twin = Trainer(LOADERS[kind], dp_rank=1).run(14)
    lost = Trainer(LOADERS[kind], dp_rank=1)
    checkpoints = [saved(lost)]
    if base:
        lost.run(base)
        checkpoints.insert(0, saved(lost))
    source = ran(LOADERS[kind], at)
    joiner = Trainer(LOADERS[kind], dp_rank=1)
    joiner.state.checkpoints = lambda: iter(checkpoints)
    joiner.load(source.state.shared_dict())
    assert same(joiner.run(1), twin[2 * at :])
    state = saved(joiner)
    assert same(joiner.run(1), twin[2 * at + 2 :])
    later = saved(joiner)
    assert same(joiner.run(12 - at), twin[2 * at + 4 :])
    for passed, checkpoint in ((1, state), (2, later)):
        other = loaded(LOADERS[kind], checkpoint, dp_rank=1)
        assert same(other.run(2), twin[2 * (at + passed) :]), "from a checkpoint since"


@pytest.mark.parametrize(
    "change",
    [lambda batch: batch.numpy().__imul__(2), lambda batch: batch.data.mul_(2)],
    ids=["numpy", "data"],
)
def test_a_batch_that_was_changed_behind_its_version_is_drawn_again(change: Callable[[Any], object]) -> None:
    twin = Trainer(LOADERS["plain"]).run(4)
    first = ran(LOADERS["plain"], 2)
    first.state.begin_step()
    change(next(first.stream))
    first.state.drop_step()
    assert same(first.run(2), twin[4:])


def test_what_workers_draw_is_drawn_again() -> None:
    twin = Trainer(workers).run(8)
    first = ran(workers, 6)
    first.drop(1, changed=True)
    other = loaded(workers, saved(first))
    assert same(other.run(2), twin[12:])


@pytest.mark.parametrize("kind", LOADERS)
def test_the_first_step_is_dropped_after_an_iterator_was_made_in_it(kind: str) -> None:
    twin = Trainer(LOADERS[kind], lazily=True).run(4)
    first = ran(LOADERS[kind], lazily=True)
    first.drop(1)
    first.drop(2)
    assert same(first.run(4), twin)


@pytest.mark.parametrize("kind", LOADERS)
def test_a_kept_iterator_goes_back_to_before_its_first_batch(kind: str) -> None:
    """As that of torchtitan's trainer, which takes an end of its data for an error."""
    twin = Trainer(LOADERS[kind], lazily=True).run(3)
    first = Trainer(LOADERS[kind], lazily=True)
    first.stream = (batch for loader in (first.loader,) for batch in loader)
    begun = saved(first)
    first.run(2)
    first.load(begun)
    assert same(first.run(3), twin)


def test_an_iterator_that_has_failed_is_made_again() -> None:
    failing = [False]

    class Failing(Noisy):
        def __getitem__(self, index: int) -> torch.Tensor:
            if failing[0]:
                raise RuntimeError("a worker was killed")
            return super().__getitem__(index)

    def make(_: int) -> Any:
        return DataLoader(Failing(20), batch_size=4, shuffle=True)

    twin = Trainer(make).run(4)
    first = ran(make)
    first.stream = first.iterator
    first.run(2)
    failing[0] = True
    with pytest.raises(RuntimeError, match="a worker was killed"):
        first.drop(1)
    failing[0] = False
    first.state.drop_step()
    assert same(first.run(2), twin[4:])


def test_epochs_of_a_sampler_are_those_of_the_iteration() -> None:
    class Epochs(Trainer):
        def eagerly(self) -> Iterator[Any]:
            while True:
                yield from self.iterator
                self.epoch += 1
                self.loader.sampler.set_epoch(self.epoch)
                self.iterator = iter(self.loader)

    twin = Epochs(LOADERS["sampler"]).run(9)
    first = Epochs(LOADERS["sampler"])
    first.state.state_dict()
    first.run(7)
    other = Epochs(LOADERS["sampler"])
    other.load(saved(first))
    assert same(other.run(2), twin[14:])


def test_a_state_that_leaves_something_out_is_found_out() -> None:
    """What was read ahead, say: the batches behind it are others, and the iteration is drawn from its beginning."""

    class Forgetful(Documents):
        def state_dict(self) -> dict[str, Any]:
            return {f"rank{self.rank}": {"place": self.place, "buffer": []}}

    twin = Trainer(Forgetful).run(14)
    first = ran(Forgetful)
    for _ in range(3):
        first.run(3)
        state = saved(first)
    assert state["objects"]["loader"]["base"]["snapshots"][1:]
    other = loaded(Forgetful, state)
    assert same(other.run(5), twin[18:])


def test_a_state_that_is_whole_is_gone_on_from() -> None:
    drawn = []

    class Counted(Documents):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for batch in super().__iter__():
                drawn.append(batch)
                yield batch

    first = ran(Counted)
    for _ in range(3):
        first.run(10)
        state = saved(first)
    other = Trainer(Counted)
    drawn.clear()
    other.load(state)
    assert len(drawn) == 10, "from the checkpoint before, by which it is known to be whole"


def test_a_sampler_that_counts_iterations_is_drawn_from_the_first_or_found_out() -> None:
    twin = Trainer(shuffled_by(Counting)).run(13)
    first = Trainer(shuffled_by(Counting))
    begun = saved(first)
    first.run(7)
    in_the_second = saved(first)
    first.run(5)

    def joiner(checkpoint: Any) -> Trainer:
        made = Trainer(shuffled_by(Counting))
        made.state.checkpoints = lambda: iter([checkpoint])
        made.load(first.state.shared_dict())
        return made

    assert same(joiner(begun).run(1), twin[24:])
    with pytest.raises(ServiceError, match="does not give again"):
        joiner(in_the_second)


def test_a_registered_dataset_is_pickled_as_what_it_was() -> None:
    copied = ForkingPickler.loads(ForkingPickler.dumps(Trainer(Documents).loader))
    assert type(copied) is Documents
    assert next(iter(copied)).tolist() == next(iter(Documents(0))).tolist()


def test_a_loader_that_stands_in_for_another_is_refused() -> None:
    """As Accelerate's does, which passes itself off as that one's class."""

    class Reading(DataLoader[Any]):
        @property
        def __class__(self) -> Any:
            return DataLoader

    with pytest.raises(UsageError, match="given a Reading, which stands in for another loader"):
        Trainer(lambda _: Reading(Noisy(20)))


def test_a_loader_that_has_begun_and_a_second_iterator_are_refused() -> None:
    loader = LOADERS["stateful"](0)
    iter(loader)
    with pytest.raises(UsageError, match="before it was registered"):
        Trainer(lambda _: loader)
    trainer = Trainer(LOADERS["plain"])
    iterator = trainer.iterator
    kept = iter(trainer.loader)
    with pytest.raises(UsageError, match="one iterator at a time"):
        next(iterator)
    del kept
