"""Randomness from a counter, so that replay needs no history.

The default generators of torch, `random` and numpy are seeded per (seed, step, stage, microbatch) before each forward
and backward. So the bits depend neither on the schedule, nor on earlier work, nor on the rank that computes the
microbatch. Activation checkpointing saves and restores torch's state around its recomputation, so it sees the same
bits. Numbers that a trainer draws outside of the stages follow from (seed, step, dp_rank), at the step's begin and
after each call of a schedule. So the ranks of one pipeline draw the same ones, as with one `torch.manual_seed`.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from swift_ft.device import generator_states, seed_generators, set_generator_states

_MASK = (1 << 64) - 1
# Stage index that no stage has, for the seed of numbers drawn outside of stages.
OUTSIDE_STAGES = 0xFFFF_FFFF
# Added to a stage's index: the kind of computation.
_BACKWARD, _WEIGHTS, _WHOLE, _ITERATOR = (kind << 33 for kind in range(1, 5))
# Gives microbatches of different data-parallel ranks different randomness.
_DP_RANK_BITS = 40


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): every input bit reaches every output bit."""
    value = (value + 0x9E37_79B9_7F4A_7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return value ^ (value >> 31)


def seed_for(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Returns the generator seed of one forward: a 63-bit integer, different for every coordinate."""
    value = _mix(seed & _MASK)
    for part in (step, stage, microbatch):
        value = _mix(value ^ (part & _MASK))
    return value >> 1


def seed_all(seed: int) -> None:
    """Seeds every default generator of the host, and that of the current accelerator if one is in use.

    numpy's gets 32 bits of the seed: with more it runs a longer code path, which is in no cache after a stage has
    computed (140 µs instead of 40).
    """
    seed_generators(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)


class Randomness:
    """The default generators of one rank.

    (engine) ``begin_step(step)`` before the trainer's step; (channel) ``forward``, ``backward``, ``weights`` of stages,
    ``outside`` after a schedule; (whole modules) ``whole``
    """

    def __init__(self, seed: int, dp_rank: int):
        self._seed = seed
        self.dp_rank = dp_rank
        """Data-parallel rank whose batch is computed."""
        self.step = 0
        self._calls = 0

    def _set(self, stage: int, count: int) -> None:
        seed_all(self.seed(self.step, stage, count))

    def seed(self, step: int, stage: int, count: int) -> int:
        return seed_for(self._seed, step, stage, self.dp_rank << _DP_RANK_BITS | count)

    def begin_step(self, step: int) -> None:
        """Seeds the generators for the trainer's own code at the step's begin."""
        self.step, self._calls = step, 0
        self._set(OUTSIDE_STAGES, 0)

    def outside(self) -> None:
        """Seeds the generators for the trainer's own code after a schedule has returned."""
        self._calls += 1
        self._set(OUTSIDE_STAGES, self._calls)

    def forward(self, stage: int, microbatch: int) -> None:
        self._set(stage, microbatch)

    def backward(self, stage: int, microbatch: int) -> None:
        self._set(stage + _BACKWARD, microbatch)

    def weights(self, stage: int, microbatch: int) -> None:
        """Seeds the generators for the second part of a backward that is split in two."""
        self._set(stage + _WEIGHTS, microbatch)

    def whole(self, module: int, count: int) -> None:
        """Seeds the generators for a whole module's forward with that number in this step."""
        self._set(module + _WHOLE, count)

    def iterator(self, step: int, count: int) -> int:
        """Returns the seed of a data loader's iterator, the one created with that number in that step."""
        return self.seed(step, _ITERATOR, count)

    def workers(self, step: int, count: int) -> int:
        """Returns the seed for an iterator's own state: equal on all data-parallel ranks."""
        return seed_for(self._seed, step, _ITERATOR, count)

    def digest(self, step: int) -> str:
        """Returns the SHA-256 of the states with which all generators begin that step."""
        with kept():
            mine = Randomness(self._seed, self.dp_rank)
            mine.begin_step(step)
            return digest_of_states()


def digest_of_states() -> str:
    """Returns the SHA-256 of the default generators' states: of torch on each device, of `random`, of numpy."""
    return hashlib.sha256(b"".join(_states().values())).hexdigest()


def digests_of_states() -> dict[str, str]:
    """Returns one digest per generator: "torch" (and "torch.device0", …), "random", "numpy"."""
    return {word: hashlib.sha256(state).hexdigest()[:32] for word, state in _states().items()}


def _states() -> dict[str, bytes]:
    words = ["torch", *(f"torch.device{n}" for n in range(len(generator_states()) - 1))]
    found = {word: state.numpy().tobytes() for word, state in zip(words, generator_states(), strict=True)}
    found["random"] = repr(random.getstate()).encode()
    parts = np.random.get_state(legacy=True)
    found["numpy"] = b"".join(p.tobytes() if isinstance(p, np.ndarray) else repr(p).encode() for p in parts)
    return found


@contextmanager
def kept() -> Iterator[None]:
    """Restores the default generators at the end of the block."""
    ours, theirs, tensors = random.getstate(), np.random.get_state(), generator_states()
    try:
        yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
        set_generator_states(tensors)


def calls_of_generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Returns what gets and sets a generator's state, None for another value."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    if isinstance(value, np.random.Generator):
        inner = value.bit_generator
        return lambda: inner.state, lambda state: setattr(inner, "state", state)
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    return None
