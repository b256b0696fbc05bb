"""A state is copied between real processes over gloo, and interrupted: by a call, and by a real SIGKILL."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.forked import Forked, Forks, meeting, new_store
from tests.integration.replica_world import digest_of, make_state
from tests.patience import eventually

DEADLINE_S = 60.0


class World:
    """Starts ranks, reads what they said."""

    def __init__(self, place: Path, forks: Forks) -> None:
        self.place = place
        self._forks = forks
        self._store = new_store()
        self.processes: list[Forked] = []

    def start(self, rank: int, world: int, case: str) -> Forked:
        words = [rank, world, self.place, case]
        self.processes.append(self._forks.run("tests.integration.replica_world", words, meeting(self._store)))
        return self.processes[-1]

    def said(self, name: str, rank: int) -> dict[str, Any]:
        path = self.place / f"{name}-{rank}"
        eventually(path.exists, lambda: f"{path.name}, and not {list(self.place.iterdir())}", DEADLINE_S)
        return dict(json.loads(path.read_text()))


@contextmanager
def world_in(place: Path, forks: Forks) -> Iterator[World]:
    world = World(place, forks)
    try:
        yield world
    finally:
        for process in world.processes:
            process.kill()


def test_a_copy_that_is_called_off_writes_nothing_more(tmp_path: Path, forks: Forks) -> None:
    with world_in(tmp_path, forks) as world:
        for rank in range(2):
            world.start(rank, 2, "interrupted")
        assert world.said("failed", 1)["kind"] == "Interrupted"
        assert world.said("failed", 0)["kind"] == "RuntimeError"
        assert world.said("untouched", 1) == {"all": True}
        assert [process.wait(20) for process in world.processes] == [0, 0]


def test_a_source_dies_and_another_one_takes_over(tmp_path: Path, forks: Forks) -> None:
    with world_in(tmp_path, forks) as world:
        for rank in range(3):
            world.start(rank, 3, "source_dies")
        assert world.processes[0].wait(60) == -9
        assert (
            world.said("failed", 2)["kind"] == "RuntimeError"
        )  # without a notice: it was in touch with the dead
        world.start(0, 3, "replacement")
        (tmp_path / "notice").touch()
        for joiner in (0, 2):
            assert world.said("received", joiner)["digest"] == digest_of(make_state(1))
        for rank in range(3):
            assert world.said("threads", rank) == {"names": ["MainThread"]}
        assert [process.wait(20) for process in world.processes[1:]] == [0, 0, 0]
