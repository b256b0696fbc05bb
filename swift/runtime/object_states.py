"""How registered objects load their states: what they draw meanwhile, and whether they then tell what they were given.

A loader that only draws on cannot go back to an epoch that it has left: `load_state_dict` returns, and its state is
another one. Behind a step that is cut short, or a checkpoint that a survivor loads, it would give other batches. So the
numbers and words of the next state that an object tells are compared with those that it has loaded. (Fractions are
not: a clock need not go back.) That state is the one of the next step's beginning. At no other time is one asked for,
because an object may make an iterator to tell it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from swift.runtime.loading import naming
from swift.runtime.rng import digest_of_states, kept, seed_all

# What default generators are seeded with while an object loads its state.
_LOADING = 0x5EED_10AD
_VALUES_MAX = 2000
_PLAIN = (bool, int, str)


class ObjectStates:
    """Of one rank."""

    def __init__(self) -> None:
        self.drew: list[str] = []
        """Objects that drew random numbers while they loaded their state."""
        self._given: dict[str, dict[str, Any]] = {}
        """By object, of those that have loaded since `compare`: numbers and words of what they were given, by path."""
        self._elsewhere: list[str] = []

    def load(self, name: str, thing: Any, state: Any) -> None:
        """Raises ServiceError, with its name, if it cannot load it."""
        self._given[name] = dict(_plain(state))
        with kept():
            seed_all(_LOADING)
            before = digest_of_states()
            with naming(f"register({name}=...)"):
                thing.load_state_dict(state)
            # An object that keeps generators' states sets them anew.
            set_anew = torch.default_generator.initial_seed() != _LOADING
            if digest_of_states() != before and not set_anew and name not in self.drew:
                self.drew.append(name)

    def compare(self, states: Mapping[str, Any]) -> None:
        """(a step begins) `states`: what all objects tell."""
        loaded, self._given = self._given, {}
        for name, given in loaded.items():
            told = dict(_plain(states[name]))
            path = next((path for path in given if path in told and told[path] != given[path]), None)
            if path is not None:
                self._elsewhere.append(
                    f"register({name}=...) is not at the state that load_state_dict was given: "
                    f"{path.removeprefix('.')} is {told[path]!r:.40}, not {given[path]!r:.40}; an object must load "
                    "earlier states as well as later ones"
                )

    def news(self) -> list[str]:
        """Of those that tell something else than they were given, each time in a line."""
        news, self._elsewhere = self._elsewhere, []
        return news


def _plain(state: Any) -> Iterator[tuple[str, Any]]:
    """By their paths; of a large state only so many."""
    left, count = [("", state)], 0
    while left and count < _VALUES_MAX:
        path, value = left.pop()
        count += 1
        if type(value) in _PLAIN:
            yield path, value
        elif isinstance(value, Mapping):
            left += [(f"{path}.{key}", item) for key, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [(f"{path}.{number}", item) for number, item in enumerate(value[:_VALUES_MAX])]
