"""Digests of a rank's state, for whoever compares two runs: a file for each version, where the environment asks."""

import json
import os
from pathlib import Path

from swift.runtime.state import TrainerState

ENV_DIGESTS = "SWIFT_DIGESTS"
ENV_DIGESTS_EVERY = "SWIFT_DIGESTS_EVERY"


def every_version() -> bool:
    return bool(os.environ.get(ENV_DIGESTS_EVERY))


def write_digests(state: TrainerState, name: str) -> None:
    directory = os.environ.get(ENV_DIGESTS)
    if directory:
        temporary = (path := Path(directory) / name).with_suffix(".tmp")
        temporary.write_text(json.dumps(state.digests()))
        os.replace(temporary, path)
