"""Digests of a rank's state, for whoever compares two runs: a file for each version, where the environment asks."""

import json
import os
from pathlib import Path

from swift.runtime.state import TrainerState

ENV_DIGESTS = "SWIFT_DIGESTS"
ENV_DIGESTS_EVERY = "SWIFT_DIGESTS_EVERY"


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
