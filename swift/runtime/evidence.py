"""For whoever compares two runs: digests of a rank's state, a file for each version, where the environment asks; and
a seat for somebody who looks at each step (`swift-ft verify-determinism`)."""

import json
import os
from pathlib import Path
from typing import Protocol

from swift.runtime.state import TrainerState

ENV_DIGESTS = "SWIFT_DIGESTS"
ENV_DIGESTS_EVERY = "SWIFT_DIGESTS_EVERY"


class Watcher(Protocol):
    """Looks, and changes nothing. Trainer's thread."""

    def step_begins(self, state: TrainerState, rank: int, *, replay: bool) -> None:
        """The trainer's function is next."""

    def before_update(self, state: TrainerState) -> None:
        """Gradients are reduced. With wait-free updates they are applied as well."""

    def step_ended(self, state: TrainerState) -> None:
        """The step is done, and was not dropped."""


_watchers: list[Watcher] = []


def watch(watcher: Watcher) -> None:
    """From here on it is told of every step of this process."""
    _watchers.append(watcher)


def step_begins(state: TrainerState, rank: int, *, replay: bool) -> None:
    for watcher in _watchers:
        watcher.step_begins(state, rank, replay=replay)


def before_update(state: TrainerState) -> None:
    for watcher in _watchers:
        watcher.before_update(state)


def step_ended(state: TrainerState) -> None:
    for watcher in _watchers:
        watcher.step_ended(state)


def write_digests(state: TrainerState, rank: int, recovered_in: int | None = None) -> None:
    """Of the version that the rank is at. `recovered_in`: the generation in whose recovery it has got there."""
    directory = os.environ.get(ENV_DIGESTS)
    if directory:
        recovered = "" if recovered_in is None else f"-g{recovered_in}"
        path = Path(directory) / f"rank{rank}-v{state.version}{recovered}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state.digests()))
        os.replace(temporary, path)


def write_every_version(state: TrainerState, rank: int) -> None:
    """(after each step) The same, where the environment asks for every version."""
    if os.environ.get(ENV_DIGESTS_EVERY):
        write_digests(state, rank)
