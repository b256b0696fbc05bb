"""Iterators of torch's DataLoader, so that one that is made again gives the same batches.

A DataLoader without a generator of its own draws from the default one when an iterator is made, and while it runs
(shuffling, seeds of workers, a dataset's augmentation). An iterator is made again when a registered object's
`load_state_dict` rebuilds it: in another place, where other numbers would be drawn. So each has a seed of its own, by
which its batches are drawn, one by one; and who makes it again gets the seed of the one that was lost.

A seed is told by where the iterator was made: the step, and its number there. Those that are made before the first
step take theirs from torch's default generator, as the trainer has seeded it.

    (session) ``install`` → (trainer) ``iter(loader)`` …; (state) ``state`` … ``restore``
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from swift.runtime import _torch
from swift.runtime.rng import Randomness, kept, seed_all, seed_for

BEFORE_RUN = -1


class Iterators:
    """Of one rank's data loaders."""

    def __init__(self, randomness: Randomness) -> None:
        self.randomness = randomness
        self.step = BEFORE_RUN
        self._count = 0
        self._born: dict[int, int] = {}
        """Seeds of those that were made before the first step."""
        self._live: dict[tuple[str, int, int], weakref.ref[Any]] = {}
        self._lost: list[tuple[str, int, int]] = []
        """Of the state that was restored; they are to be made again."""

    def install(self) -> None:
        """From here on all loaders of this process are these."""
        _torch.make_iterators_by(self._make)

    def begin_step(self, step: int) -> None:
        self.step, self._count = step, 0

    def state(self) -> list[list[Any]]:
        """(between steps) Those that are under way, in the order in which they were made."""
        under_way = sorted(self._under_way(), key=lambda iterator: iterator[1:])
        return [
            list(iterator)
            for iterator in [*self._lost, *(iterator for iterator in under_way if iterator not in self._lost)]
        ]

    def _under_way(self) -> Iterator[tuple[str, int, int]]:
        for made, reference in list(self._live.items()):
            iterator = reference()
            if iterator is None or iterator._next_data.ended:
                del self._live[made]
            else:
                yield made

    def restore(self, state: list[list[Any]]) -> None:
        """(before objects load their states) What was under way is gone, and will be made again."""
        self._live.clear()
        self._lost = [(str(kind), int(step), int(count)) for kind, step, count in state]

    def _make(self, loader: DataLoader[Any], make: Any) -> Any:
        if loader.generator is not None or torch.utils.data.get_worker_info() is not None:
            return make(loader)
        made = self._number(_kind(loader))
        seed = self._seed(made)
        with kept():
            seed_all(seed)
            iterator = make(loader)
        # What it was called by its class; a persistent loader makes one iterator for all epochs.
        iterator._next_data = _Batches(type(iterator)._next_data, weakref.ref(iterator), seed)
        self._live = {other: it for other, it in self._live.items() if it() is not iterator}
        self._live[made] = weakref.ref(iterator)
        return iterator

    def _number(self, kind: str) -> tuple[str, int, int]:
        lost = next((iterator for iterator in self._lost if iterator[0] == kind), None)
        if lost is not None:
            self._lost.remove(lost)
            return lost
        self._count += 1
        return kind, self.step, self._count - 1

    def _seed(self, made: tuple[str, int, int]) -> int:
        _, step, count = made
        if step != BEFORE_RUN:
            return self.randomness.iterator(step, count)
        if count not in self._born:
            self._born[count] = int(torch.empty((), dtype=torch.int64).random_().item())
        return self._born[count]


class _Batches:
    """In the place of an iterator's way to its next batch."""

    def __init__(self, inner: Any, iterator: "weakref.ref[Any]", seed: int) -> None:
        self._inner, self._iterator, self._seed = inner, iterator, seed
        self._count = 0
        self.ended = False

    def __call__(self) -> Any:
        self._count += 1
        with kept():
            seed_all(seed_for(self._seed, self._count, 0, 0))
            try:
                return self._inner(self._iterator())
            except StopIteration:
                self.ended = True
                raise


def _kind(loader: DataLoader[Any]) -> str:
    sampler = loader.batch_sampler if loader.sampler is None else loader.sampler
    return f"{type(loader.dataset).__qualname__}/{type(sampler).__qualname__}/{loader.batch_size}"
